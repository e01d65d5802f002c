"""One short real run for the whole session: real engines, real training, real sandboxes, Prefect; its burst flow is killed once."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import load_config
from gyre_lib.coordination.client import CoordinatorClient, find_coordinator
from gyre_lib.coordination.platform import flow_environment, platform_url, start_platform, stop_platform
from gyre_lib.coordination.run_services import prepare_run, start_services, stop_services

OVERRIDES = [
    "name=short",
    "scheduling.bursts=2",
    "scheduling.groups_per_batch=4",
    "scheduling.executions_per_group=4",
    "scheduling.supply_hold_s=0.1",
    "cells.count=2",
    "cells.capacity=8",
    "cells.standalone_engines=1",
    "cells.standalone_capacity=8",
    "rollout.worker_slots=4",
    "training.row_tokens=512",
    "training.lookahead=1",
    "evaluation.heldout_samples=1",
]


@dataclass
class ShortRun:
    runs: Path
    layout: RunLayout
    api_url: str
    memory_mib: float = 0.0
    killed_at: dict[str, Any] = field(default_factory=dict)
    """The coordinator's state when the burst flow was killed."""
    live_rows: list[Any] = field(default_factory=list)
    """An answer from SQL while the run went on."""
    held_out: dict[str, Any] = field(default_factory=dict)

    def flow(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = flow_environment(self.runs, self.api_url)
        return subprocess.Popen(
            [sys.executable, "-m", "flows.launch", *arguments], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(find_coordinator(self.layout))


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("r")
    layout = prepare_run(load_config(Path("data/configs/demo.yaml"), OVERRIDES), runs)
    try:
        platform = start_platform(runs)
        services = start_services(layout)
        run = ShortRun(runs, layout, f"{platform_url(platform)}/api")
        _kill_the_first_flow_in_mid_burst(run)
        finishing = run.flow("training-run", "short")
        run.live_rows = _ask_while_it_runs(run, finishing)
        run.memory_mib = _memory_mib([services.supervisor_pid, platform.supervisor_pid])
        output, _ = finishing.communicate(timeout=240)
        assert finishing.returncode == 0, output
        held_out = run.flow("evaluate-policy", "short", "after")
        output, _ = held_out.communicate(timeout=120)
        assert held_out.returncode == 0, output
        run.held_out = json.loads(output.strip().splitlines()[-1])
        yield run
    finally:
        stop_services(layout)
        stop_platform(runs)


def _kill_the_first_flow_in_mid_burst(run: ShortRun) -> None:
    flow = run.flow("training-run", "short")
    client = run.client()
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        state = client.state()
        if state["burst"] == 0 and state["terminated"] >= 6:
            break
        assert flow.poll() is None, flow.communicate()[0]
        time.sleep(0.1)
    os.killpg(flow.pid, signal.SIGKILL)
    flow.communicate()
    run.killed_at = client.state()


def _ask_while_it_runs(run: ShortRun, flow: "subprocess.Popen[str]") -> list[Any]:
    from gyre_lib.trajectories.store import connect

    while flow.poll() is None:
        with connect(run.layout.root) as database:
            rows = database.execute("SELECT execution_id, score FROM executions WHERE validity = 'valid'").fetchall()
        if len(rows) >= 4:
            return rows
        time.sleep(0.5)
    raise AssertionError("the run ended before SQL saw four executions of it")


def _memory_mib(supervisors: list[int]) -> float:
    """Proportional set size of everything that the supervisors have started, and themselves."""
    import psutil

    total = 0
    for pid in supervisors:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
    return total / 2**20
