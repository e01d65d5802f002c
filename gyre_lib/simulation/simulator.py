"""Discrete-event simulation of a run around the live `Scheduler`.

The scheduler decides; this module plays the cluster: executions run on engines that share their speed, evaluations follow, cells compute
micro-steps, transitions and publications take their time. Events of equal time happen in the order in which they were caused.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from gyre_lib.scheduling.events import (
    Action,
    BatchTrained,
    BurstDone,
    CancelExecutions,
    Dispatch,
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
    SetTimer,
    TimerFired,
    ToRollout,
    ToTraining,
    Update,
    UpdateDone,
)
from gyre_lib.scheduling.scheduler import STANDALONE, Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings
from gyre_lib.simulation.engine_pool import EnginePool
from gyre_lib.simulation.executions import Execution, SimulatedGroup
from gyre_lib.simulation.queries import Queries
from gyre_lib.simulation.run_record import Durations, SimulatedRun
from gyre_lib.simulation.trainer import Trainer
from gyre_lib.simulation.workload import Workload

_FOUR_HOURS_S = 4 * 3600.0


class Simulation:
    """One run; `run()` plays it to its end."""

    def __init__(
        self,
        workload: Workload,
        settings: SchedulerSettings,
        *,
        nodes_per_cell: float,
        seed: int = 0,
        record: bool = False,
        queries: Queries | None = None,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self._nodes_per_cell = nodes_per_cell
        self._queries = queries or Queries(workload, seed, settings.executions_dispatched_per_group)
        self._record = record
        self._heap: list[tuple[float, int, Any, Any]] = []
        self._sequence = 0
        self._now = 0.0
        self._events = 0
        self._executions: dict[str, Execution] = {}
        self._groups: dict[str, SimulatedGroup] = {}
        self._queries_used = 0
        self._harness_limits: deque[tuple[float, Execution]] = deque()
        self._standalone = settings.cells
        capacities = [settings.cell_capacity] * settings.cells + [settings.standalone_capacity]
        self._engines = EnginePool(capacities, workload.engine.load_share, workload.engine.load_exponent)
        self._serving = [False] * (settings.cells + 1)
        self._trainer = Trainer(workload, settings.streaming, nodes_per_cell)
        self._ready: list[tuple[int, int, SimulatedGroup]] = []
        self._assigned = 0
        self._batch_open = False
        self._in_training: set[int] = set()
        self._finished = False
        self._durations = Durations()
        self._step_ends: list[float] = []
        self._publications: list[float] = []
        self._role_since = [0.0] * settings.cells
        self._training_cell_s = 0.0
        self._busy_cell_s = 0.0
        self._joins = 0
        self._prefix_sum = 0
        self._roles: list[tuple[float, int, str]] = []
        self._levels: list[tuple[float, int, int, int]] = []
        self._obey: dict[type, Callable[[Any], None]] = {
            Dispatch: self._dispatch,
            Launch: self._launch,
            CancelExecutions: self._cancel,
            SetTimer: self._set_timer,
            OpenBatch: self._open_batch,
            ToTraining: self._to_training,
            ToRollout: self._to_rollout,
            Update: self._update,
            Publish: self._publish,
            BurstDone: self._nothing,
            RunDone: self._run_done,
        }

    def run(self) -> SimulatedRun:
        """Play to the end of the run. Raises RuntimeError if nothing can happen any more before that."""
        self._tell(RunStarted())
        always = self.settings.training_cells if self.settings.policy == "async" else 0
        if self.settings.standalone_capacity:
            self._serve(self._standalone)
        for cell in range(always, self.settings.cells):
            self._serve(cell)
        self._feed()
        heap, limits, next_finish = self._heap, self._harness_limits, self._engines.next_finish
        while not self._finished:
            at = heap[0][0] if heap else inf
            finish = min(next_finish)
            limit = limits[0][0] if limits else inf
            if finish <= at and finish <= limit:
                if finish == inf:
                    raise RuntimeError(f"simulation stuck: {self.scheduler.snapshot()}")
                self._now = finish
                self._harness_done(self._engines.finish(next_finish.index(finish), finish))
            elif limit <= at:
                self._now = limit
                self._harness_limit(limits.popleft()[1])
            else:
                self._now, _, call, argument = heappop(heap)
                call(argument)
        return self._result()

    # -- time and the scheduler

    def _after(self, delay_s: float, call: Any, argument: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (self._now + delay_s, self._sequence, call, argument))

    def _tell(self, event: Any) -> None:
        self._events += 1
        obey = self._obey
        for action in self.scheduler.handle(event, self._now):
            obey[type(action)](action)
        if self._record:
            s = self.scheduler
            self._levels.append((self._now, s.water_level, s.level.running, s.capacity))

    # -- executions

    def _dispatch(self, action: Dispatch) -> None:
        for name, executions in zip(action.groups, action.executions, strict=True):
            query = self._queries[self._queries_used]
            group = SimulatedGroup(name, self._queries_used, action.version, len(executions), query.training_work)
            self._queries_used += 1
            self._groups[name] = group
            columns = zip(executions, query.work_s, query.evaluation_s, query.stuck, query.failed, strict=False)
            for execution, work_s, evaluation_s, stuck, failed in columns:
                self._executions[execution] = Execution(execution, group, work_s, evaluation_s, stuck, failed)

    def _launch(self, action: Launch) -> None:
        now, engines, limits = self._now, self._engines, self._harness_limits
        limit = now + self.workload.execution.harness_limit_s
        serving = [engine for engine, serves in enumerate(self._serving) if serves and engines.capacities[engine]]
        for name in action.executions:
            execution = self._executions[name]
            execution.launched_s = now
            if execution.group.first_launch_s < 0:
                execution.group.first_launch_s = now
            if execution.failed:
                self._after(self.workload.execution.infrastructure_failure_s, self._end, execution)
                continue
            engine = serving[0]
            if len(serving) > 1:
                load, capacities = engines.load, engines.capacities
                engine = min(serving, key=lambda e: load[e] / capacities[e])
            engines.add(engine, execution, execution.work_s, now)
            limits.append((limit, execution))

    def _harness_limit(self, execution: Execution) -> None:
        if execution.engine is None:
            return
        self._engines.remove(execution, self._now)
        execution.timed_out = "harness"
        self._harness_done(execution)

    def _harness_done(self, execution: Execution) -> None:
        overall = execution.launched_s + self.workload.execution.overall_limit_s
        end = self._now + execution.evaluation_s
        if execution.stuck or end > overall:
            execution.timed_out = "overall"
            end = max(overall, self._now)
        self._sequence += 1
        heappush(self._heap, (end, self._sequence, self._end, execution))

    def _end(self, execution: Execution) -> None:
        if execution.ended_s >= 0:
            return
        now = self._now
        execution.ended_s = now
        del self._executions[execution.name]
        group = execution.group
        group.open -= 1
        valid = not execution.failed and execution.timed_out != "overall"
        group.valid += valid
        duration = now - execution.launched_s
        if duration > group.longest_s:
            group.longest_s = duration
            group.longest = execution.timed_out
        durations = self._durations
        durations.executions_s.append(duration)
        if execution.timed_out == "harness":
            durations.harness_timeouts += 1
        elif execution.timed_out:
            durations.overall_timeouts += 1
        durations.failures += execution.failed
        self._tell(ExecutionEnded(execution.name))
        if not group.settled and (group.open == 0 or (self.settings.oversampling and group.valid >= self.settings.executions_per_group)):
            self._settle(group)

    def _settle(self, group: SimulatedGroup) -> None:
        group.settled = True
        if group.open == 0:
            self._count_query(group)
        if group.valid == 0:
            group.training_work = 0.0
            self._tell(GroupLost(group.name))
            if not self.scheduler.expects(group.name):
                return
        else:
            self._tell(GroupReady(group.name))
        self._sequence += 1
        heappush(self._ready, (group.version, self._sequence, group))
        self._feed()

    def _count_query(self, group: SimulatedGroup) -> None:
        duration = self._now - group.first_launch_s
        self._durations.queries_s.append(duration)
        if duration >= _FOUR_HOURS_S and group.longest == "overall":
            self._durations.queries_of_4_h_timed_out += 1

    def _cancel(self, action: CancelExecutions) -> None:
        for name in action.executions:
            execution = self._executions[name]
            if execution.launched_s < 0:
                del self._executions[name]
                execution.group.open -= 1
                continue
            if execution.engine is not None:
                self._engines.remove(execution, self._now)
            self._after(0.0, self._end, execution)

    # -- engines and cells

    def _serve(self, engine: int) -> None:
        self._serving[engine] = True
        self._tell(EngineReady(STANDALONE if engine == self._standalone else engine))

    def _to_training(self, action: ToTraining) -> None:
        cell = action.cell
        self._serving[cell] = False
        if self.settings.policy == "colocate":
            for other in range(self.settings.cells):
                self._serving[other] = False
        self._role(cell, "to_training")
        self._reroute(cell, action)
        self._joins += 1
        self._after(self.workload.cluster.to_training_s, self._cell_in_training, cell)

    def _reroute(self, cell: int, action: ToTraining) -> None:
        """Fill the destinations in order, or by load where the action says so (or nothing has room, after a loss)."""
        engines = self._engines
        moving = deque(engines.drain(cell, self._now))
        destinations = [self._standalone if d == STANDALONE else d for d in action.destinations]
        for engine in () if action.spread else destinations:
            while moving and engines.load[engine] < engines.capacities[engine]:
                left_s, execution = moving.popleft()
                engines.add(engine, execution, left_s + self.workload.engine.reroute_s, self._now)
        for left_s, execution in moving:
            engine = min(destinations, key=lambda e: engines.load[e] / engines.capacities[e])
            engines.add(engine, execution, left_s + self.workload.engine.reroute_s, self._now)

    def _cell_in_training(self, cell: int) -> None:
        self._role(cell, "training")
        self._in_training.add(cell)
        self._trainer.idle.append(cell)
        self._tell(InTraining(cell))
        self._feed()

    def _to_rollout(self, action: ToRollout) -> None:
        cell = action.cell
        self._in_training.discard(cell)
        if cell in self._trainer.idle:
            self._trainer.idle.remove(cell)
        self._role(cell, "to_rollout")
        self._after(self.workload.cluster.to_rollout_s, self._cell_in_rollout, cell)

    def _cell_in_rollout(self, cell: int) -> None:
        self._role(cell, "rollout")
        self._serving[cell] = True
        self._tell(InRollout(cell))

    def _role(self, cell: int, role: str) -> None:
        if role == "rollout":
            self._training_cell_s += self._now - self._role_since[cell]
        elif role == "to_training":
            self._role_since[cell] = self._now
        if self._record:
            self._roles.append((self._now, cell, role))

    # -- training

    def _open_batch(self, action: OpenBatch) -> None:
        self._batch_open = True
        self._assigned = 0
        self._after(0.0, self._feed_later, None)

    def _feed_later(self, _: None) -> None:
        self._feed()

    def _feed(self) -> None:
        """Give free cells micro-steps, taking ready groups into the batch as they are needed."""
        if not self._batch_open or not self._in_training:
            return
        trainer, batch = self._trainer, self.settings.groups_per_batch
        while trainer.idle:
            if claim := trainer.claim():
                cell, seconds = claim
                self._busy_cell_s += seconds
                self._after(seconds, self._micro_step_done, cell)
                continue
            if self._assigned == batch or not self._ready:
                break
            if not self.settings.streaming and self._assigned == 0 and len(self._ready) < batch:
                break
            self._take_group()
        if self._assigned == batch and not trainer.queue and not trainer.working:
            self._batch_open = False
            self._after(self.workload.training.drain_s, self._batch_trained, self.scheduler.step)

    def _take_group(self) -> None:
        group = heappop(self._ready)[2]
        self._assigned += 1
        self._trainer.add_group(group.training_work)
        self._tell(GroupAssigned(group.name))

    def _micro_step_done(self, cell: int) -> None:
        self._trainer.done(cell)
        self._feed()

    def _batch_trained(self, step: int) -> None:
        self._tell(BatchTrained(step))

    def _update(self, action: Update) -> None:
        self._prefix_sum += action.cells
        seconds = self.workload.training.update_s
        self._busy_cell_s += seconds * action.cells
        self._after(seconds, self._update_done, action.step)

    def _update_done(self, step: int) -> None:
        self._step_ends.append(self._now)
        self._tell(UpdateDone(step))
        self._feed()

    def _publish(self, action: Publish) -> None:
        self._after(self.workload.cluster.publication_s, self._is_published, action.version)

    def _is_published(self, version: int) -> None:
        self._publications.append(self._now)
        self._tell(Published(version))
        self._feed()

    def _set_timer(self, action: SetTimer) -> None:
        self._after(action.delay_s, self._timer, action.token)

    def _timer(self, token: int) -> None:
        self._tell(TimerFired(token))

    def _nothing(self, action: Action) -> None:
        pass

    def _run_done(self, action: RunDone) -> None:
        self._finished = True

    def _result(self) -> SimulatedRun:
        total = self._publications[-1]
        for cell in self._in_training:
            self._training_cell_s += self._now - self._role_since[cell]
        cells = self.settings.cells
        elastic_s = total * cells - self._training_cell_s
        standalone_nodes = self.settings.standalone_capacity / self.workload.cluster.concurrency_per_node
        steps = len(self._step_ends)
        mean = self.scheduler.staleness.mean
        assert mean is not None
        return SimulatedRun(
            total_s=total,
            step_ends_s=self._step_ends,
            durations=self._durations,
            mean_staleness=float(mean),
            training_node_s=self._training_cell_s * self._nodes_per_cell,
            busy_node_s=self._busy_cell_s * self._nodes_per_cell,
            rollout_node_s=elastic_s * self._nodes_per_cell + total * standalone_nodes,
            cell_joins=self._joins,
            mean_prefix=self._prefix_sum / steps,
            roles=self._roles,
            levels=self._levels,
            publications_s=self._publications,
            events=self._events,
        )
