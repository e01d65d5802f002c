"""Every kind of process is killed with SIGKILL while a run goes on; the run finishes, and nothing is lost or counted twice."""

import collections
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_lib.config.run_config import load_config
from gyre_lib.coordination.client import CoordinatorClient, CoordinatorUnavailable, find_coordinator
from gyre_lib.coordination.journal import read_entries
from gyre_lib.coordination.platform import flow_environment, platform_url, start_platform, stop_platform
from gyre_lib.coordination.run_figures import run_figures
from gyre_lib.coordination.run_services import prepare_run, start_services, stop_services
from gyre_lib.coordination.services_file import read_services
from gyre_lib.trajectories.store import connect

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

OVERRIDES = [
    "name=kills",
    "scheduling.bursts=6",
    "scheduling.groups_per_batch=2",
    "scheduling.executions_per_group=4",
    "scheduling.supply_hold_s=0.1",
    "cells.count=2",
    "cells.capacity=8",
    "cells.standalone_engines=1",
    "cells.standalone_capacity=8",
    "rollout.worker_slots=4",
]
VICTIMS = ("engine-cell-0", "coordinator", "proxy-0", "worker-0", "rank-0-0", "coordinator", "engine-standalone-0", "rank-1-0")


def test_run_survives_the_death_of_every_kind_of_process(tmp_path):
    layout = prepare_run(load_config(Path("data/configs/demo.yaml"), OVERRIDES), tmp_path)
    killed = []
    try:
        api_url = f"{platform_url(start_platform(tmp_path))}/api"
        start_services(layout)
        environment = flow_environment(tmp_path, api_url)
        command = [sys.executable, "-m", "flows.launch", "training-run", "kills"]
        flow = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        client = CoordinatorClient(find_coordinator(layout))
        for victim in VICTIMS:
            if not _wait_for_progress(client, flow):
                break
            killed += _kill(layout, victim)
        output, _ = flow.communicate(timeout=500)
        assert flow.returncode == 0, output[-4000:]
        _check(layout)
        assert set(killed) >= {"coordinator", "proxy-0", "worker-0", "rank-1-0", "rank-0-0"}
        assert "so that cells [1] can train again" in (layout.logs / "supervisor.log").read_text()
    finally:
        stop_services(layout)
        stop_platform(tmp_path)


def _wait_for_progress(client, flow):
    """Until six more executions have ended; False when the run has finished."""
    start = None
    while flow.poll() is None:
        try:
            state = client.state()
        except CoordinatorUnavailable:
            continue
        if state["run_done"]:
            return False
        start = state["terminated"] if start is None else start
        if state["terminated"] >= start + 6 and state["dispatched"]:
            return True
        time.sleep(0.2)
    return False


def _kill(layout, victim):
    services = read_services(layout)
    pid = next((process.pid for process in services.processes if process.name == victim and process.alive), None)
    if pid is None:
        return []
    os.kill(pid, signal.SIGKILL)
    return [victim]


def _check(layout):
    files = sorted(layout.journal.glob("burst-*.jsonl"))
    events = [entry for entry in itertools.chain.from_iterable(map(read_entries, files)) if "event" in entry]
    dispatched = [e for entry in events for a in entry["actions"] if a["kind"] == "Dispatch" for group in a["executions"] for e in group]
    assert len(dispatched) == len(set(dispatched))
    ended = collections.Counter(entry["event"]["execution"] for entry in events if entry["event"]["kind"] == "ExecutionEnded")
    assert set(ended) <= set(dispatched)
    figures = run_figures(layout)
    assert figures.scheduler["phase"] == "done"
    assert figures.scheduler["identity_ok"]
    assert figures.scheduler["consumed_groups"] == 6 * 2 * 2
    with connect(layout.root) as database:
        steps = database.execute("SELECT step, count(*) FROM train_steps GROUP BY 1 ORDER BY 1").fetchall()
        bad = database.execute("SELECT count(*) FROM requests WHERE len(output_ids) <> len(output_logprobs)").fetchone()
        zeros = database.execute("SELECT count(*) FROM executions WHERE outcome = 'InfrastructureFailed' AND validity = 'valid'").fetchone()
    assert steps == [(step, 1) for step in range(12)]
    assert bad == zeros == (0,)
