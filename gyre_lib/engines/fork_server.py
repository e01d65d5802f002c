"""Engines by fork: one process imports SGLang once, and every engine of this machine starts as its child in a few seconds.

For CPU engines only (a process that has touched CUDA must not fork). The process serves a Unix socket that belongs to its user alone; it
must not lie where a sandbox can reach it. One JSON line asks for an engine, one JSON line answers with its process id. Engines outlive
this process.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 30.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ForkServerError(RuntimeError):
    """The fork server is not there or did not start the engine."""


def request_engine(socket_path: Path, arguments: list[str], log_path: Path) -> int:
    """Start an engine with these SGLang arguments, output appended to `log_path`; returns its process id (leader of its own session).

    Raises ForkServerError when nothing answers at `socket_path`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(socket_path))
            connection.sendall(json.dumps({"arguments": arguments, "log": str(log_path)}).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        except (OSError, ValueError) as error:
            raise ForkServerError(f"{socket_path}: no engine fork server answers ({error})") from error
    if "pid" not in answer:
        raise ForkServerError(f"{socket_path}: {answer['error']}")
    return answer["pid"]


def answers(socket_path: Path) -> bool:
    """Whether a fork server has finished its imports and listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(socket_path))
        except OSError:
            return False
    return True


def serve_forks(socket_path: Path) -> None:
    """Import SGLang, then fork an engine for every request until SIGTERM."""
    from gyre_lib.engines.cpu_server import import_engine

    import_engine()
    gc.collect()
    gc.freeze()  # collections in the children would otherwise write to, and so copy, every shared page
    # An engine that is killed leaves two processes behind, which die with it; they become children of this process, which collects them.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    socket_path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        os.umask(0o077)
        listener.bind(str(socket_path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(ANSWER_TIMEOUT_S)
                try:
                    line = connection.makefile().readline()
                    if line:
                        connection.sendall(json.dumps(_answer(json.loads(line), listener, connection)).encode() + b"\n")
                except (OSError, ValueError, KeyError) as error:
                    print(f"a request could not be answered: {error!r}", file=sys.stderr, flush=True)


def _answer(request: dict[str, Any], *inherited: socket.socket) -> dict[str, Any]:
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        return {"error": f"the engine's log cannot be opened: {error}"}
    pid = os.fork()
    if pid == 0:
        _become_engine(request["arguments"], log, inherited)
    os.close(log)
    return {"pid": pid}


def _become_engine(arguments: list[str], log: int, inherited: tuple[socket.socket, ...]) -> None:
    """In the child: drop everything of the fork server's, then serve. Never returns."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for connection in inherited:
            connection.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from gyre_lib.engines.cpu_server import serve

        serve(arguments)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap() -> None:
    """Collect ended engines, so that none stays a zombie and looks alive."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Starts SGLang CPU engines by fork.")
    parser.add_argument("--socket", type=Path, required=True)
    serve_forks(parser.parse_args().socket)
