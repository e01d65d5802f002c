"""Feeds the packing buffer: takes ready groups, oldest policy version first, admits and materialises their trajectories, and says when a
batch is trained. The packing buffer itself is pure (`training.packing`); this is the shell around it."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from gyre_lib.config.errors import InputError
from gyre_lib.coordination.feed import Entry
from gyre_lib.coordination.trajectory_buffer import Execution, Group
from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.scheduler import BATCH, UPDATE
from gyre_lib.training.micro_steps import Closed, MicroStep, Wait
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyExecution, ReadyGroup
from gyre_lib.trajectories.admission import admission_rows, admit_nodes, nodes_of_table
from gyre_lib.trajectories.materialisation import materialise_table
from gyre_lib.trajectories.request_follower import RequestFollower
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.tito_record import BadRecord

if TYPE_CHECKING:
    from gyre_lib.coordination.coordinator import Coordinator

log = logging.getLogger("gyre.coordinator")
STEP_COLUMNS = set(SCHEMAS["train_steps"].names)
MICRO_STEP_COLUMNS = set(SCHEMAS["micro_steps"].names)


class BatchFeeder:
    def __init__(self, coordinator: "Coordinator") -> None:
        self._c = coordinator
        self.packing = PackingBuffer(PackingSettings.from_config(coordinator.config))
        self.requests = RequestFollower(coordinator.layout)
        self.step: int | None = None
        self.assigned: list[str] = []
        self.opened_s = 0.0
        self.trained_s = 0.0
        self.stats: list[dict[str, Any]] = []
        self._supplying = asyncio.Lock()
        self._reported: int | None = None
        self._replayed_consumed: list[tuple[str, int]] = []

    def open(self, step: int) -> None:
        """The batch of this step becomes current."""
        self.step, self.assigned, self.stats = step, [], []
        self.opened_s, self.trained_s = time.time(), 0.0
        self.packing.open_batch(step, self._c.settings.groups_per_batch)

    async def supply(self) -> None:
        """Take ready groups while the packing buffer runs low. Without streaming, only once the whole batch is ready."""
        async with self._supplying:
            while self.step is not None and self._wants_group():
                ready = self._available()
                missing = self._c.settings.groups_per_batch - len(self.assigned)
                if not ready or missing == 0 or (not self._c.settings.streaming and len(ready) < missing):
                    return
                await self._take(ready[0], self.step)
        await self.check_trained()

    async def claim(self, cell: int, step: int, command_id: str) -> MicroStep | Wait | Closed:
        """A micro-step for a cell; hands the buffer more groups when it runs low. `command_id`: the train command that the cell executes."""
        if self.step != step or command_id != self._c.cells.train_command(cell, step):
            return Closed(0)
        now = time.time()
        for silent in self.packing.expire(now):
            self._c.cells.kill(silent)
        claimed = self.packing.claim(cell, now)
        if not self._supplying.locked() and self._wants_group():
            self._c.spawn(self.supply())
        return claimed

    async def done(self, cell: int, step: int, command_id: str, micro_step_id: str, stats: dict[str, Any]) -> None:
        """Gradients of a micro-step are accumulated on the cell. An answer for an earlier batch, or an earlier try at it, is too late to
        count: those gradients are dropped."""
        if self.step != step or command_id != self._c.cells.train_command(cell, step):
            return
        now = time.time()
        if not self.packing.done(micro_step_id, cell, now, stats):
            return
        self.stats.append({"micro_step_id": micro_step_id, **stats})
        known = {name: value for name, value in stats.items() if name in MICRO_STEP_COLUMNS}
        row = {**known, "micro_step_id": micro_step_id, "step": step, "status": "done", "cell": cell, "done_s": now}
        self._c.tables.append("micro_steps", [row])
        await self.check_trained()

    def train_again(self) -> None:
        """The batch has to be trained once more before its update."""
        self._reported, self.stats = None, []

    async def check_trained(self) -> None:
        """Tell the scheduler, once, that every micro-step of the batch has been processed and there is a cell to take the update."""
        if self.step is None or self._reported == self.step or not self.packing.finished or self._c.scheduler.prefix == 0:
            return
        self._reported = self.step
        self.trained_s = time.time()
        await self._c.apply(ev.BatchTrained(self.step))

    def progress(self, step: int) -> dict[str, Any]:
        """How far a training step is, for its progress artifact."""
        current = self.step == step
        return {
            "step": step,
            "updated": self._c.scheduler.version > step,
            "groups": self._c.settings.groups_per_batch,
            "assigned": len(self.assigned) if current else 0,
            "micro_steps_done": len(self.stats) if current else 0,
            "trained": current and self.trained_s > 0,
            "cells": self._c.cells.training(),
            "update": max((e.entry_id for e in self._c.feed.pending() if e.kind == "Update" and e.arguments["step"] == step), default=None),
        }

    def record(self, entry: Entry, report: dict[str, Any], phases: dict[str, float], started_s: float) -> None:
        """The step's row, its groups' rows, and the end of its batch."""
        now = time.time()
        step = entry.arguments["step"]
        trained_s = self.trained_s or started_s
        groups = self._consumed(step)
        rewards = [e.score for group in groups for e in self._c.buffer.training_executions(group.group_id) if e.score is not None]
        staleness = [step - group.dispatch_version for group in groups]
        known = {name: value for name, value in report.items() if name in STEP_COLUMNS}
        row = {
            **known,
            "step": step,
            "burst": entry.burst,
            "final": entry.arguments["final"],
            "cells": entry.arguments["cells"],
            "groups": len(groups),
            "micro_steps": len(self.stats),
            "max_trajectories": self._c.config.training.max_trajectories,
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
            "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
            "learning_rate": self._c.config.training.learning_rate,
            "opened_s": self.opened_s,
            "trained_s": trained_s,
            "updated_s": now,
            "duration_s": now - self.opened_s,
            "seconds": {"stream": trained_s - self.opened_s, **phases},
        }
        self._c.tables.append("train_steps", [row])
        for group in groups:
            self._c.tables.group(group, self._c.buffer, consumed_s=now)

    def _consumed(self, step: int) -> list[Group]:
        """The update of this step is complete: its groups leave the buffer."""
        groups = [self._c.buffer.groups[group_id] for group_id in self.assigned]
        for group in groups:
            group.status, group.step = "consumed", step
            for execution_id in group.executions:
                self.requests.forget(execution_id)
        self.step = None
        return groups

    def note(self, event: ev.Event) -> None:
        """What a journalled event says about batches, when the journal is read again."""
        match event:
            case ev.GroupAssigned(group_id):
                self.assigned.append(group_id)
            case ev.UpdateDone(step):
                self._replayed_consumed += [(group_id, step) for group_id in self.assigned]
                self.assigned = []

    async def restore_statuses(self) -> None:
        """After a replay: consumed groups stay consumed; the open batch is built again from the groups it had taken."""
        for group_id, step in self._replayed_consumed:
            self._c.buffer.groups[group_id].status, self._c.buffer.groups[group_id].step = "consumed", step
        if self._c.scheduler.phase not in (BATCH, UPDATE):
            return
        taken, step = self.assigned, self._c.scheduler.version
        self.open(step)
        for group_id in taken:
            group = self._c.buffer.groups[group_id]
            group.status, group.step = "assigned", step
            self.assigned.append(group_id)
            await self._add_group(group)

    def _wants_group(self) -> bool:
        return self.packing.want_group() or not self._c.settings.streaming

    def _available(self) -> list[Group]:
        """Groups that the batch may take: ready ones, and lost ones that no other group replaces, as empty placeholders."""
        lost = [group for group in self._c.buffer.groups.values() if group.status == "lost"]
        return sorted([*self._c.buffer.ready_groups(), *lost], key=lambda g: (g.dispatch_version, g.ready_s, g.group_id))

    async def _take(self, group: Group, step: int) -> None:
        await self._add_group(group)
        group.status, group.step = "assigned", step
        self.assigned.append(group.group_id)
        self._c.tables.group(group, self._c.buffer)
        await self._c.apply(ev.GroupAssigned(group.group_id))

    async def _add_group(self, group: Group) -> None:
        """Put the group into the packing buffer; one whose records cannot be trained counts as an empty one, and the log says why."""
        try:
            executions = self._c.buffer.training_executions(group.group_id)
            self.packing.add_group(await asyncio.to_thread(self._ready_group, group, executions))
        except (InputError, BadRecord) as error:
            log.error("group %s trains nothing: %s", group.group_id, error)
            self.packing.add_group(self._ready_group(group, []))

    def _ready_group(self, group: Group, executions: list[Execution]) -> ReadyGroup:
        return ReadyGroup(
            group_id=group.group_id,
            version=group.dispatch_version,
            executions=[self._ready_execution(execution) for execution in executions],
        )

    def _ready_execution(self, execution: Execution) -> ReadyExecution:
        """Admit and materialise one execution's trajectories from its recorded tokens."""
        layout, limit, version = self._c.layout, self._c.config.training.max_trajectories, execution.dispatch_version
        requests = self.requests.execution(execution.execution_id, execution.requests)
        admission = admit_nodes(
            nodes_of_table(requests),
            run_id=layout.run_id,
            execution_id=execution.execution_id,
            version=version,
            max_trajectories=limit,
        )
        rows = admission_rows(admission, execution_id=execution.execution_id, version=version, max_trajectories=limit)
        self._c.tables.append("admissions", rows)
        return ReadyExecution(
            execution_id=execution.execution_id,
            reward=float(execution.score or 0.0),
            rows=materialise_table(requests, admission.admitted, execution.group_id),
        )
