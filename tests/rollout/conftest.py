"""A scripted model endpoint on a unix socket: the one fake of these tests. It answers the Messages API with the given content blocks."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gyre_lib.rollout.execution import LaunchOrder


@dataclass
class ScriptedEndpoint:
    socket: Path
    script: list
    """Content blocks of each reply in turn, or an int: an error status. The last one repeats."""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def handler_of(endpoint: ScriptedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return "sandbox"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            step = endpoint.script[min(len(endpoint.requests), len(endpoint.script) - 1)]
            endpoint.requests.append(body)
            endpoint.headers.append(dict(self.headers))
            if callable(step):
                step = step()
            if isinstance(step, int):
                self._send(step, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
            else:
                stop = "tool_use" if any(block["type"] == "tool_use" for block in step) else "end_turn"
                self._send(200, {"id": "msg_1", "role": "assistant", "content": step, "stop_reason": stop})

        def _send(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            if status != 200:
                self.send_header("retry-after", "0.01")
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Callable[..., ScriptedEndpoint]]:
    servers = []

    def start(*script: object) -> ScriptedEndpoint:
        made = ScriptedEndpoint(tmp_path / f"proxy-{len(servers)}.sock", list(script))
        server = UnixServer(str(made.socket), handler_of(made))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return made

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def shell(command: str) -> list[dict]:
    return [{"type": "tool_use", "id": "call_1", "name": "shell", "input": {"command": command}}]


DONE = [{"type": "text", "text": "Done."}]


def order(endpoint: ScriptedEndpoint, task: Path, **changes: object) -> LaunchOrder:
    return LaunchOrder(
        **{
            "execution_id": "x1",
            "group_id": "g1",
            "task_path": str(task),
            "token": "key-1",
            "proxy_socket": str(endpoint.socket),
            **changes,
        }
    )
