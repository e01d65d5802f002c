"""Executions and rewards by group: every step is taken once, and a missing reward is never a zero."""

import pytest

from gyre_lib.coordination.trajectory_buffer import PLACEHOLDER, Execution, Group, TrajectoryBuffer


@pytest.fixture
def buffer():
    made = TrajectoryBuffer()
    group = Group("g00001", "tasks/a", "a", 0, keep=3)
    made.dispatch(group, [Execution(f"g00001-{n:02d}", "g00001", "tasks/a", "a", 0) for n in range(3)])
    return made


def run_to_the_end(buffer, number, outcome="Completed"):
    execution_id = f"g00001-{number:02d}"
    assert buffer.launch(execution_id, 1.0)
    assert buffer.claim(execution_id, "w", 1.0, 100.0)
    assert buffer.end(execution_id, 2.0, outcome, "", execution_id)
    return execution_id


def test_every_step_is_taken_once(buffer):
    execution_id = run_to_the_end(buffer, 0)
    assert not buffer.launch(execution_id, 3.0)
    assert not buffer.claim(execution_id, "other", 1.0, 100.0)
    assert not buffer.end(execution_id, 3.0, "HarnessTimeout", "", "")
    assert buffer.executions[execution_id].outcome == "Completed"
    assert buffer.settle(execution_id, 3.0, 1.0, "valid")
    assert not buffer.settle(execution_id, 4.0, 0.0, "valid")
    assert buffer.executions[execution_id].score == 1.0


def test_group_is_ready_only_when_all_rewards_are_settled(buffer):
    for number in range(3):
        execution_id = run_to_the_end(buffer, number)
        assert buffer.settled_group("g00001", 5.0) is None
        buffer.settle(execution_id, 3.0, float(number), "valid")
    assert buffer.settled_group("g00001", 5.0) == "ready"
    assert buffer.settled_group("g00001", 6.0) is None
    assert [group.group_id for group in buffer.ready_groups()] == ["g00001"]


def test_valid_zero_is_a_reward_and_a_missing_one_is_not(buffer):
    buffer.settle(run_to_the_end(buffer, 0), 3.0, 0.0, "valid")
    buffer.settle(run_to_the_end(buffer, 1), 3.0, 1.0, "valid")
    buffer.settle(run_to_the_end(buffer, 2), 3.0, None, "unresolved", "OverallTimeout")
    assert buffer.settled_group("g00001", 5.0) == "ready"
    assert [execution.score for execution in buffer.training_executions("g00001")] == [0.0, 1.0]
    assert buffer.executions["g00001-02"].outcome == "OverallTimeout"


def test_c25_infrastructure_failure_has_no_part_in_the_baseline(buffer):
    buffer.settle(run_to_the_end(buffer, 0), 3.0, 1.0, "valid")
    buffer.settle(run_to_the_end(buffer, 1), 3.0, 1.0, "valid")
    buffer.settle(run_to_the_end(buffer, 2, "InfrastructureFailed"), 3.0, 0.0, PLACEHOLDER)
    assert buffer.settled_group("g00001", 5.0) == "ready"
    assert [execution.score for execution in buffer.training_executions("g00001")] == [1.0, 1.0]


def test_group_with_a_single_valid_reward_is_lost_and_trains_nothing(buffer):
    buffer.settle(run_to_the_end(buffer, 0), 3.0, 1.0, "valid")
    for number in (1, 2):
        buffer.settle(run_to_the_end(buffer, number, "InfrastructureFailed"), 3.0, 0.0, PLACEHOLDER)
    assert buffer.settled_group("g00001", 5.0) == "lost"
    assert buffer.training_executions("g00001") == []


def test_oversampling_keeps_the_first_valid_ones_and_names_the_surplus(buffer):
    buffer.groups["g00001"].keep = 2
    buffer.settle(run_to_the_end(buffer, 2), 3.0, 1.0, "valid")
    assert buffer.surplus("g00001") == []
    buffer.settle(run_to_the_end(buffer, 0), 4.0, 0.0, "valid")
    assert buffer.surplus("g00001") == ["g00001-01"]
    assert [execution.execution_id for execution in buffer.training_executions("g00001")] == ["g00001-02", "g00001-00"]


def test_c30_benchmark_executions_never_train(buffer):
    buffer.add_benchmark_execution(Execution("before-v0-000-00", "before-v0", "tasks/a", "a", 0))
    assert buffer.executions["before-v0-000-00"].train is False
    assert "before-v0" not in buffer.groups
