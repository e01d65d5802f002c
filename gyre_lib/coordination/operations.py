"""How the scheduler's actions are performed: role transitions, optimizer steps, publications.

Each operation is idempotent by its action's id: a flow that was killed and runs again asks for the same id and attaches to the operation
that is still going on, or gets the result of the one that is done. Every phase is timed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gyre_lib.coordination.command_queue import CellFailed
from gyre_lib.coordination.coordinator import Coordinator
from gyre_lib.coordination.feed import Entry
from gyre_lib.coordination.routing_table import Engine
from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.scheduler import BATCH, TO_ROLLOUT, TO_TRAINING, TRAINING

IN_FLIGHT_POLL_S = 0.05
RETRY_S = 1.0
log = logging.getLogger("gyre.coordinator")
Phases = dict[str, float]


class Operations:
    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.exposed: tuple[int, dict[str, Any]] | None = None
        """Version of the core's weights that satellites can pull, and the manifest that says where."""
        self.cells_settled = asyncio.Event()
        """Cleared while training cells are brought back to the beginning of their step after a restart."""
        self.cells_settled.set()
        self._perform: dict[str, Callable[[Entry], Awaitable[dict[str, Any]]]] = {
            "Dispatch": self._dispatch,
            "OpenBatch": self._open_batch,
            "ToTraining": self._to_training,
            "ToRollout": self._to_rollout,
            "Update": self._update,
            "Publish": self._publish,
            "BurstDone": self._nothing_more,
            "RunDone": self._nothing_more,
        }

    async def perform(self, entry: Entry, timeout_s: float) -> dict[str, Any] | None:
        """Perform the action, or attach to it; None if it is not done within the time-out (ask again). Raises CellFailed."""
        if entry.done:
            return entry.result
        task = self._running.get(entry.entry_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._to_the_end(entry))
            self._running[entry.entry_id] = task
        try:
            return await asyncio.wait_for(asyncio.shield(task), timeout_s)
        except TimeoutError:
            return None
        finally:
            if task.done():
                self._running.pop(entry.entry_id, None)

    async def _to_the_end(self, entry: Entry) -> dict[str, Any]:
        result = await self._perform[entry.kind](entry)
        self._c.ledger.append({"kind": "action_done", "now": time.time(), "id": entry.entry_id, "result": result})
        await self._c.feed.finish(entry.entry_id, result)
        return result

    # -- dispatch and steps

    async def _dispatch(self, entry: Entry) -> dict[str, Any]:
        groups = entry.arguments["groups"]
        queries = [self._c.buffer.groups[group_id].task_id for group_id in groups]
        return {"groups": list(groups), "queries": queries, "version": entry.arguments["version"]}

    async def _open_batch(self, entry: Entry) -> dict[str, Any]:
        """Done when the step's update is; the step itself is driven by the cells and by Update."""
        step = entry.arguments["step"]
        if self._c.batches.step == step:
            await self.train(step)
        while self._c.scheduler.version <= step:
            await asyncio.sleep(0.1)
        return {"step": step}

    async def train(self, step: int) -> None:
        """Cells that are already in training (the core that stayed, the prefix of an earlier step) begin with this batch."""
        for cell in self._c.cells.training():
            await self._c.cells.send_train(cell, step)

    async def _update(self, entry: Entry) -> dict[str, Any]:
        step, cells, final = (entry.arguments[name] for name in ("step", "cells", "final"))
        await self.cells_settled.wait()
        if self._c.scheduler.version > step:
            # The update was journalled before a restart; only its result was lost.
            return {"step": step, "cells": cells, "final": final}
        # After a restart the batch is trained once more before its update.
        while not (self._c.batches.packing.finished or entry.done):
            await asyncio.sleep(IN_FLIGHT_POLL_S)
        if entry.done:
            return entry.result
        started_s, life = time.time(), self._c.cells.generation(0)
        executions = self._c.batches.packing.executions
        reports = await asyncio.gather(
            *(
                self._c.commands.run(
                    c, f"update-{entry.entry_id}-{c}-{life}", "update", step=step, cells=cells, final=final, executions=executions
                )
                for c in range(cells)
            )
        )
        checkpoint = await self._c.commands.run(
            0,
            f"checkpoint-{entry.entry_id}-{life}",
            "checkpoint",
            step=step + 1,
            journal_position={"burst": self._c.burst, "step": step + 1},
        )
        phases: Phases = {**reports[0]["phases"], "checkpoint": sum(checkpoint["phases"].values())}
        if not final:
            phases["expose"] = await self._expose(step + 1, entry.entry_id)
        self._c.batches.record(entry, reports[0]["result"], phases, started_s)
        await self._c.apply(ev.UpdateDone(step))
        return {"step": step, "cells": cells, "final": final, "phases": phases, **reports[0]["result"]}

    async def _expose(self, version: int, entry_id: str) -> float:
        started = time.monotonic()
        report = await self._c.commands.run(0, f"expose-{version}-{entry_id}", "expose", version=version)
        self.exposed = version, report["result"]["manifest"]
        return time.monotonic() - started

    # -- transitions

    async def _to_training(self, entry: Entry) -> dict[str, Any]:
        cell = entry.arguments["cell"]
        transition = Transition(self._c, entry, cell, "to_training")
        await self.cells_settled.wait()
        # Performed again after a restart, it may have come further than its result: what the scheduler was told is not to be undone.
        role = self._c.scheduler.roles[cell]
        if role == TO_ROLLOUT and not self._is_recalled(cell):
            return await self._walk_back(cell, transition)
        if role not in (TO_TRAINING, TRAINING):
            return transition.result("superseded")
        try:
            await self._vacate(cell, transition)
            # Where the joining window has closed meanwhile, it would pull weights only to give them back.
            late = cell != 0 and self._c.scheduler.phase != BATCH
            if not late:
                await self._join(cell, transition)
        except CellFailed as error:
            transition.record("failed", str(error))
            await self._c.apply(ev.TransitionFailed(cell))
            return await self._walk_back(cell, transition)
        outcome = "late" if late else "done"
        transition.record(outcome)
        # It may have left this batch before (as a late joiner, or as the core at the end of the last burst): what it held then is back.
        self._c.batches.packing.readmit(cell)
        await self._c.apply(ev.InTraining(cell))
        step = self._c.batches.step
        if step is not None and self._c.cells.is_training(cell):
            await self._c.cells.send_train(cell, step)
        await self._c.batches.check_trained()
        return transition.result(outcome)

    def _is_recalled(self, cell: int) -> bool:
        """A ToRollout stands for the cell's way back."""
        return any(entry.kind == "ToRollout" and entry.arguments["cell"] == cell for entry in self._c.feed.pending())

    async def _walk_back(self, cell: int, transition: "Transition") -> dict[str, Any]:
        """After a failure that the scheduler knows: the cell serves again."""
        await self._restore(cell, transition)
        await self._c.apply(ev.InRollout(cell))
        return transition.result("failed")

    async def _vacate(self, cell: int, transition: "Transition") -> None:
        """Take the cell out of the table, move its executions, and wait until no request is left on it."""
        if self._c.commands.is_down(cell):
            raise CellFailed(f"cell {cell}: its ranks are down")
        engine_ids = {engine.engine_id for engine in self._c.table.engines_of(cell)}
        before = await self._c.proxies.in_flight(engine_ids)
        with transition.phase("route"):
            order = transition.entry.arguments
            transition.rerouted_executions = self._c.table.move_away(engine_ids, order["destinations"], order.get("spread", False))
            await self._c.proxies.push()
        transition.rerouted_requests = before
        with transition.phase("drain"):
            while await self._c.proxies.in_flight(engine_ids):
                await asyncio.sleep(IN_FLIGHT_POLL_S)
        self._c.tables.engines(self._c.table.engines_of(cell), "training", transition.rerouted_executions)

    async def _join(self, cell: int, transition: "Transition") -> None:
        """Give the cell's memory to training and the core's weights to its ranks."""
        version, manifest = (self._c.scheduler.version, None) if cell == 0 else self._exposed_weights()
        report = await self._c.commands.run(
            cell,
            f"join-{transition.entry.entry_id}",
            "join",
            step=self._c.batches.step,
            version=version,
            manifest=manifest,
            engines=self._c.engine_addresses(cell),
        )
        self._c.cells.memory_released.add(cell)
        transition.add(report["phases"])
        transition.weight_version = version
        transition.weight_bytes = report["result"].get("weight_bytes")
        if cell == 0:
            transition.add({"expose": await self._expose(version, transition.entry.entry_id)})

    def _exposed_weights(self) -> tuple[int, dict[str, Any]]:
        if self.exposed is None:
            raise CellFailed("the core has exposed no weights yet")
        return self.exposed

    async def _to_rollout(self, entry: Entry) -> dict[str, Any]:
        cell = entry.arguments["cell"]
        transition = Transition(self._c, entry, cell, "to_rollout")
        if self._c.batches.step is not None:
            self._c.batches.packing.hand_back(cell)
        await self._restore(cell, transition)
        transition.record("done")
        await self._c.apply(ev.InRollout(cell))
        return transition.result("done")

    async def _restore(self, cell: int, transition: "Transition") -> None:
        """Give the engines their memory back. They serve if they hold the published version; else they wait for the publication."""
        published = self._c.table.published_version
        versions = {engine.weight_version for engine in self._c.table.engines_of(cell)}
        if report := await self._left(cell, transition.entry.entry_id, published):
            self._c.cells.memory_released.discard(cell)
            transition.add(report["phases"])
            versions = set(report["result"]["versions"].values())
        if versions == {published}:
            with transition.phase("serve"):
                await self._c.engine_up(cell, published)
        transition.weight_version = published

    async def _left(self, cell: int, entry_id: str, published: int) -> dict[str, Any] | None:
        """The report of the cell's leaving; None when its ranks are down. An engine that died meanwhile is waited for: its supervisor
        restarts it."""
        while not self._c.commands.is_down(cell):
            try:
                return await self._c.commands.run(
                    cell, f"leave-{entry_id}", "leave", version=published, engines=self._c.engine_addresses(cell)
                )
            except CellFailed as error:
                log.warning("cell %d cannot leave training yet: %s", cell, error)
                await asyncio.sleep(RETRY_S)
        return None

    # -- publication

    async def _publish(self, entry: Entry) -> dict[str, Any]:
        version = entry.arguments["version"]
        started_s = time.time()
        training = set(self._c.cells.training())
        engines = [engine for engine in self._c.table.engines.values() if engine.cell not in training]
        targets = [{"engine_id": engine.engine_id, "url": engine.url} for engine in engines]
        report = await self._c.commands.run(0, f"publish-{entry.entry_id}", "publish", version=version, engines=targets)
        failed = report["result"]["failed"]
        self._c.table.published_version = version
        for cell in sorted({engine.cell for engine in engines if engine.engine_id not in failed}):
            await self._c.engine_up(cell, version)
            await self._c.apply(ev.EngineReady(cell))
        for engine in engines:
            if engine.engine_id in failed:
                await self._c.engine_down(engine.cell, f"publication failed: {failed[engine.engine_id]}")
        ended_s = time.time()
        self._c.tables.append(
            "publications",
            [
                {
                    "version": version,
                    "engine_id": engine.engine_id,
                    "burst": entry.burst,
                    "ok": engine.engine_id not in failed,
                    "detail": failed.get(engine.engine_id, ""),
                    "started_s": started_s,
                    "ended_s": ended_s,
                    "duration_s": ended_s - started_s,
                    "phases": report["phases"],
                }
                for engine in engines
            ],
        )
        await self._c.apply(ev.Published(version))
        return {"version": version, "engines": [engine.engine_id for engine in engines], "failed": failed, "phases": report["phases"]}

    async def _nothing_more(self, entry: Entry) -> dict[str, Any]:
        return dict(entry.arguments)


def targets(engines: list[Engine]) -> list[dict[str, str]]:
    """The engines as a command names them to a rank."""
    return [{"engine_id": engine.engine_id, "url": engine.url} for engine in engines]


class Transition:
    """One change of role, with its phases' durations, as it goes into the `transitions` table."""

    def __init__(self, coordinator: Coordinator, entry: Entry, cell: int, direction: str) -> None:
        self._c = coordinator
        self.entry = entry
        self.cell = cell
        self.direction = direction
        self.started_s = time.time()
        self.step = coordinator.batches.step
        self.water_level = coordinator.scheduler.water_level
        self.rerouted_executions = 0
        self.rerouted_requests = 0
        self.weight_version: int | None = None
        self.weight_bytes: int | None = None
        self.phases: Phases = {}

    def phase(self, name: str) -> "_Phase":
        return _Phase(self.phases, name)

    def add(self, phases: Phases) -> None:
        for name, seconds in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds

    def record(self, outcome: str, detail: str = "") -> None:
        ended_s = time.time()
        row = {
            "transition_id": f"{self.entry.entry_id}-{self.direction}",
            "outcome": outcome,
            "detail": detail,
            "burst": self.entry.burst,
            "ended_s": ended_s,
            "duration_s": ended_s - self.started_s,
            **{name: getattr(self, name) for name in (
                "cell", "direction", "step", "started_s", "rerouted_executions", "rerouted_requests", "weight_version", "weight_bytes",
                "water_level", "phases",
            )},
        }  # fmt: skip
        self._c.tables.append("transitions", [row])

    def result(self, outcome: str) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "direction": self.direction,
            "outcome": outcome,
            "seconds": time.time() - self.started_s,
            "rerouted_executions": self.rerouted_executions,
            "rerouted_requests": self.rerouted_requests,
            "phases": self.phases,
        }


class _Phase:
    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self._phases[self._name] = self._phases.get(self._name, 0.0) + time.monotonic() - self._started
