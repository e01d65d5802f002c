"""The Prefect side of a machine: server with UI, and the process that serves the deployments. Shared by all runs of a runs folder.

`python -m gyre_lib.coordination.platform --runs DIR`. It is a view: runs go on without it.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

from gyre_lib.config.process_log import configure_logging
from gyre_lib.coordination.services_file import ServiceProcess, Services, end_leftovers, read_services_file
from gyre_lib.engines.launcher import free_port

UP_TIMEOUT_S = 180.0
WATCH_S = 1.0
STOP_GRACE_S = 15.0
log = logging.getLogger("gyre.platform")


def platform_folder(runs: Path) -> Path:
    return runs / ".platform"


def find_platform(runs: Path) -> Services | None:
    """The platform of a runs folder if it is up."""
    services = read_services_file(platform_folder(runs) / "services.json")
    return services if services is not None and services.alive else None


def flow_environment(runs: Path, api_url: str) -> dict[str, str]:
    """Environment of every process that talks to Prefect: our server, nothing outside, no silent server of its own."""
    home = platform_folder(runs) / "prefect"
    return {
        **os.environ,
        "GYRE_RUNS": str(runs),
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }


class Platform:
    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.folder = platform_folder(runs)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.environment = flow_environment(runs, f"{self.url}/api")
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = threading.Event()
        me = psutil.Process()
        self.services = Services(me.pid, me.create_time())

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        (self.folder / "prefect").mkdir(parents=True, exist_ok=True)
        try:
            self._start_server()
            self._start_deployments()
            self.services.ready = True
            self._write()
            while not self.stopping.wait(WATCH_S):
                self._watch()
            return 0
        except Exception as error:
            log.exception("the platform could not be kept up")
            self.services.problem = " ".join(str(error).split())[:500]
            return 1
        finally:
            self._stop()

    def _start_server(self) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        self._start("prefect-server", [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", port])
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not self._healthy():
            if self.children["prefect-server"].poll() is not None or time.monotonic() > deadline or self.stopping.is_set():
                raise RuntimeError(f"the Prefect server did not come up; see {self.folder / 'prefect-server.log'}")
            time.sleep(0.3)

    def _start_deployments(self) -> None:
        self._start("deployments", [sys.executable, "-m", "flows.serve"])

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _watch(self) -> None:
        if self.children["prefect-server"].poll() is not None:
            log.warning("the Prefect server ended; starting it again")
            self._start_server()
        if self.children["deployments"].poll() is not None:
            log.warning("the deployments' process ended; starting it again")
            self._start_deployments()

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as output:
            self.children[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._write()

    def _stop(self) -> None:
        for name in ("deployments", "prefect-server"):
            process = self.children.get(name)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self.services.problem:
            self._write()
        else:
            (self.folder / "services.json").unlink(missing_ok=True)

    def _write(self) -> None:
        self.services.processes = [
            ServiceProcess(
                name,
                process.pid,
                psutil.Process(process.pid).create_time() if process.poll() is None else 0.0,
                self.url if name == "prefect-server" else "",
                str(self.folder / f"{name}.log"),
            )
            for name, process in self.children.items()
        ]
        self.services.write(self.folder / "services.json")


def platform_url(services: Services) -> str:
    """Address of the UI."""
    return next(process.address for process in services.processes if process.name == "prefect-server")


def start_platform(runs: Path) -> Services:
    """Start Prefect's server and the deployments, or return those that are up. Raises RuntimeError with the reason."""
    folder = platform_folder(runs)
    folder.mkdir(parents=True, exist_ok=True)
    if find_platform(runs) is None:
        end_leftovers(folder / "services.json")
        (folder / "services.json").unlink(missing_ok=True)
        with (folder / "platform.log").open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "gyre_lib.coordination.platform", "--runs", str(runs)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline:
        services = read_services_file(folder / "services.json")
        if services is not None and services.problem:
            raise RuntimeError(services.problem)
        if services is not None and services.ready and services.alive:
            return services
        time.sleep(0.2)
    raise RuntimeError(f"Prefect was not up after {UP_TIMEOUT_S:g} s; see {folder / 'platform.log'}")


def stop_platform(runs: Path) -> bool:
    """Stop it and wait until it is gone; False when it was not up."""
    services = find_platform(runs)
    if services is None:
        return end_leftovers(platform_folder(runs) / "services.json")
    os.kill(services.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + 3 * STOP_GRACE_S
    while services.alive and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    configure_logging()
    sys.exit(Platform(parser.parse_args().runs.resolve()).run())


if __name__ == "__main__":
    main()
