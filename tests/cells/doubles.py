"""What stands around the ranks under test: a coordinator that obeys the test, and an engine that only remembers what it was told."""

import contextlib
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gyre_lib.training.micro_steps import Closed, MicroStep, to_arrow
from gyre_lib.training.packing import PackingBuffer


class _Server(ABC):
    """An HTTP server on 127.0.0.1 whose requests are answered by `self.answer(method, path, query, body) -> (status, headers, bytes)`."""

    def __init__(self, port: int = 0) -> None:
        outer = self
        self._connections: list[socket.socket] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                try:
                    status, headers, content = outer.answer(self.command, url.path, query, json.loads(body) if body else {})
                except Exception as error:
                    status, headers, content = 500, {}, repr(error).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _serve

            def log_message(self, *arguments: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # a rank that was killed breaks its connection
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @abstractmethod
    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""

    def stop(self) -> None:
        """As if the process had died: open connections break."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class CoordinatorDouble(_Server):
    """Queues commands, collects reports, gives out one batch from a real packing buffer."""

    def __init__(self, port: int = 0, life: str = "1", ranks_per_cell: int = 1) -> None:
        self.life = life
        self.ranks_per_cell = ranks_per_cell
        self.packing: PackingBuffer | None = None
        self.ready: set[tuple[int, int]] = set()
        self.reports: dict[tuple[int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
        self.resent: list[str] = []
        self.claimed_by: dict[str, int] = {}
        self._commands: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._seq = int(time.time() * 1000)
        self._changed = threading.Condition()
        super().__init__(port)

    def send(self, cell: int, command_id: str, kind: str, **arguments: Any) -> None:
        with self._changed:
            self._seq += 1
            self._commands[cell].append({"seq": self._seq, "id": command_id, "kind": kind, **arguments})
            self._changed.notify_all()

    def wait(self, cell: int, command_id: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """The reports of all ranks of the cell, by shard."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.reports[cell, command_id]) == self.ranks_per_cell, timeout_s)
            assert done, f"cell {cell} did not report {command_id}"
            return [report for _, report in sorted(self.reports[cell, command_id].items())]

    def run(self, cell: int, command_id: str, kind: str, **arguments: Any) -> dict[str, Any]:
        """The first rank's report of a command that succeeds on every rank."""
        self.send(cell, command_id, kind, **arguments)
        reports = self.wait(cell, command_id)
        assert all(report["ok"] for report in reports), [report["error"] for report in reports]
        return reports[0]

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        status, headers, content = self._answer(path, query, body)
        return status, {"x-gyre-life": self.life, **headers}, content

    def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        with self._changed:
            if parts[0] == "cells":
                return self._cell(int(parts[1]), parts[2], query, body)
            if path == "/micro_steps/claim":
                claimed = self._claim(body["cell"])
                if isinstance(claimed, MicroStep):
                    self.claimed_by[claimed.micro_step_id] = body["cell"]
                    return 200, {}, to_arrow(claimed)
                if isinstance(claimed, Closed):
                    return 410, {}, json.dumps({"executions": claimed.executions}).encode()
                return 204, {"x-gyre-wait-s": "0.02"}, b""
            assert path == "/micro_steps/done"
            self.packing.done(body["micro_step_id"], body["cell"], 0.0, body["stats"])
            return 200, {}, b"{}"

    def _claim(self, cell: int) -> Any:
        return self.packing.claim(cell, 0.0)

    def _cell(self, cell: int, verb: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if verb == "ready":
            self.ready.add((cell, body["shard"]))
        elif verb == "reports":
            seen = self.reports[cell, body["command_id"]]
            if body["shard"] in seen:
                self.resent.append(body["command_id"])
            seen[body["shard"]] = body
        else:
            after = int(query["after"])
            self._changed.wait_for(lambda: any(c["seq"] > after for c in self._commands[cell]), min(float(query["timeout_s"]), 2.0))
            commands = [command for command in self._commands[cell] if command["seq"] > after]
            return 200, {}, json.dumps({"commands": commands}).encode()
        self._changed.notify_all()
        return 200, {}, b"{}"


class EngineDouble(_Server):
    """Remembers its calls; dies, as SGLang does, of a resume that was not released. `broken` is a path that answers 500."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.released = False
        self.busy_flushes = 0
        self.broken = ""
        self.dead = False
        super().__init__()

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if method == "POST":
            self.calls.append(path.strip("/"))
        if self.dead or path == self.broken:
            return 500, {}, b"broken"
        if path == "/flush_cache" and self.busy_flushes:
            self.busy_flushes -= 1
            return 400, {}, b"Flush cache failed."
        if path == "/release_memory_occupation":
            self.released = True
        if path == "/resume_memory_occupation":
            self.dead = not self.released
            self.released = False
        if path == "/update_weights_from_disk":
            self.version = int(body["weight_version"])
        answers = {
            "/server_info": {"random_seed": self.port},
            "/model_info": {"weight_version": str(self.version)},
            "/generate": {"output_ids": [1]},
        }
        return 200, {}, json.dumps(answers.get(path, {})).encode()
