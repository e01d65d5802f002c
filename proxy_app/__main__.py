"""The proxy process: `python -m proxy_app`. Harness side on TCP and a unix socket, control side on its own port."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from proxy_app.app import HarnessApp
from proxy_app.control import SECRET_HEADER, control_app
from proxy_app.generating import Counters, Generator
from proxy_app.limits import GuardedProtocol
from proxy_app.recording import Recorder
from proxy_app.rendering import Rendering
from proxy_app.routing import RoutingTable
from proxy_app.turns import Turns

logger = logging.getLogger("proxy_app")

REGISTER_EVERY_S = 1.0
REMIND_AFTER_S = 30.0
"""Without a table for this long the proxy registers again: the coordinator may have been restarted."""
SECRET_VARIABLE = "GYRE_CONTROL_SECRET"


class QuietServer(uvicorn.Server):
    """A server whose signals are handled by the process, not by it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proxy_app", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--coordinator", required=True, help="URL of the coordinator; empty to start without one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--control-port", type=int, default=0)
    parser.add_argument("--uds", type=Path, help="unix socket for sandboxes")
    parser.add_argument("--model", type=Path, required=True, help="model folder with tokenizer.json and config.json")
    parser.add_argument("--renderer", default="auto")
    parser.add_argument("--proxy-id", default="proxy-0")
    parser.add_argument("--retry-budget-s", type=float, default=60.0)
    parser.add_argument("--segment-mib", type=int, default=64)
    return parser.parse_args(argv)


async def serve(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT; then finish what is being recorded and seal."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise InputError(f"{SECRET_VARIABLE}: the control secret is not set in the environment")
    counters = Counters()
    table = RoutingTable()
    rendering = Rendering(options.model, options.renderer)
    generator = Generator(table, rendering.vocab_size, options.retry_budget_s, counters)
    layout = RunLayout(options.run_dir)
    recorder = Recorder(layout, options.proxy_id, options.segment_mib * 2**20)
    turns = Turns(layout.run_id, rendering, generator, recorder, counters)
    harness_sockets = [_tcp(options.host, options.port)]
    if options.uds:
        harness_sockets.append(_unix(options.uds))
    control_socket = _tcp(options.host, options.control_port)
    harness = _server(HarnessApp(table, turns, counters), GuardedProtocol)
    control = _server(control_app(table, turns, counters, secret), "httptools")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    running = [
        asyncio.create_task(harness.serve(harness_sockets)),
        asyncio.create_task(control.serve([control_socket])),
    ]
    address = {
        "proxy_id": options.proxy_id,
        "url": _url(harness_sockets[0]),
        "control_url": _url(control_socket),
        "uds": str(options.uds or ""),
    }
    print(f"proxy {options.proxy_id} url={address['url']} control={address['control_url']}", flush=True)
    registering = asyncio.create_task(_register(options.coordinator, address, secret, table))
    await asyncio.wait((asyncio.create_task(stop.wait()), *running), return_when=asyncio.FIRST_COMPLETED)
    registering.cancel()
    harness.should_exit = control.should_exit = True
    await turns.close_all()
    await asyncio.gather(*running, return_exceptions=True)
    await generator.close()
    await recorder.close()
    if options.uds:
        options.uds.unlink(missing_ok=True)


async def _register(coordinator: str, address: dict[str, str], secret: str, table: RoutingTable) -> None:
    """Tell the coordinator where this proxy is, until it answers; again when it has been silent for long."""
    if not coordinator:
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        while True:
            known = table.pushes
            with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with session.post(f"{coordinator.rstrip('/')}/proxies", json=address, headers={SECRET_HEADER: secret}) as response:
                    if response.status == 200:
                        await asyncio.sleep(REMIND_AFTER_S)
                        while table.pushes != known:
                            known = table.pushes
                            await asyncio.sleep(REMIND_AFTER_S)
                        continue
                    logger.warning("the coordinator answers %d to a registration", response.status)
            await asyncio.sleep(REGISTER_EVERY_S)


def _server(app: Any, protocol: Any) -> QuietServer:
    return QuietServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            backlog=1024,
        )
    )


def _tcp(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.setblocking(False)
    return listener


def _unix(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(argv: list[str] | None = None) -> int:
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(serve(arguments(argv)))
    except InputError as error:
        print(f"proxy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
