"""The scheduler: a pure state machine from events to actions. No clock, no I/O, no randomness, counts in integers.

`handle(event, now)` returns the actions to carry out, in order; `now` is for records only and never decides anything.

Invariants (numbered; the property tests assert each after every event):

 1. Counters: 0 <= f <= p <= d; w = d - f. Every dispatched execution ends once, whatever its outcome; request retries change nothing.
 2. Dispatch: d changes at the start ((phi + mu) B groups), at each publication (mu B groups) and, where asked for, when a lost group is
    re-queued; with continuous dispatch, when a group is ready. Inside a burst w never rises (re-queueing and continuous dispatch apart).
 3. Capacity: cells in training, in transition either way, or without healthy engines are not capacity. A launch never brings the running
    executions above the capacity, and after every event either nothing is queued or no slot is free.
 4. Join: cell k+1 leaves rollout only if what then remains covers w (times the headroom, where that is set), so every affected execution
    has a destination and after the transition nothing is queued. Destinations: the standalone pool, then rollout cells in descending
    order, or all of them by load (`spread_reroutes`).
 5. Supply: a join (elastic, colocate) needs min(ready, what the batch still needs) >= ceil(rho_min B), held for tau without a break; the
    hold starts anew after each transition and at each batch start. While no cell trains, groups that the packing buffer took ahead count
    as supply too (nobody has trained them), and without streaming the whole batch must be there: else a buffer that takes early, or
    rho_min = 1, would block the core for ever.
 6. Prefix: transitions are serial, cells join in the order 0, 1, ..., none while another is on its way, in either direction; the cells in
    training are always 0..prefix-1, and they stay to the end of the burst.
 7. Join window: it closes with BatchTrained. A cell still on its way then is not in this step's prefix (its weights would be a step old):
    it returns to rollout as soon as it arrives, and may join again later.
 8. End of a burst: after the final update the satellites return; publication waits until no transition is in flight; the next groups are
    dispatched after the publication. The core stays only if Equation 6 and the supply check say so.
 9. Lost groups count once: consumed as an empty placeholder, or replaced by one new group. A replacement is dispatched only where the
    capacity left beside training covers it (else it might never run while its burst waits for it), at most `requeue_limit` times in a row.
10. Oversampling: when a group is ready (or lost) its unfinished executions are cancelled; those still queued end at once and never launch.
11. A lost satellite leaves the prefix with every later cell, and none of them joins again in this burst. The lost cell itself is out of
    service until InRollout. A satellite that failed to join is not asked again in this burst, nor is any later cell.
12. Staleness: both identities of `staleness.py` hold exactly.
13. Progress: if executions end, groups settle, transitions finish and timers fire, every burst ends. With at least one slot while no cell
    trains, w falls to 0 and makes every join possible; `settings.py` refuses runs without a slot.

Events that repeat what is already known, or that arrive for something no longer awaited (a stale timer, a late InTraining of a cell that
was lost), are ignored. Events that cannot be true (an id never dispatched, a batch closed before it is full) raise ProtocolError.

After a crash the journal is replayed (`replay.py`) and `outstanding()` lists what was ordered and not yet answered. A restarted core keeps
its place: the satellites are reported lost (SatelliteLost(1)) and the step's micro-steps are trained again.
"""

from collections.abc import Callable
from typing import Any

from gyre_lib.scheduling.boundary_dispatch import BoundaryDispatch
from gyre_lib.scheduling.dispatch_queue import AdmittedGroup, DispatchQueue
from gyre_lib.scheduling.events import (
    Action,
    BatchTrained,
    BurstDone,
    CancelExecutions,
    Dispatch,
    EngineLost,
    EngineReady,
    Event,
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
    TimerFired,
    ToRollout,
    ToTraining,
    TransitionFailed,
    Update,
    UpdateDone,
)
from gyre_lib.scheduling.policies import policy_of
from gyre_lib.scheduling.settings import SchedulerSettings
from gyre_lib.scheduling.staleness import StalenessLedger
from gyre_lib.scheduling.supply_check import SupplyCheck

ROLLOUT, TO_TRAINING, TRAINING, TO_ROLLOUT, LOST = "rollout", "to_training", "training", "to_rollout", "lost"
NOT_STARTED, BATCH, UPDATE, RETURNING, PUBLISHING, ENDING, DONE = (
    "not_started",
    "batch",
    "update",
    "returning",
    "publishing",
    "ending",
    "done",
)
STANDALONE = -1


class ProtocolError(RuntimeError):
    """An event that cannot be true in this state; the text says which and why."""


class Scheduler:
    """One run's scheduling state. Read the public attributes freely; only `handle` changes them."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.policy = policy_of(settings)
        self.queue = DispatchQueue()
        self.level = self.queue.level
        self.staleness = StalenessLedger(settings)
        self.phase = NOT_STARTED
        self.roles = [ROLLOUT] * settings.cells
        self.prefix = 0
        """Cells in training, contiguous from the core."""
        self.pool_out = False
        """Colocate: the pool has begun to switch in this burst."""
        self.version = 0
        """Training steps done."""
        self.published_version = 0
        self.ready = 0
        """Settled groups that no batch has taken."""
        self.assigned = 0
        """Groups taken into the current batch."""
        self.capacity = 0
        """Executions that the engines now in rollout can hold."""
        self.standalone_capacity = 0
        """C_s while the standalone pool serves, else 0."""
        self.identity_checks = 0
        """Publications at which the staleness identities were checked."""
        self._dispatch = BoundaryDispatch(settings)
        self._supply = SupplyCheck(settings.supply_hold_s)
        self._engine_up = [False] * settings.cells
        self._joining: int | None = None
        self._joining_late = False
        self._returning = 0
        self._prefix_limit = settings.cells
        self._update: Update | None = None
        self._join_level = -1
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            RunStarted: self._run_started,
            EngineReady: self._engine_ready,
            EngineLost: self._engine_lost,
            GroupReady: self._group_ready,
            GroupLost: self._group_lost,
            GroupAssigned: self._group_assigned,
            BatchTrained: self._batch_trained,
            UpdateDone: self._update_done,
            InTraining: self._in_training,
            InRollout: self._in_rollout,
            TransitionFailed: self._transition_failed,
            SatelliteLost: self._satellite_lost,
            Published: self._published,
            TimerFired: self._timer_fired,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns the actions to carry out, in order. Raises ProtocolError, leaving the state as it was."""
        actions: list[Action] = []
        if type(event) is ExecutionEnded:
            self._execution_ended(event, actions)
            return actions
        self._handlers[type(event)](event, actions)
        self._advance(actions)
        return actions

    # -- what the outside reads

    @property
    def dispatched(self) -> int:
        """d, in executions."""
        return self.level.dispatched

    @property
    def launched(self) -> int:
        """p, in executions."""
        return self.level.launched

    @property
    def terminated(self) -> int:
        """f, in executions."""
        return self.level.terminated

    @property
    def water_level(self) -> int:
        """w = d - f, in executions."""
        return self.level.level

    @property
    def step(self) -> int:
        """The step whose batch is current, from 0."""
        return self.version

    @property
    def burst(self) -> int:
        """The burst under way, from 0."""
        return self.published_version // self.settings.steps_per_burst

    def capacity_without(self, cell: int) -> int:
        """C(k) once this cell has left rollout, in executions."""
        return self.capacity - (self.settings.cell_capacity if self._serves(cell) else 0)

    def expects(self, group: str) -> bool:
        """Whether this group is admitted and a batch is still to take it. After GroupLost: True for a placeholder, False if replaced."""
        return group in self.queue.groups

    def snapshot(self) -> dict[str, Any]:
        """The state for people: plain JSON values."""
        mean = self.staleness.mean
        return {
            "phase": self.phase,
            "burst": self.burst,
            "bursts": self.settings.bursts,
            "step": self.step,
            "version": self.version,
            "published_version": self.published_version,
            "dispatched": self.level.dispatched,
            "launched": self.level.launched,
            "terminated": self.level.terminated,
            "queued": self.level.queued,
            "running": self.level.running,
            "water_level": self.level.level,
            "capacity": self.capacity,
            "roles": list(self.roles),
            "prefix": self.prefix,
            "groups_dispatched": self._dispatch.groups_dispatched,
            "ready_groups": self.ready,
            "assigned_groups": self.assigned,
            "consumed_groups": self.staleness.consumed_groups,
            "supply_held": self._supply.held,
            "mean_staleness": None if mean is None else float(mean),
            "mean_staleness_exact": None if mean is None else str(mean),
            "target_staleness": float(self.settings.mean_staleness),
            "identity_checks": self.identity_checks,
            "identity_ok": self.staleness.counting_identity_holds(),
        }

    def outstanding(self) -> list[Action]:
        """What has been ordered and not yet answered, for a restart; each is to be carried out again by its id (all are idempotent).

        The first is always the publication of the restored version: engines wait for weights while the trainer waits for a batch.
        """
        if self.phase in (NOT_STARTED, DONE):
            return []
        actions: list[Action] = [Publish(self.published_version)]
        if running := self.queue.running():
            actions.append(Launch(running))
        for cell, role in enumerate(self.roles):
            if role == TO_ROLLOUT:
                actions.append(ToRollout(cell))
            elif role == TO_TRAINING:
                actions.append(self._to_training(cell))
        if self.phase == BATCH:
            actions.append(OpenBatch(self.version))
        if self.phase == UPDATE and self._update is not None:
            actions.append(self._update)
        if self.phase == PUBLISHING:
            actions.append(Publish(self.version))
        if timer := self._supply.armed_timer:
            actions.append(timer)
        return actions

    def running_executions(self) -> tuple[str, ...]:
        """Executions launched and not ended, in order of dispatch."""
        return self.queue.running()

    # -- executions and groups

    def _run_started(self, event: RunStarted, actions: list[Action]) -> None:
        if self.phase != NOT_STARTED:
            return
        self._admit(self._dispatch.at_start(), actions)
        self._open_batch(actions)

    def _execution_ended(self, event: ExecutionEnded, actions: list[Action]) -> None:
        if not self.queue.end(event.execution):
            if not self._dispatch.knows_execution(event.execution):
                raise ProtocolError(f"execution {event.execution} ended but was never dispatched")
            return
        level = self.level
        # Most events are of this kind, and an end can cause only launches and, where the supply is held, a join.
        if level.dispatched > level.launched or (self._supply.held and level.level <= self._join_level):
            self._advance(actions)

    def _group_ready(self, event: GroupReady, actions: list[Action]) -> None:
        group = self._unsettled(event.group)
        if group is None:
            return
        self._settle(group, actions)

    def _group_lost(self, event: GroupLost, actions: list[Action]) -> None:
        group = self._unsettled(event.group)
        if group is None:
            return
        self._cancel_unfinished(group, actions)
        if self._may_requeue(group):
            dispatch = self._dispatch.again(self.published_version)
            replacement = dispatch.groups[0]
            self.staleness.replace(event.group, replacement, dispatch.version)
            del self.queue.groups[event.group]
            self.queue.enter(dispatch, group.requeues + 1)
            actions.append(dispatch)
            return
        self._settle(group, actions)

    def _group_assigned(self, event: GroupAssigned, actions: list[Action]) -> None:
        group = self.queue.groups.get(event.group)
        if group is None:
            if not self._dispatch.knows(event.group):
                raise ProtocolError(f"group {event.group} assigned but was never dispatched")
            return
        if not group.settled:
            raise ProtocolError(f"group {event.group} assigned before it was ready")
        if self.phase != BATCH:
            raise ProtocolError(f"group {event.group} assigned while no batch is open (phase {self.phase})")
        if self.assigned == self.settings.groups_per_batch:
            raise ProtocolError(f"group {event.group} assigned to step {self.version}, whose batch already has {self.assigned} groups")
        del self.queue.groups[event.group]
        self.staleness.consume(event.group)
        self.ready -= 1
        self.assigned += 1

    def _unsettled(self, name: str) -> AdmittedGroup | None:
        group = self.queue.groups.get(name)
        if group is None:
            if not self._dispatch.knows(name):
                raise ProtocolError(f"group {name} settled but was never dispatched")
            return None
        return None if group.settled else group

    def _settle(self, group: AdmittedGroup, actions: list[Action]) -> None:
        group.settled = True
        self.ready += 1
        self._cancel_unfinished(group, actions)
        if self.phase not in (ENDING, DONE) and (dispatch := self._dispatch.after_group_ready(self.published_version)):
            self._admit(dispatch, actions)

    def _may_requeue(self, group: AdmittedGroup) -> bool:
        s = self.settings
        return (
            s.lost_groups == "requeue"
            and group.requeues < s.requeue_limit
            and self.phase not in (ENDING, DONE)
            and (self._training_leaves_room() or self.level.covered_by(self.capacity, pending=s.executions_dispatched_per_group))
        )

    def _cancel_unfinished(self, group: AdmittedGroup, actions: list[Action]) -> None:
        if unfinished := self.queue.cancel(group):
            actions.append(CancelExecutions(unfinished))

    def _admit(self, dispatch: Dispatch, actions: list[Action]) -> None:
        for group in dispatch.groups:
            self.staleness.admit(group, dispatch.version)
        self.queue.enter(dispatch)
        actions.append(dispatch)

    # -- engines

    def _engine_ready(self, event: EngineReady, actions: list[Action]) -> None:
        self._set_engines(event.cell, True)

    def _engine_lost(self, event: EngineLost, actions: list[Action]) -> None:
        self._set_engines(event.cell, False)

    def _set_engines(self, cell: int, up: bool) -> None:
        if cell == STANDALONE:
            self.standalone_capacity = self.settings.standalone_capacity if up else 0
        else:
            self._check_cell(cell)
            self._engine_up[cell] = up
        self._count_capacity()

    # -- steps and bursts

    def _batch_trained(self, event: BatchTrained, actions: list[Action]) -> None:
        if event.step < self.version or (event.step == self.version and self.phase == UPDATE):
            return
        if event.step != self.version or self.phase != BATCH:
            raise ProtocolError(f"batch of step {event.step} trained in phase {self.phase} of step {self.version}")
        if self.assigned != self.settings.groups_per_batch:
            raise ProtocolError(
                f"batch of step {event.step} trained with {self.assigned} groups assigned, it needs {self.settings.groups_per_batch}"
            )
        if self.prefix == 0:
            raise ProtocolError(f"batch of step {event.step} trained while no cell is in training")
        self.phase = UPDATE
        self._joining_late = self._joining is not None
        self._supply.reset()
        self._update = Update(event.step, self.prefix, (event.step + 1) % self.settings.steps_per_burst == 0)
        actions.append(self._update)

    def _update_done(self, event: UpdateDone, actions: list[Action]) -> None:
        if event.step < self.version:
            return
        if event.step != self.version or self._update is None:
            raise ProtocolError(f"update of step {event.step} done in phase {self.phase} of step {self.version}")
        final = self._update.final
        self._update = None
        self.version += 1
        self.assigned = 0
        self.staleness.step_done()
        if not final:
            self._open_batch(actions)
            return
        self.phase = RETURNING
        if not self.policy.always_training:
            for cell in range(1, self.prefix):
                self._to_rollout(cell, actions)
            self.prefix = min(self.prefix, 1)

    def _published(self, event: Published, actions: list[Action]) -> None:
        if event.version <= self.published_version:
            return
        if self.phase != PUBLISHING or event.version != self.version:
            raise ProtocolError(f"version {event.version} published in phase {self.phase} at version {self.version}")
        burst = self.burst
        self._check_staleness()
        self.published_version = event.version
        last = burst + 1 == self.settings.bursts
        stays = self.policy.core_stays(self) and not (last and self.policy.needs_supply)
        self._prefix_limit = self.settings.cells
        if not last and (dispatch := self._dispatch.after_publication(event.version)):
            self._admit(dispatch, actions)
        if not stays:
            self.prefix = 0
            self._to_rollout(0, actions)
            self.pool_out = False
            self._count_capacity()
        actions.append(BurstDone(burst))
        if not last:
            self._open_batch(actions)
            return
        self.phase = ENDING
        for group in self.queue.groups.values():
            self._cancel_unfinished(group, actions)

    def _check_staleness(self) -> None:
        self.identity_checks += 1
        if self.settings.dispatch == "boundary" and not self.staleness.boundary_identity_holds():
            raise AssertionError(
                f"staleness identity broken at version {self.version}: {self.staleness.consumed_sum} != {self.staleness.expected_sum}"
            )
        if not self.staleness.counting_identity_holds():
            raise AssertionError(f"staleness counting identity broken at version {self.version}")

    def _open_batch(self, actions: list[Action]) -> None:
        self.phase = BATCH
        self._supply.reset()
        actions.append(OpenBatch(self.version))

    def _timer_fired(self, event: TimerFired, actions: list[Action]) -> None:
        self._supply.fired(event.token)

    # -- cells

    def _in_training(self, event: InTraining, actions: list[Action]) -> None:
        self._check_cell(event.cell)
        if event.cell != self._joining:
            return
        self._joining = None
        self._supply.reset()
        if self._joining_late or event.cell != self.prefix:
            self._joining_late = False
            self._to_rollout(event.cell, actions)
            return
        self.roles[event.cell] = TRAINING
        self.prefix += 1

    def _transition_failed(self, event: TransitionFailed, actions: list[Action]) -> None:
        self._check_cell(event.cell)
        if event.cell != self._joining:
            return
        self._joining = None
        self._joining_late = False
        self.roles[event.cell] = TO_ROLLOUT
        self._returning += 1
        if event.cell > 0:
            self._prefix_limit = min(self._prefix_limit, event.cell)
        self._supply.reset()

    def _in_rollout(self, event: InRollout, actions: list[Action]) -> None:
        self._check_cell(event.cell)
        role = self.roles[event.cell]
        if role not in (TO_ROLLOUT, LOST):
            return
        if role == TO_ROLLOUT:
            self._returning -= 1
        self.roles[event.cell] = ROLLOUT
        self._engine_up[event.cell] = True
        self._supply.reset()
        self._count_capacity()

    def _satellite_lost(self, event: SatelliteLost, actions: list[Action]) -> None:
        self._check_cell(event.cell)
        if event.cell == 0:
            raise ProtocolError("cell 0 is the core, not a satellite: restore it, then report SatelliteLost(1)")
        role = self.roles[event.cell]
        if role == TO_TRAINING:
            self._joining = None
            self._joining_late = False
        elif role != TRAINING:
            return
        self.roles[event.cell] = LOST
        self._engine_up[event.cell] = False
        self._prefix_limit = min(self._prefix_limit, event.cell)
        self._supply.reset()
        if event.cell >= self.prefix:
            return
        for cell in range(event.cell + 1, self.prefix):
            self._to_rollout(cell, actions)
        self.prefix = event.cell
        if self.phase == UPDATE:
            self.phase = BATCH

    def _to_rollout(self, cell: int, actions: list[Action]) -> None:
        self.roles[cell] = TO_ROLLOUT
        self._returning += 1
        actions.append(ToRollout(cell))

    def _check_cell(self, cell: int) -> None:
        if not 0 <= cell < self.settings.cells:
            raise ProtocolError(f"cell {cell} does not exist; the run has cells 0..{self.settings.cells - 1}")

    # -- capacity, and what follows from the state as it now is

    def _serves(self, cell: int) -> bool:
        return self.roles[cell] == ROLLOUT and self._engine_up[cell] and cell >= self.policy.always_training and not self.pool_out

    def _count_capacity(self) -> None:
        serving = sum(self._serves(cell) for cell in range(self.settings.cells))
        self.capacity = self.standalone_capacity + serving * self.settings.cell_capacity

    def _to_training(self, cell: int) -> ToTraining:
        cells = tuple(cell for cell in range(self.settings.cells - 1, -1, -1) if self._serves(cell))
        destinations = (STANDALONE, *cells) if self.standalone_capacity else cells
        return ToTraining(cell, destinations, self.settings.spread_reroutes)

    def _training_leaves_room(self) -> bool:
        fixed_pools = self.policy.always_training > 0
        return fixed_pools or (self.prefix == 0 and self._joining is None and not self.pool_out)

    def _advance(self, actions: list[Action]) -> None:
        level = self.level
        if level.dispatched > level.launched and self.capacity > level.launched - level.terminated and self.phase != ENDING:
            actions.append(Launch(self.queue.launch(level.launchable(self.capacity))))
        phase = self.phase
        if phase == BATCH:
            if self._joining is None and not self._returning and self.prefix < self._prefix_limit:
                self._consider_join(self.prefix, actions)
        elif phase == RETURNING and self._joining is None and not self._returning:
            self.phase = PUBLISHING
            actions.append(Publish(self.version))
        elif phase == ENDING and not self._returning:
            self.phase = DONE
            actions.append(RunDone())

    def _consider_join(self, cell: int, actions: list[Action]) -> None:
        policy = self.policy
        if policy.needs_supply:
            if timer := self._supply.observe(policy.supply_sufficient(self)):
                actions.append(timer)
            if not self._supply.held:
                return
        self._join_level = policy.join_level(self, cell)
        if self.roles[cell] != ROLLOUT or self.level.level > self._join_level:
            return
        self.roles[cell] = TO_TRAINING
        self._joining = cell
        self.pool_out = policy.whole_pool
        self._supply.reset()
        self._count_capacity()
        actions.append(self._to_training(cell))
