"""A world that answers the scheduler in the worst order it can think of, and checks the scheduler's invariants after every event.

It has no clock: everything that may happen next is equally possible. Executions end, groups settle or are lost, batches take groups
early or late, transitions finish or fail, engines and satellites die, timers fire stale, events repeat. The checks are written against
the world's own bookkeeping, not the scheduler's. `finish` runs until nothing can happen any more: a run that is not done then is a
deadlock.
"""

import random
from dataclasses import dataclass, field
from fractions import Fraction

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
    SetTimer,
    TimerFired,
    ToRollout,
    ToTraining,
    TransitionFailed,
    Update,
    UpdateDone,
)
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings


class Broken(AssertionError):
    """An invariant does not hold; the text says which."""


@dataclass
class Chances:
    """How often things go wrong, as probabilities per event (failures are bounded by `mishaps`)."""

    group_lost: float = 0.1
    transition_failed: float = 0.1
    repeat: float = 0.03
    mishap: float = 0.03
    mishaps: int = 12


@dataclass
class _Group:
    executions: tuple[str, ...]
    version: int
    open: set[str] = field(default_factory=set)
    settled: bool = False


class AdversarialWorld:
    """Owns a scheduler; `step()` lets one event happen and returns False when none can."""

    def __init__(self, settings: SchedulerSettings, rng: random.Random, chances: Chances | None = None, keep_history: bool = False) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self.history: list[tuple[Event, list[Action]]] = []
        self.keep_history = keep_history
        self.events = 0
        self.done = False
        self._rng = rng
        self._chances = chances or Chances()
        self._pending: list[Event] = []
        self._groups: dict[str, _Group] = {}
        self._running: set[str] = set()
        self._queued: set[str] = set()
        self._dispatched = self._launched = self._ended = 0
        self._roles = ["rollout"] * settings.cells
        self._up = [False] * settings.cells
        self._standalone_up = False
        self._ready: list[str] = []
        self._assigned = 0
        self._batch: int | None = None
        self._batch_asked = False
        self._in_update = False
        self._steps = 0
        self._published = 0
        self._burst_steps = 0
        self._staleness: list[int] = []
        self._pool_out = False
        self._last_break = 0
        self._timer_set_at: dict[int, int] = {}
        self._held_since: int | None = None
        self._barred = settings.cells
        self._last_event: Event | None = None
        self._send(RunStarted())
        for cell in (*range(settings.cells), -1):
            self._pending.append(EngineReady(cell))

    # -- driving

    def finish(self, limit: int = 1_000_000) -> None:
        """Let events happen until none can. Raises Broken for a deadlock or a broken invariant."""
        while self.step():
            if self.events > limit:
                raise Broken(f"no end after {limit} events: {self.scheduler.snapshot()}")
        if not self.done:
            raise Broken(f"deadlock: nothing can happen any more, {self.scheduler.snapshot()}")
        self._check_end()

    def step(self) -> bool:
        """One event, chosen at random among those possible."""
        rng = self._rng
        if self._last_event is not None and rng.random() < self._chances.repeat and self._harmless_repeat(self._last_event):
            self._send(self._last_event, repeated=True)
            return True
        if self._chances.mishaps > 0 and rng.random() < self._chances.mishap and self._mishap():
            return True
        choices = len(self._pending) + self._may_assign() + self._may_close()
        if choices == 0:
            return False
        choice = rng.randrange(choices)
        if choice < len(self._pending):
            self._pending[choice], self._pending[-1] = self._pending[-1], self._pending[choice]
            self._happen(self._pending.pop())
        elif self._may_assign() and choice == len(self._pending):
            self._assign()
        else:
            self._batch_asked = True
            self._pending.append(BatchTrained(self._steps))
        return True

    def _may_assign(self) -> bool:
        if self._batch is None or self._in_update or self._assigned == self.settings.groups_per_batch or not self._ready:
            return False
        return self.settings.streaming or self._assigned > 0 or len(self._ready) >= self.settings.groups_per_batch

    def _may_close(self) -> bool:
        return (
            self._batch is not None
            and not self._in_update
            and not self._batch_asked
            and self._assigned == self.settings.groups_per_batch
            and self._roles[0] == "training"
        )

    def _assign(self) -> None:
        index = self._rng.randrange(len(self._ready))
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        name = self._ready.pop()
        self._assigned += 1
        self._staleness.append(self._steps - self._groups.pop(name).version)
        self._send(GroupAssigned(name))

    def _harmless_repeat(self, event: Event) -> bool:
        """Only what an at-least-once sender repeats: a transition report could be true again for a later transition."""
        return isinstance(event, ExecutionEnded | GroupReady | GroupLost | GroupAssigned | Published | UpdateDone | TimerFired | RunStarted)

    def _mishap(self) -> bool:
        rng, cells = self._rng, self.settings.cells
        if self._queued and rng.random() < 0.2:
            self._chances.mishaps -= 1
            execution = min(self._queued)
            self._queued.discard(execution)
            self._launched += 1
            self._happen(ExecutionEnded(execution))
            return True
        if rng.random() < 0.5:
            cell = rng.randrange(-1, cells)
            serving = self._standalone_up if cell < 0 else self._up[cell] and self._roles[cell] == "rollout"
            if not serving:
                return False
            self._chances.mishaps -= 1
            self._happen(EngineLost(cell))
            self._pending.append(EngineReady(cell))
            return True
        cell = rng.randrange(cells)
        if cell == 0 or self._roles[cell] not in ("training", "to_training"):
            return False
        self._chances.mishaps -= 1
        self._happen(SatelliteLost(cell))
        return True

    # -- what an event does to the world

    def _happen(self, event: Event) -> None:
        match event:
            case ExecutionEnded(execution):
                self._end(execution)
            case GroupReady(group) | GroupLost(group):
                self._settle(group, lost=isinstance(event, GroupLost))
            case EngineReady(cell) | EngineLost(cell):
                up = isinstance(event, EngineReady)
                if cell < 0:
                    self._standalone_up = up
                else:
                    self._up[cell] = up
            case InTraining(cell):
                if self._rng.random() < self._chances.transition_failed:
                    event = TransitionFailed(cell)
                    self._roles[cell] = "to_rollout"
                    self._pending.append(InRollout(cell))
                    if cell > 0:
                        self._barred = min(self._barred, cell)
                else:
                    self._roles[cell] = "training"
                self._reset_supply()
            case InRollout(cell):
                self._roles[cell] = "rollout"
                self._up[cell] = True
                self._reset_supply()
            case SatelliteLost(cell):
                self._lose_satellite(cell)
            case BatchTrained():
                self._in_update = True
                self._batch_asked = False
            case UpdateDone():
                self._steps += 1
                self._assigned = 0
                self._batch = None
                self._in_update = False
                self._reset_supply()
            case Published(version):
                self._published = version
                self._barred = self.settings.cells
            case TimerFired(token):
                if self._timer_set_at.get(token, -1) >= self._last_break:
                    self._held_since = self.events
        self._send(event)

    def _end(self, execution: str) -> None:
        name = execution.rpartition("-")[0]
        self._running.discard(execution)
        self._ended += 1
        group = self._groups.get(name)
        if group is None:
            return
        group.open.discard(execution)
        self._maybe_settles(name, group)

    def _maybe_settles(self, name: str, group: _Group) -> None:
        ended = len(group.executions) - len(group.open)
        if group.settled or (group.open and (ended < self.settings.executions_per_group or self._rng.random() < 0.5)):
            return
        group.settled = True
        lost = self._rng.random() < self._chances.group_lost
        self._pending.append(GroupLost(name) if lost else GroupReady(name))

    def _settle(self, name: str, lost: bool) -> None:
        self._groups[name].settled = True
        self._ready.append(name)

    def _lose_satellite(self, cell: int) -> None:
        self._pending = [event for event in self._pending if not (isinstance(event, InTraining) and event.cell == cell)]
        trained = self._roles[cell] == "training"
        self._roles[cell] = "lost"
        self._up[cell] = False
        self._barred = min(self._barred, cell)
        self._pending.append(InRollout(cell))
        self._reset_supply()
        if not trained:
            return
        if self._in_update:
            self._in_update = False
            self._pending = [event for event in self._pending if not isinstance(event, UpdateDone)]
        elif self._batch_asked:
            self._batch_asked = False
            self._pending = [event for event in self._pending if not isinstance(event, BatchTrained)]

    # -- what an action does to the world

    def _send(self, event: Event, repeated: bool = False) -> None:
        level_before = self._dispatched - self._ended
        actions = self.scheduler.handle(event, 0.0)
        self.events += 1
        if self.keep_history:
            self.history.append((event, actions))
        self._last_event = None if repeated else event
        if repeated and any(not isinstance(action, SetTimer | ToTraining) for action in actions):
            raise Broken(f"repeated {event} caused {actions}")
        for action in actions:
            self._obey(action, event)
        self._check(event, actions, level_before)

    def _obey(self, action: Action, event: Event) -> None:
        match action:
            case Dispatch():
                self._dispatch(action, event)
            case Launch(executions):
                for execution in executions:
                    if execution not in self._queued:
                        raise Broken(f"{execution} launched twice, or after it was cancelled")
                    self._queued.discard(execution)
                    self._running.add(execution)
                    self._pending.append(ExecutionEnded(execution))
                self._launched += len(executions)
                if len(self._running) > self._capacity():
                    raise Broken(f"launch brings {len(self._running)} running executions above capacity {self._capacity()}")
            case CancelExecutions(executions):
                for execution in executions:
                    if execution in self._queued:
                        self._queued.discard(execution)
                        self._launched += 1
                        self._ended += 1
                    elif execution not in self._running:
                        raise Broken(f"{execution} cancelled but it is neither queued nor running")
            case SetTimer(token, _):
                self._timer_set_at[token] = self.events
                self._pending.append(TimerFired(token))
            case OpenBatch(step):
                if step != self._steps or self._batch is not None:
                    raise Broken(f"batch {step} opened at step {self._steps}")
                self._batch = step
                self._reset_supply()
            case ToTraining(cell, destinations, _):
                self._leave(cell, destinations)
            case ToRollout(cell):
                if self._roles[cell] != "training":
                    raise Broken(f"cell {cell} sent to rollout from {self._roles[cell]}")
                self._roles[cell] = "to_rollout"
                self._pending.append(InRollout(cell))
            case Update(step, cells, final):
                training = [cell for cell, role in enumerate(self._roles) if role == "training"]
                if cells < 1 or training[:cells] != list(range(cells)):
                    raise Broken(f"update over {cells} cells while {training} train")
                if final != ((step + 1) % self.settings.steps_per_burst == 0):
                    raise Broken(f"update of step {step} with final={final}")
                self._pending.append(UpdateDone(step))
            case Publish(version):
                if any(role in ("to_training", "to_rollout") for role in self._roles):
                    raise Broken(f"publication while cells move: {self._roles}")
                if self.settings.policy != "async" and "training" in self._roles[1:]:
                    raise Broken("publication while a satellite trains")
                if version != self._steps or version % self.settings.steps_per_burst:
                    raise Broken(f"version {version} published after {self._steps} steps")
                self._pending.append(Published(version))
            case BurstDone():
                self._pool_out = False
            case RunDone():
                self.done = True

    def _dispatch(self, action: Dispatch, event: Event) -> None:
        s = self.settings
        if isinstance(event, RunStarted):
            expected = s.depth_groups
        elif isinstance(event, Published):
            expected = s.refill_groups
        else:
            expected = 1
            if isinstance(event, GroupLost) and not self.scheduler.expects(event.group):
                self._ready.remove(event.group)
                del self._groups[event.group]
        if len(action.groups) != expected or action.version != self._published:
            raise Broken(f"{len(action.groups)} groups of version {action.version} dispatched after {event}")
        for group, executions in zip(action.groups, action.executions, strict=True):
            self._groups[group] = _Group(executions, action.version, set(executions))
            self._queued.update(executions)
            self._dispatched += len(executions)

    def _leave(self, cell: int, destinations: tuple[int, ...]) -> None:
        s = self.settings
        if self._roles[cell] != "rollout" or any(role in ("to_training", "to_rollout") for role in self._roles):
            raise Broken(f"cell {cell} leaves while roles are {self._roles}")
        if any(role != "training" for role in self._roles[:cell]) or cell >= self._barred:
            raise Broken(f"cell {cell} joins out of order: {self._roles}, barred from {self._barred}")
        self._roles[cell] = "to_training"
        pool_was_out = self._pool_out
        self._pool_out = s.policy == "colocate"
        self._pending.append(InTraining(cell))
        if destinations != self._serving():
            raise Broken(f"destinations {destinations}, serving {self._serving()}")
        if s.policy == "async":
            return
        level = self._dispatched - self._ended
        if level * s.join_headroom_percent > 100 * self._capacity() and not pool_was_out:
            raise Broken(f"cell {cell} leaves although w = {level} > C = {self._capacity()}")
        if self._queued and not pool_was_out:
            raise Broken(f"queue not empty after cell {cell} left")
        if s.supply_hold_s > 0 and self._held_since is None:
            raise Broken(f"cell {cell} leaves before the supply was held")
        self._reset_supply()

    # -- checks

    def _serving(self) -> tuple[int, ...]:
        s = self.settings
        first = s.training_cells if s.policy == "async" else 0
        cells = tuple(c for c in range(s.cells - 1, first - 1, -1) if self._roles[c] == "rollout" and self._up[c] and not self._pool_out)
        return (-1, *cells) if self._standalone_up and s.standalone_capacity else cells

    def _capacity(self) -> int:
        s = self.settings
        return sum(s.standalone_capacity if cell < 0 else s.cell_capacity for cell in self._serving())

    def _reset_supply(self) -> None:
        self._last_break = self.events
        self._held_since = None

    def _supply(self) -> int:
        batch = self.settings.groups_per_batch
        if self._roles[0] != "training" or not self.settings.streaming:
            return min(len(self._ready) + self._assigned, batch)
        return min(len(self._ready), batch - self._assigned)

    def _check(self, event: Event, actions: list[Action], level_before: int) -> None:
        s, scheduler = self.settings, self.scheduler
        counters = (scheduler.dispatched, scheduler.launched, scheduler.terminated)
        if counters != (self._dispatched, self._launched, self._ended):
            raise Broken(f"counters {counters}, the world has {(self._dispatched, self._launched, self._ended)}")
        if not 0 <= counters[2] <= counters[1] <= counters[0]:
            raise Broken(f"counters out of order: {counters}")
        level = self._dispatched - self._ended
        grows = isinstance(event, RunStarted | Published) or s.dispatch == "continuous" or s.lost_groups == "requeue"
        if level > level_before and not grows:
            raise Broken(f"w rose from {level_before} to {level} on {event}")
        if self._queued and len(self._running) < self._capacity() and not self.done:
            raise Broken(f"{len(self._queued)} queued while {self._capacity() - len(self._running)} slots are free")
        if scheduler.roles != self._roles:
            raise Broken(f"roles {scheduler.roles}, the world has {self._roles}")
        if scheduler.ready != len(self._ready) or scheduler.assigned != self._assigned:
            raise Broken(f"ready/assigned {scheduler.ready}/{scheduler.assigned}, the world has {len(self._ready)}/{self._assigned}")
        if not scheduler.staleness.counting_identity_holds():
            raise Broken(f"staleness counting identity after {event}")
        needed = s.supply_groups if s.streaming else s.groups_per_batch
        if s.policy == "elastic" and self._supply() < needed:
            self._reset_supply()

    def _check_end(self) -> None:
        s = self.settings
        steps = s.bursts * s.steps_per_burst
        if self._steps != steps or len(self._staleness) != steps * s.groups_per_batch:
            raise Broken(f"{self._steps} steps consumed {len(self._staleness)} groups")
        if self._running or self._queued:
            raise Broken("executions left open at the end")
        mean = self.scheduler.staleness.mean
        if mean != Fraction(sum(self._staleness), len(self._staleness)):
            raise Broken(f"mean staleness {mean}, the world counted {Fraction(sum(self._staleness), len(self._staleness))}")
        if self.scheduler.identity_checks != s.bursts:
            raise Broken(f"identity checked {self.scheduler.identity_checks} times in {s.bursts} bursts")


def random_settings(rng: random.Random) -> SchedulerSettings:
    """A small random machine of any policy."""
    policy = rng.choice(("elastic", "elastic", "async", "colocate"))
    cells = rng.randint(1, 6)
    batch = rng.randint(1, 5)
    standalone = rng.choice((0, 0, rng.randint(1, 12)))
    training_cells = rng.randint(1, cells)
    if policy == "async" and standalone == 0 and training_cells == cells:
        standalone = 3
    return SchedulerSettings(
        policy=policy,
        dispatch=rng.choice(("boundary", "continuous")) if policy == "async" else "boundary",
        streaming=rng.random() < 0.7,
        cells=cells,
        cell_capacity=rng.randint(1, 10),
        standalone_capacity=standalone,
        training_cells=training_cells,
        groups_per_batch=batch,
        executions_per_group=rng.randint(1, 4),
        oversampling=rng.choice((0, 0, 1, 2)),
        steps_per_burst=rng.randint(1, 4),
        extra_groups=rng.randint(0, 2 * batch),
        supply_groups=rng.randint(1, batch),
        supply_hold_s=rng.choice((0.0, 60.0)),
        join_headroom_percent=100 if policy == "colocate" else rng.choice((100, 100, 130)),
        spread_reroutes=rng.random() < 0.3,
        bursts=rng.randint(1, 5),
        lost_groups=rng.choice(("placeholder", "requeue")),
    )
