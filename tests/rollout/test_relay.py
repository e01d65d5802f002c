"""The relay as a real process, outside a sandbox: bytes pass both ways unchanged, and the program's end is the relay's end."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RELAY = Path("gyre_lib/rollout/sandboxes/relay.py")


def start(port: int, upstream: Path, *program: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-I", "-S", str(RELAY), str(port), str(upstream), "--", *program], stderr=subprocess.PIPE)


def connect(port: int) -> socket.socket:
    for _ in range(400):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("the relay does not listen")


@pytest.fixture
def echo(tmp_path: Path):
    """A unix socket that sends back what it got, in capitals, once the sender has finished."""
    path = tmp_path / "echo.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    def answer(client: socket.socket) -> None:
        data = b""
        while chunk := client.recv(65536):
            data += chunk
        client.sendall(data.upper())
        client.close()

    threading.Thread(target=serve, daemon=True).start()
    yield path
    server.close()


def exchange(port: int, data: bytes) -> bytes:
    with connect(port) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        sender.join()
    return received


def test_large_and_concurrent_exchanges_arrive_unchanged(echo: Path, free_port: Callable[[], int]):
    port = free_port()
    relay = start(port, echo, "sleep", "60")
    try:
        sizes = [0, 1, 70_000, 3_000_000]
        results: dict[int, bytes] = {}
        threads = [threading.Thread(target=lambda n=n: results.update({n: exchange(port, b"ab" * n)})) for n in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {n: r == b"AB" * n for n, r in results.items()} == dict.fromkeys(sizes, True)
    finally:
        relay.kill()
        relay.wait()


def test_a_missing_upstream_closes_the_connection(tmp_path: Path, free_port: Callable[[], int]):
    port = free_port()
    relay = start(port, tmp_path / "nowhere.sock", "sleep", "60")
    try:
        with connect(port) as connection:
            assert connection.recv(10) == b""
    finally:
        relay.kill()
        relay.wait()


@pytest.mark.parametrize(
    ("program", "code"), [(("sh", "-c", "exit 7"), 7), (("sh", "-c", "kill -9 $$"), 137), (("/no/such/program",), 127)]
)
def test_the_exit_code_is_the_programs(tmp_path: Path, free_port: Callable[[], int], program: tuple[str, ...], code: int):
    assert start(free_port(), tmp_path / "x.sock", *program).wait(timeout=30) == code


def test_sigterm_outside_a_sandbox_reaches_the_program_only(tmp_path: Path, free_port: Callable[[], int]):
    port = free_port()
    relay = start(port, tmp_path / "x.sock", "sleep", "60")
    connect(port).close()
    time.sleep(0.3)
    relay.send_signal(signal.SIGTERM)
    assert relay.wait(timeout=30) == 128 + signal.SIGTERM
