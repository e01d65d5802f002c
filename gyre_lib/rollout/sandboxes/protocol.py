"""What every sandbox does: run one command over a workspace, with no network but (for harnesses) the proxy's socket, within a time limit."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gyre_lib.rollout.tasks import Task

PROXY_PORT = 8484
"""Port inside the sandbox under which the relay offers the proxy."""
MAX_FILE_BYTES = 256 * 2**20
"""Largest file that sandboxed code may write."""


class SandboxUnavailable(RuntimeError):
    """The sandbox service is missing, refuses, or could not start the command: an infrastructure failure, never the policy's."""


@dataclass(frozen=True)
class SandboxCommand:
    """One command and what it sees."""

    argv: tuple[str, ...]
    workspace: Path
    """Host folder, seen read-write as `workdir`."""
    output: Path
    """Host file that receives standard output and error."""
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    read_only: dict[str, Path] = field(default_factory=dict)
    """Path inside -> host file or folder."""
    writable: dict[str, Path] = field(default_factory=dict)
    """Path inside -> host folder."""
    proxy_socket: Path | None = None
    """The proxy's unix socket; offered inside as http://127.0.0.1:PROXY_PORT. None: no network at all."""
    image: str = ""
    """Container image, for sandboxes that use one."""


@dataclass(frozen=True)
class SandboxExit:
    """How the command ended. `code` is its exit code when it ended by itself."""

    kind: Literal["exited", "timeout", "cancelled"]
    code: int = 0


class Sandbox(Protocol):
    name: str

    def check(self) -> None:
        """Raises SandboxUnavailable, saying what is missing and how to get it."""

    def image_of(self, task: Task) -> str:
        """The container image of this task, built if need be; empty for sandboxes without images. Raises SandboxUnavailable."""

    def prepare(self, task: Task, image: str, workspace: Path) -> None:
        """Create the fresh workspace. Raises InputError for an environment it cannot make, SandboxUnavailable, OSError."""

    def run(self, command: SandboxCommand, timeout_s: float, cancelled: threading.Event) -> SandboxExit:
        """Run to the end, the limit or the cancellation; nothing of it is alive afterwards. On the limit and on cancellation the
        command first gets SIGTERM, and SIGKILL `TERM_GRACE_S` later. Raises SandboxUnavailable."""


TERM_GRACE_S = 2.0
