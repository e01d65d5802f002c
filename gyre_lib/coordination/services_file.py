"""Which processes of a run (or of the platform) are up, and where: one JSON file that only its owner may read, since it holds the secret."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from gyre_lib.config.layout import RunLayout

LEFTOVER_WAIT_S = 10.0


@dataclass
class ServiceProcess:
    """One supervised process. `created_s` tells it from a later process with the same id."""

    name: str
    pid: int
    created_s: float
    address: str
    log: str
    restarts: int = 0

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass
class Services:
    supervisor_pid: int
    supervisor_created_s: float
    ready: bool = False
    coordinator_url: str = ""
    secret: str = ""
    problem: str = ""
    """Why the services could not come up; empty while all is well."""
    processes: list[ServiceProcess] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return ServiceProcess("supervisor", self.supervisor_pid, self.supervisor_created_s, "", "").alive

    def write(self, path: Path) -> None:
        """Atomically, readable by the owner alone."""
        partial = path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file, indent=1)
        partial.rename(path)


def end_leftovers(path: Path) -> bool:
    """End what a supervisor that was killed has left running, and forget it; False when there was nothing."""
    services = read_services_file(path)
    if services is None or services.alive:
        return False
    leftovers = [psutil.Process(process.pid) for process in services.processes if process.alive]
    trees = [member for process in leftovers for member in [process, *process.children(recursive=True)]]
    for member in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(trees, timeout=LEFTOVER_WAIT_S)
    path.unlink(missing_ok=True)
    return bool(leftovers)


def read_services(layout: RunLayout) -> Services | None:
    """The run's services, or None when no supervisor of it is alive."""
    services = read_services_file(layout.services)
    return services if services is not None and services.alive else None


def read_services_file(path: Path) -> Services | None:
    """What the file says, alive or not; None without a file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return Services(**{**data, "processes": [ServiceProcess(**process) for process in data["processes"]]})
