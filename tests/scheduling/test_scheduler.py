"""The rules of the scheduler, one by one."""

import json
import random

import pytest

from gyre_lib.scheduling.events import (
    BatchTrained,
    BurstDone,
    CancelExecutions,
    Dispatch,
    EngineLost,
    EngineReady,
    ExecutionEnded,
    GroupAssigned,
    GroupLost,
    GroupReady,
    InRollout,
    InTraining,
    Launch,
    OpenBatch,
    Publish,
    Published,
    RunDone,
    RunStarted,
    SatelliteLost,
    SetTimer,
    TimerFired,
    ToRollout,
    ToTraining,
    TransitionFailed,
    Update,
    UpdateDone,
)
from gyre_lib.scheduling.scheduler import ProtocolError, Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings
from gyre_lib.simulation.adversary import AdversarialWorld


def settings(**changes) -> SchedulerSettings:
    base = dict(
        cells=3, cell_capacity=4, groups_per_batch=2, executions_per_group=2, steps_per_burst=2, extra_groups=0, supply_groups=1,
        supply_hold_s=0.0, bursts=2,
    )  # fmt: skip
    return SchedulerSettings(**{**base, **changes})


def started(**changes) -> Scheduler:
    scheduler = Scheduler(settings(**changes))
    tell(scheduler, RunStarted(), *(EngineReady(cell) for cell in range(scheduler.settings.cells)))
    if scheduler.settings.standalone_capacity:
        tell(scheduler, EngineReady(-1))
    return scheduler


def tell(scheduler: Scheduler, *events) -> list:
    return [action for event in events for action in scheduler.handle(event, 0.0)]


def finish(scheduler: Scheduler, *groups: int) -> list:
    size = scheduler.settings.executions_dispatched_per_group
    actions = []
    for group in groups:
        actions += tell(scheduler, *(ExecutionEnded(f"g{group:05d}-{i:02d}") for i in range(1, size + 1)), GroupReady(f"g{group:05d}"))
    return actions


def assign(scheduler: Scheduler, *groups: int) -> list:
    return tell(scheduler, *(GroupAssigned(f"g{group:05d}") for group in groups))


def test_start_fills_the_queue_and_launches_when_engines_serve():
    scheduler = Scheduler(settings(extra_groups=2))
    actions = tell(scheduler, RunStarted())
    assert [type(a) for a in actions] == [Dispatch, OpenBatch]
    assert len(actions[0].groups) == 6 and actions[0].version == 0
    (launch,) = tell(scheduler, EngineReady(1))
    assert launch == Launch(("g00001-01", "g00001-02", "g00002-01", "g00002-02"))
    assert (scheduler.dispatched, scheduler.launched, scheduler.terminated, scheduler.capacity) == (12, 4, 0, 4)


def test_cell_joins_only_when_the_rest_covers_the_outstanding():
    scheduler = started(supply_hold_s=60.0)
    actions = finish(scheduler, 1)
    assert actions == [SetTimer(1, 60.0)]
    assert tell(scheduler, TimerFired(1)) == [ToTraining(0, (2, 1))]
    assert tell(scheduler, InTraining(0)) == [SetTimer(2, 60.0)]
    assert tell(scheduler, TimerFired(2)) == []
    assert scheduler.water_level == 6 > scheduler.capacity_without(1)
    assert tell(scheduler, ExecutionEnded("g00002-01")) == []
    assert tell(scheduler, ExecutionEnded("g00002-02")) == [ToTraining(1, (2,))]


def test_supply_break_makes_the_timer_stale():
    scheduler = started(supply_hold_s=60.0, supply_groups=2, groups_per_batch=3)
    assert finish(scheduler, 1, 2) == [SetTimer(1, 60.0)]
    assert tell(scheduler, TimerFired(1)) == [ToTraining(0, (2, 1))]
    assert tell(scheduler, InTraining(0)) == [SetTimer(2, 60.0)]
    finish(scheduler, 3, 4)
    assert assign(scheduler, 1, 2) == []
    assert tell(scheduler, TimerFired(2)) == []
    assert scheduler.roles == ["training", "rollout", "rollout"]


def through_burst(scheduler: Scheduler, first: int) -> list:
    finish(scheduler, first, first + 1, first + 2, first + 3)
    if scheduler.roles[0] != "training":
        tell(scheduler, InTraining(0))
    tell(scheduler, InTraining(1), InTraining(2))
    actions = assign(scheduler, first, first + 1)
    actions += tell(scheduler, BatchTrained(scheduler.step), UpdateDone(scheduler.step))
    actions += assign(scheduler, first + 2, first + 3)
    return actions + tell(scheduler, BatchTrained(scheduler.step))


def test_burst_end_returns_satellites_publishes_then_dispatches():
    scheduler = started()
    actions = through_burst(scheduler, 1)
    assert actions[-1] == Update(1, 3, final=True)
    assert tell(scheduler, UpdateDone(1)) == [ToRollout(1), ToRollout(2)]
    assert tell(scheduler, InRollout(1)) == []
    assert tell(scheduler, InRollout(2)) == [Publish(2)]
    actions = tell(scheduler, Published(2))
    assert [type(a) for a in actions] == [Dispatch, ToRollout, BurstDone, OpenBatch, Launch]
    assert actions[0].version == 2 and len(actions[0].groups) == 4
    assert tell(scheduler, InRollout(0)) == []
    through_burst(scheduler, 5)
    tell(scheduler, UpdateDone(3), InRollout(1), InRollout(2))
    assert tell(scheduler, Published(4)) == [ToRollout(0), BurstDone(1)]
    assert tell(scheduler, InRollout(0)) == [RunDone()]
    assert scheduler.staleness.mean == scheduler.settings.mean_staleness


def test_core_stays_when_next_batch_is_ready_and_everything_fits():
    scheduler = started(steps_per_burst=1, extra_groups=2, bursts=3)
    finish(scheduler, 1, 2)
    tell(scheduler, InTraining(0))
    assign(scheduler, 1, 2)
    finish(scheduler, 3)
    tell(scheduler, TransitionFailed(1), InRollout(1), BatchTrained(0))
    assert scheduler.water_level == 2
    tell(scheduler, UpdateDone(0))
    actions = tell(scheduler, Published(1))
    assert ToRollout(0) not in actions and scheduler.roles[0] == "training"
    assert scheduler.level.queued == 0


def test_late_joiner_returns_and_publication_waits_for_it():
    scheduler = started(steps_per_burst=1)
    finish(scheduler, 1, 2)
    tell(scheduler, InTraining(0))
    assign(scheduler, 1)
    assert scheduler.roles[1] == "to_training"
    assign(scheduler, 2)
    assert tell(scheduler, BatchTrained(0)) == [Update(0, 1, final=True)]
    assert tell(scheduler, UpdateDone(0)) == []
    assert tell(scheduler, InTraining(1)) == [ToRollout(1)]
    assert tell(scheduler, InRollout(1)) == [Publish(1)]


def test_no_cell_joins_while_another_returns():
    scheduler = started()
    finish(scheduler, 1, 2, 3, 4)
    tell(scheduler, InTraining(0))
    assert scheduler.roles[1] == "to_training"
    assign(scheduler, 1, 2)
    tell(scheduler, BatchTrained(0), UpdateDone(0))
    assert tell(scheduler, InTraining(1)) == [ToRollout(1)]
    assert scheduler.ready == 2
    assert tell(scheduler, InRollout(1)) == [ToTraining(1, (2,))]


def test_satellite_that_failed_to_join_is_not_asked_again_in_this_burst():
    scheduler = started()
    finish(scheduler, 1, 2, 3)
    tell(scheduler, InTraining(0))
    assert scheduler.roles[1] == "to_training"
    assert tell(scheduler, TransitionFailed(1)) == []
    assert finish(scheduler, 4) == []
    assert tell(scheduler, InRollout(1)) == []
    assert scheduler.roles == ["training", "rollout", "rollout"]


def test_lost_satellite_takes_later_cells_with_it_for_this_burst():
    scheduler = started()
    finish(scheduler, 1, 2, 3, 4)
    tell(scheduler, InTraining(0))
    assign(scheduler, 1)
    tell(scheduler, InTraining(1), InTraining(2))
    assert scheduler.prefix == 3
    assert tell(scheduler, SatelliteLost(1)) == [ToRollout(2)]
    assert scheduler.prefix == 1 and scheduler.roles == ["training", "lost", "to_rollout"]
    assert tell(scheduler, InRollout(2), InRollout(1)) == []
    assign(scheduler, 2)
    assert tell(scheduler, BatchTrained(0)) == [Update(0, 1, final=False)]


def test_satellite_lost_in_the_reduction_trains_the_batch_again():
    scheduler = started()
    finish(scheduler, 1, 2, 3, 4)
    tell(scheduler, InTraining(0), InTraining(1), InTraining(2))
    assign(scheduler, 1, 2)
    assert tell(scheduler, BatchTrained(0)) == [Update(0, 3, final=False)]
    tell(scheduler, SatelliteLost(2))
    assert tell(scheduler, BatchTrained(0)) == [Update(0, 2, final=False)]
    assert tell(scheduler, UpdateDone(0))[0] == OpenBatch(1)


def test_lost_engine_is_no_capacity_until_it_is_back():
    scheduler = started(extra_groups=4)
    assert scheduler.level.running == 12 and scheduler.level.queued == 4
    tell(scheduler, EngineLost(2))
    assert finish(scheduler, 1) == []
    assert tell(scheduler, EngineReady(2)) == [Launch(("g00007-01", "g00007-02"))]


def test_c18_repeated_end_counts_once_and_unknown_ids_are_refused():
    scheduler = started()
    tell(scheduler, ExecutionEnded("g00001-01"), ExecutionEnded("g00001-01"))
    assert scheduler.terminated == 1
    for event in (
        ExecutionEnded("g00099-01"),
        ExecutionEnded("g00001-03"),
        ExecutionEnded("nonsense"),
        GroupReady("g00000"),
        GroupAssigned("g7"),
    ):
        before = scheduler.snapshot()
        with pytest.raises(ProtocolError):
            tell(scheduler, event)
        assert scheduler.snapshot() == before


def test_c18_staleness_zero_dispatches_and_the_run_ends():
    scheduler = started(steps_per_burst=1, bursts=2)
    for step in range(2):
        finish(scheduler, 2 * step + 1, 2 * step + 2)
        tell(scheduler, InTraining(0))
        assign(scheduler, 2 * step + 1, 2 * step + 2)
        tell(scheduler, TransitionFailed(1), InRollout(1), BatchTrained(step), TransitionFailed(1), InRollout(1), UpdateDone(step))
        tell(scheduler, InTraining(1), InRollout(1))
        actions = tell(scheduler, Published(step + 1), InRollout(0))
    assert actions[-1] == RunDone()
    assert scheduler.staleness.mean == 0 and scheduler.identity_checks == 2


def test_c21_cancelled_execution_frees_its_slot_and_ends_once():
    scheduler = started(oversampling=1, steps_per_burst=1, cells=1)
    assert scheduler.level.running == 4 and scheduler.level.queued == 2
    tell(scheduler, ExecutionEnded("g00001-01"), ExecutionEnded("g00001-03"))
    assert tell(scheduler, GroupReady("g00001")) == [CancelExecutions(("g00001-02",))]
    assert scheduler.level.running == 4
    tell(scheduler, ExecutionEnded("g00001-02"), ExecutionEnded("g00001-02"))
    assert (scheduler.level.running, scheduler.terminated) == (3, 3)


def test_c22_ready_group_cancels_its_queued_executions_without_launching_them():
    scheduler = started(cells=1, steps_per_burst=1, executions_per_group=4)
    assert scheduler.level.running == 4
    actions = tell(scheduler, GroupReady("g00002"))
    assert actions[0] == CancelExecutions(tuple(f"g00002-{i:02d}" for i in range(1, 5)))
    assert scheduler.level.queued == 0 and scheduler.terminated == 4
    assert not any(isinstance(a, Launch) for a in actions)


def test_lost_group_counts_once_as_a_placeholder():
    scheduler = started(steps_per_burst=1)
    finish(scheduler, 1)
    assert tell(scheduler, GroupLost("g00002"))[0] == CancelExecutions(("g00002-01", "g00002-02"))
    tell(scheduler, ExecutionEnded("g00002-01"), ExecutionEnded("g00002-02"), InTraining(0))
    assign(scheduler, 1, 2)
    assert scheduler.assigned == 2 and scheduler.ready == 0


def test_requeued_group_has_a_new_id_and_the_identity_still_holds():
    scheduler = started(steps_per_burst=1, lost_groups="requeue", extra_groups=2)
    finish(scheduler, 1, 2)
    actions = tell(scheduler, ExecutionEnded("g00003-01"), ExecutionEnded("g00003-02"), InTraining(0), InTraining(1))
    actions = tell(scheduler, GroupLost("g00003"))
    assert actions[0] == Dispatch(("g00005",), (("g00005-01", "g00005-02"),), 0)
    assign(scheduler, 1, 2)
    tell(scheduler, BatchTrained(0), UpdateDone(0))
    for cell in (1, 2):
        tell(scheduler, InTraining(cell), InRollout(cell))
    tell(scheduler, Published(1))
    assert scheduler.identity_checks == 1


def test_lost_group_is_not_requeued_where_it_could_never_run():
    scheduler = started(cells=1, steps_per_burst=1, lost_groups="requeue")
    finish(scheduler, 1)
    tell(scheduler, ExecutionEnded("g00002-01"), ExecutionEnded("g00002-02"))
    assert scheduler.roles == ["to_training"]
    assert tell(scheduler, GroupLost("g00002")) == []
    assert scheduler.ready == 2


def test_requeues_end():
    scheduler = started(lost_groups="requeue")
    first = tell(scheduler, GroupLost("g00001"))
    assert first[1].groups == ("g00005",)
    assert tell(scheduler, GroupLost("g00005"))[1].groups == ("g00006",)
    assert not any(isinstance(a, Dispatch) for a in tell(scheduler, GroupLost("g00006")))
    assert scheduler.ready == 1


def test_async_trains_on_fixed_cells_and_never_returns_them():
    scheduler = Scheduler(settings(policy="async", training_cells=2, steps_per_burst=1, extra_groups=2))
    actions = tell(scheduler, RunStarted())
    assert actions[-1] == ToTraining(0, ())
    assert tell(scheduler, EngineReady(2))[0] == Launch(("g00001-01", "g00001-02", "g00002-01", "g00002-02"))
    assert tell(scheduler, InTraining(0)) == [ToTraining(1, (2,))]
    tell(scheduler, InTraining(1))
    finish(scheduler, 1, 2)
    assign(scheduler, 1, 2)
    assert tell(scheduler, BatchTrained(0), UpdateDone(0)) == [Update(0, 2, final=True), Publish(1)]
    actions = tell(scheduler, Published(1))
    assert BurstDone(0) in actions and not any(isinstance(a, ToRollout) for a in actions)
    assert scheduler.prefix == 2


def test_continuous_dispatch_replaces_a_group_when_it_is_ready():
    scheduler = started(policy="async", dispatch="continuous", steps_per_burst=1, bursts=1)
    actions = finish(scheduler, 1)
    assert [a.groups for a in actions if isinstance(a, Dispatch)] == [("g00003",)]
    tell(scheduler, InTraining(0))
    finish(scheduler, 2)
    assign(scheduler, 1, 2)
    actions = tell(scheduler, BatchTrained(0), UpdateDone(0), Published(1))
    assert actions[-1] == RunDone() and CancelExecutions(("g00003-01", "g00003-02")) in actions
    assert scheduler.staleness.counting_identity_holds()


def test_colocate_switches_the_whole_pool_once_everything_has_ended():
    scheduler = started(policy="colocate", streaming=False)
    assert finish(scheduler, 1, 2, 3) == []
    assert finish(scheduler, 4) == [ToTraining(0, ())]
    assert scheduler.capacity == 0
    assert tell(scheduler, InTraining(0)) == [ToTraining(1, ())]
    assert tell(scheduler, InTraining(1)) == [ToTraining(2, ())]
    tell(scheduler, InTraining(2))
    assign(scheduler, 1, 2)
    assert tell(scheduler, BatchTrained(0)) == [Update(0, 3, final=False)]


def test_colocate_with_standalone_pool_keeps_the_tail_running_there():
    scheduler = started(policy="colocate", streaming=True, standalone_capacity=2, extra_groups=1)
    assert finish(scheduler, 1, 2, 3) == []
    assert finish(scheduler, 4)[-1] == ToTraining(0, (-1,))
    assert scheduler.capacity == 2 == scheduler.water_level


def test_batch_that_is_not_full_cannot_be_trained():
    scheduler = started()
    finish(scheduler, 1, 2)
    tell(scheduler, InTraining(0))
    assign(scheduler, 1)
    with pytest.raises(ProtocolError, match="1 groups assigned"):
        tell(scheduler, BatchTrained(0))


def test_c19_first_thing_after_a_restart_is_publishing_the_restored_version():
    scheduler = started()
    through_burst(scheduler, 1)
    tell(scheduler, UpdateDone(1), InRollout(1), InRollout(2), Published(2))
    outstanding = scheduler.outstanding()
    assert outstanding[0] == Publish(2)
    assert ToRollout(0) in outstanding and OpenBatch(2) in outstanding
    assert outstanding[1] == Launch(scheduler.running_executions())


def test_c20_replayed_crash_keeps_finished_running_and_queued_apart():
    scheduler = started(cells=1, cell_capacity=5, steps_per_burst=1, groups_per_batch=3)
    tell(scheduler, ExecutionEnded("g00001-01"), ExecutionEnded("g00001-02"), ExecutionEnded("g00002-01"), EngineLost(0))
    scheduler.handle(ExecutionEnded("g00002-01"), 1.0)
    assert (scheduler.terminated, scheduler.level.running, scheduler.level.queued) == (3, 3, 0)
    assert len(scheduler.running_executions()) == 3


def test_headroom_lets_a_cell_join_later_and_spread_says_how_to_reroute():
    scheduler = started(join_headroom_percent=150, spread_reroutes=True)
    assert finish(scheduler, 1) == []
    assert 100 * scheduler.capacity_without(0) < 150 * scheduler.water_level
    actions = finish(scheduler, 2)
    assert actions == [ToTraining(0, (2, 1), spread=True)]
    assert scheduler.water_level == 4


@pytest.mark.parametrize("phi_groups", [0, 1, 4])
@pytest.mark.parametrize("capacity", [1, 3])
def test_one_cell_without_standalone_pool_always_finishes_its_bursts(phi_groups, capacity):
    """C_s = 0 and K = 1: the core can join only at w = 0, and w does fall to 0, because everything dispatched ends; so no burst hangs."""
    machine = settings(cells=1, cell_capacity=capacity, extra_groups=phi_groups, steps_per_burst=1, supply_groups=2, bursts=3)
    world = AdversarialWorld(machine, random.Random(capacity))
    world.finish()
    assert world.scheduler.published_version == 3


def test_what_a_lost_group_became_can_be_asked():
    scheduler = started(lost_groups="requeue")
    tell(scheduler, GroupLost("g00001"))
    assert not scheduler.expects("g00001") and scheduler.expects("g00005")
    placeholder = started()
    tell(placeholder, GroupLost("g00001"))
    assert placeholder.expects("g00001")


def test_snapshot_is_plain_json_for_people():
    scheduler = started(extra_groups=2)
    finish(scheduler, 1)
    shown = json.loads(json.dumps(scheduler.snapshot()))
    assert shown["water_level"] == 10 and shown["roles"] == ["rollout"] * 3 and shown["ready_groups"] == 1
    assert shown["identity_ok"] and shown["mean_staleness"] is None and shown["target_staleness"] == 1.5
