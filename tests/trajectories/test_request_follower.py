"""Following the requests table gives the same rows as reading the store, whatever was open, sealed or new when."""

import pytest

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.request_follower import RequestFollower
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import read_execution_rows, record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan


def row(execution, sequence):
    record = RequestRecord(
        run_id="r", execution_id=execution, request_id=f"{execution}{sequence:031d}"[:32], sequence=sequence, parent_id="", agent_id="",
        parent_agent_id="", role_class="main_task", branch_reason="root", input_ids=[1, 2], output_ids=[3], output_logprobs=[-0.5],
        version_spans=[VersionSpan(0, 0, 1)], trainable=True, untrainable_reason="", request_digest="d", history_key="h",
        finish_reason="stop", temperature=1.0,
    )  # fmt: skip
    return {**record_to_row(record), "recorded_s": 1.0}


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path / "run")


def test_interleaved_executions_are_told_apart_and_kept_in_order(layout):
    follower = RequestFollower(layout)
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([row("a", 0), row("b", 0), row("a", 1)])
        assert follower.execution("a", 2).column("sequence").to_pylist() == [0, 1]
        writer.append([row("b", 2), row("b", 1)])
        found = follower.execution("b", 3)
        assert found.column("sequence").to_pylist() == [0, 1, 2]
        assert found.equals(read_execution_rows(layout, "b"))


def test_rows_sealed_before_they_were_followed_come_from_the_store(layout):
    follower = RequestFollower(layout)
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([row("a", 0)])
        writer.seal()
        writer.append([row("a", 1), row("b", 0)])
        assert follower.execution("a", 2).column("sequence").to_pylist() == [0, 1]
        assert follower.execution("b", 1).num_rows == 1


def test_forgotten_rows_and_executions_without_any(layout):
    follower = RequestFollower(layout)
    assert follower.execution("none", 0).num_rows == 0
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([row("a", 0)])
        follower.execution("a", 1)
        follower.forget("a")
        assert follower.execution("a", 1).num_rows == 1
