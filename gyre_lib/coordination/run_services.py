"""Start and stop the services of one run on this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig, load_config
from gyre_lib.coordination.services_file import Services, end_leftovers, read_services, read_services_file
from gyre_lib.rollout.tasks import find_tasks
from gyre_lib.scheduling.settings import SchedulerSettings

UP_TIMEOUT_S = 300.0
DOWN_TIMEOUT_S = 60.0
MAX_SOCKET_PATH = 100
"""Unix socket paths may have 107 bytes."""


PROJECT = Path(__file__).parents[2]
"""Where the shipped data lies: relative paths that are not under the current folder are looked up here."""


def resolve_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths, so that every process reads the same files whatever its folder."""
    found = config.model_copy(deep=True)
    found.rollout.tasks = _resolved(config.rollout.tasks)
    found.rollout.heldout_tasks = _resolved(config.rollout.heldout_tasks)
    found.model.path = _resolved(config.model.path)
    return found


def _resolved(path: str) -> str:
    here = Path(path)
    return str(here.resolve() if here.exists() or here.is_absolute() else PROJECT / here)


def check_config(config: RunConfig) -> None:
    """Everything that can be known to be wrong before anything starts. Raises InputError naming the field."""
    SchedulerSettings.from_config(config)
    for field, folder in (("rollout.tasks", config.rollout.tasks), ("rollout.heldout_tasks", config.rollout.heldout_tasks)):
        if not Path(folder).is_dir():
            raise InputError(f"{field}: no such folder: {folder}")
        if not find_tasks(Path(folder), config.rollout.task_format):
            raise InputError(f"{field}: no task in {folder}")
    if not (Path(config.model.path) / "config.json").is_file():
        raise InputError(f"model.path: not a Hugging Face model folder (no config.json): {config.model.path}")


def prepare_run(config: RunConfig, runs: Path) -> RunLayout:
    """The run's folder with its configuration; an existing run must have been started with the same one. Raises InputError."""
    config = resolve_paths(config)
    check_config(config)
    layout = RunLayout(runs / config.name)
    if len(str(layout.sockets / "proxy-0.sock")) > MAX_SOCKET_PATH:
        raise InputError(f"GYRE_RUNS: {runs} is too long a path: sockets in it would exceed {MAX_SOCKET_PATH} bytes")
    if layout.config.exists():
        _refuse_other_config(load_config(layout.config), config, layout)
        return layout
    layout.root.mkdir(parents=True, exist_ok=True)
    partial = layout.config.with_suffix(".partial")
    partial.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    partial.rename(layout.config)
    return layout


def _refuse_other_config(stored: RunConfig, given: RunConfig, layout: RunLayout) -> None:
    for section, values in given.model_dump().items():
        before = stored.model_dump()[section]
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            if before[name] != value:
                raise InputError(f"{section}.{name}: run {layout.run_id} was started with {before[name]}, not {value}; choose another name")


def start_services(layout: RunLayout, timeout_s: float = UP_TIMEOUT_S) -> Services:
    """Start the supervisor and wait until everything is up. Raises RuntimeError with the reason when it cannot."""
    running = read_services(layout)
    if running is not None and running.ready:
        return running
    layout.logs.mkdir(parents=True, exist_ok=True)
    if running is None:
        end_leftovers(layout.services)
        layout.services.unlink(missing_ok=True)
        with (layout.logs / "supervisor.log").open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "gyre_lib.coordination.supervisor", "--run-dir", str(layout.root)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        services = read_services_file(layout.services)
        if services is not None and services.problem:
            raise RuntimeError(f"{services.problem} (logs: {layout.logs})")
        if services is not None and services.ready:
            return services
        time.sleep(0.2)
    raise RuntimeError(f"the services were not up after {timeout_s:g} s (logs: {layout.logs})")


def stop_services(layout: RunLayout) -> bool:
    """Stop the run's services and wait until they are gone; False when none were up."""
    services = read_services(layout)
    if services is None:
        return end_leftovers(layout.services)
    os.kill(services.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while services.alive and time.monotonic() < deadline:
        time.sleep(0.1)
    if services.alive:
        raise RuntimeError(f"the supervisor (process {services.supervisor_pid}) did not stop within {DOWN_TIMEOUT_S:g} s")
    return True
