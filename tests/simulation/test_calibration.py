"""A workload file made from a run's tables."""

import pytest
import yaml

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.simulation.calibration import calibrate
from gyre_lib.simulation.methods import method
from gyre_lib.simulation.runs import simulate
from gyre_lib.simulation.workload import load_workload
from gyre_lib.trajectories.segments import SegmentWriter


def run_with(tmp_path, executions: int) -> RunLayout:
    layout = RunLayout(tmp_path / "live")
    layout.root.mkdir()
    layout.config.write_text(yaml.safe_dump({"name": "live", "scheduling": {"groups_per_batch": 2, "executions_per_group": 2}}))
    rows = {
        "executions": [
            {
                "execution_id": f"g{n // 2 + 1:05d}-{n % 2 + 1:02d}", "group_id": f"g{n // 2 + 1:05d}", "outcome": "Completed", "train": True,
                "launched_s": 100.0, "ended_s": 110.0 + n, "settled_s": 113.0 + n,
            }
            for n in range(executions)
        ],
        "micro_steps": [{"micro_step_id": f"m{n}", "step": n, "status": "done", "forward_backward_s": 4.0} for n in range(2 * executions // 8)],
        "train_steps": [
            {"step": n, "groups": 2, "micro_steps": 4, "trained_s": 10.0, "updated_s": 11.0} for n in range(executions // 8)
        ],
        "transitions": [{"transition_id": "t0", "cell": 0, "direction": "to_training", "outcome": "done", "duration_s": 2.0}],
        "publications": [{"version": 2, "engine_id": "cell-0", "ok": True, "started_s": 5.0, "ended_s": 6.5}],
    }  # fmt: skip
    for table, found in rows.items():
        with_table = SegmentWriter(layout, table, "test", segment_bytes=2**20)
        if found:
            with_table.append(found)
        with_table.close()
    return layout


def test_durations_and_costs_of_the_run_are_what_the_simulator_then_plays(tmp_path):
    output = tmp_path / "live.yaml"
    calibrate(run_with(tmp_path, executions=16), output)
    workload = load_workload(output)
    assert len(workload.execution.recorded) == 8
    assert workload.execution.recorded[0] == ((10.0, 3.0), (11.0, 3.0))
    assert workload.training.node_seconds_per_step == 8.0 and workload.training.update_s == 1.0
    assert workload.cluster.to_training_s == 2.0 and workload.cluster.publication_s == 1.5
    run = simulate(workload, method("elastic", 0.5, 2, 1), 4, seed=0)
    assert len(run.step_ends_s) == 4 and max(run.durations.executions_s) <= 25.0 + 3.0


def test_run_without_training_steps_has_nothing_to_learn_from(tmp_path):
    with pytest.raises(InputError, match="run live: no finished executions"):
        calibrate(run_with(tmp_path, executions=4), tmp_path / "live.yaml")
