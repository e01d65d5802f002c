"""Sandboxes on one machine with bubblewrap: own user, process, network, IPC and host-name namespaces over a read-only /usr.

Inside there is the workspace, an empty /tmp, the programs of the host's /usr (and this Python, if it lives elsewhere), and no network
interface but the loopback one. No container image: a task that needs its own packages needs the docker sandbox.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from gyre_lib.rollout.environments import prepare_workspace
from gyre_lib.rollout.sandboxes.protocol import MAX_FILE_BYTES, PROXY_PORT, TERM_GRACE_S, SandboxCommand, SandboxExit, SandboxUnavailable
from gyre_lib.rollout.tasks import Task

RELAY = Path(__file__).with_name("relay.py")
SOCKET_INSIDE = "/run/gyre/proxy.sock"
RELAY_INSIDE = "/run/gyre/relay.py"
PYTHON = str(Path(sys.executable).resolve())
POLL_S = 0.25
HOST_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "passwd", "group", "nsswitch.conf", "localtime")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}


class Bubblewrap:
    name = "bubblewrap"

    def __init__(self, program: str = "bwrap") -> None:
        self._program = program

    def check(self) -> None:
        if shutil.which(self._program) is None:
            raise SandboxUnavailable(f"{self._program} is not installed (Debian package bubblewrap)")
        probe = subprocess.run([self._program, *_namespaces(), *_system(), "/bin/true"], capture_output=True, text=True, timeout=20)
        if probe.returncode:
            raise SandboxUnavailable(f"{self._program} refuses: {probe.stderr.strip()[:300]}")

    def image_of(self, task: Task) -> str:
        return ""

    def prepare(self, task: Task, image: str, workspace: Path) -> None:
        prepare_workspace(task, workspace)

    def run(self, command: SandboxCommand, timeout_s: float, cancelled: threading.Event) -> SandboxExit:
        status_read, status_write = os.pipe()
        try:
            process = self._start(command, status_write)
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        with os.fdopen(status_read) as status:
            kind = _wait(process, status.fileno(), timeout_s, cancelled)
            if kind != "exited":
                return SandboxExit(kind)
            reports = [json.loads(line) for line in status if line.strip()]
        code = next((report["exit-code"] for report in reports if "exit-code" in report), None)
        if code is None:
            raise SandboxUnavailable(f"{self._program} could not start the sandbox: {_tail(command.output)}")
        return SandboxExit("exited", code)

    def _start(self, command: SandboxCommand, status_fd: int) -> subprocess.Popen[bytes]:
        arguments = [self._program, *_namespaces(), *_system(), "--json-status-fd", str(status_fd)]
        for inside, outside in command.read_only.items():
            arguments += ["--ro-bind", str(outside), inside]
        for inside, outside in command.writable.items():
            arguments += ["--bind", str(outside), inside]
        arguments += ["--bind", str(command.workspace), command.workdir, "--chdir", command.workdir]
        inner: tuple[str, ...] = command.argv
        if command.proxy_socket is not None:
            arguments += ["--ro-bind", str(RELAY), RELAY_INSIDE, "--bind", str(command.proxy_socket), SOCKET_INSIDE, "--as-pid-1"]
            inner = (PYTHON, "-I", "-S", RELAY_INSIDE, str(PROXY_PORT), SOCKET_INSIDE, "--", *inner)
        limited = ("/bin/sh", "-c", f'ulimit -f {MAX_FILE_BYTES // 512}; ulimit -c 0; exec "$@"', "sandbox", *inner)
        try:
            with command.output.open("wb") as output:
                return subprocess.Popen(
                    [*arguments, "--", *limited],
                    executable=shutil.which(self._program),
                    # Not on the command line, where the key could be read in the list of processes.
                    env={**ENVIRONMENT, **command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(status_fd,),
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxUnavailable(f"{self._program} could not be started: {error}") from error


def _wait(
    process: subprocess.Popen[bytes], status_fd: int, timeout_s: float, cancelled: threading.Event
) -> Literal["exited", "timeout", "cancelled"]:
    """`exited`, `timeout` or `cancelled`; the process is gone on return."""
    deadline = time.monotonic() + timeout_s
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            left = deadline - time.monotonic()
            if select.select([ended], [], [], max(0.0, min(POLL_S, left)))[0]:
                process.wait()
                return "exited"
            if cancelled.is_set() or left <= 0:
                _stop(process, ended, status_fd)
                return "cancelled" if cancelled.is_set() else "timeout"
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(ended)


def _stop(process: subprocess.Popen[bytes], ended: int, status_fd: int) -> None:
    """SIGTERM to the sandbox's first process (the relay passes it on), then SIGKILL to bubblewrap, with whom everything inside dies."""
    inner = _child_pid(status_fd)
    if inner is not None:
        try:
            os.kill(inner, signal.SIGTERM)
            select.select([ended], [], [], TERM_GRACE_S)
            os.kill(inner, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()
    process.wait()


def _child_pid(status_fd: int) -> int | None:
    if not select.select([status_fd], [], [], 0)[0]:
        return None
    for line in os.read(status_fd, 4096).decode().splitlines():
        if "child-pid" in line:
            return int(json.loads(line)["child-pid"])
    return None


def _namespaces() -> list[str]:
    return ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]


def _system() -> list[str]:
    """Mounts of the host's programs, and fresh /proc, /dev and /tmp."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in HOST_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    return [*arguments, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]


def _tail(output: Path) -> str:
    return output.read_bytes()[-400:].decode("utf-8", "replace").strip() if output.exists() else ""
