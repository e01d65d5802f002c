"""Kubernetes: named in the configuration, refused at the check. A pod per execution needs a registry and a cluster to be tried on."""

import threading
from pathlib import Path

from gyre_lib.rollout.sandboxes.protocol import SandboxCommand, SandboxExit, SandboxUnavailable
from gyre_lib.rollout.tasks import Task

REASON = "sandbox kubernetes is not available in this version; run workers in pods that have bubblewrap, or use sandbox docker"


class Kubernetes:
    name = "kubernetes"

    def check(self) -> None:
        raise SandboxUnavailable(REASON)

    def image_of(self, task: Task) -> str:
        raise SandboxUnavailable(REASON)

    def prepare(self, task: Task, image: str, workspace: Path) -> None:
        raise SandboxUnavailable(REASON)

    def run(self, command: SandboxCommand, timeout_s: float, cancelled: threading.Event) -> SandboxExit:
        raise SandboxUnavailable(REASON)
