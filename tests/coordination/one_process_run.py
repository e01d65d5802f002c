"""A whole run in one process: the real coordinator and its operations, with stand-ins for the processes around it.

Ranks follow the real command queue and claim real micro-steps; the worker claims, writes a real request record and ends executions; the flow
performs what is in the feed. What each does takes random, short times.
"""

import asyncio
import random
import uuid

from gyre_lib.coordination.command_queue import CellFailed
from gyre_lib.coordination.coordinator import Coordinator
from gyre_lib.coordination.operations import Operations
from gyre_lib.coordination.recovery import Recovery
from gyre_lib.coordination.reestablish import Reestablish
from gyre_lib.coordination.routing_table import Engine
from gyre_lib.engines.control import EngineError
from gyre_lib.scheduling import events as ev
from gyre_lib.training.micro_steps import Closed, MicroStep
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan


class Proxies:
    """Acknowledges every table at once and knows how many records each execution has."""

    registered = ("proxy-0",)

    def __init__(self, recorded):
        self._recorded = recorded

    async def push(self):
        return 0

    async def in_flight(self, engine_ids):
        return 0

    async def close(self, execution_id):
        return {"requests": int(execution_id in self._recorded), "output_tokens": 3}


class OneProcessRun:
    def __init__(self, layout, config, seed):
        self.layout, self.config = layout, config
        self.random = random.Random(seed)
        self.recorded: set[str] = set()
        self.updates: list[int] = []
        self.coordinator: Coordinator | None = None
        self._requests = SegmentWriter(layout, "requests", "proxy-0")
        self._tasks: list[asyncio.Task] = []
        self._life = 0

    async def start(self):
        """Start the coordinator (again), and everything around it."""
        self.coordinator = Coordinator(self.layout, self.config, "secret")
        self.coordinator.proxies = Proxies(self.recorded)
        operations = Operations(self.coordinator)
        self.reestablish = reestablish = Reestablish(self.coordinator, operations)
        await Recovery(self.coordinator).restore()
        await self._workers_of_the_last_life_are_gone()
        ranks = [asyncio.create_task(self._rank(cell)) for cell in range(self.config.cells.count)]
        for cell in range(self.config.cells.count):
            await self.coordinator.cells.up(cell, 0, 0)
            version = self.coordinator.scheduler.published_version
            self.coordinator.add_engine(Engine(f"cell-{cell}", f"http://cell-{cell}", cell, self.config.cells.capacity, False, version))
            await reestablish.engine(cell, version)
        if self.coordinator.scheduler.dispatched == 0:
            await self.coordinator.apply(ev.RunStarted())
        else:
            await reestablish.cells()
        self._tasks = [*ranks, asyncio.create_task(self._worker()), asyncio.create_task(self._flow(operations))]

    async def _workers_of_the_last_life_are_gone(self):
        for worker in self.coordinator.workers.values():
            worker.seen_s = 0.0
        await self.coordinator.tick()
        self._life += 1

    async def crash(self):
        """Everything stops where it is; only what is on disk is left."""
        # Again and again: a task that gets what it waits for in the same moment takes no notice of being cancelled.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.sleep(0.02)
        self.coordinator.tables.close()
        self.coordinator.journal.close()
        self.coordinator.ledger.close()

    async def until_done(self, limit_s):
        async with asyncio.timeout(limit_s):
            while not self.coordinator.run_done:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def _pause(self, longest_s):
        await asyncio.sleep(self.random.random() * longest_s)

    async def _rank(self, cell):
        last = 0
        while True:
            for command in await self.coordinator.commands.after(cell, last, 5.0):
                last = command["seq"]
                report = {"shard": 0, "command_id": command["id"], "ok": True, "error": "", "phases": {command["kind"]: 0.0}, "result": {}}
                try:
                    report["result"] = await self._execute(cell, command)
                except EngineError as error:
                    report |= {"ok": False, "error": str(error)}
                await self.coordinator.commands.report(cell, report)

    async def _execute(self, cell, command):
        await self._pause(0.01)
        if command["kind"] == "train":
            return await self._train(cell, command["step"], command["id"])
        if command["kind"] == "update" and cell == 0:
            self.updates.append(command["step"])
        return {
            "join": {"weight_bytes": 1},
            "expose": {"manifest": {"shards": []}},
            "update": {"executions": command.get("executions"), "loss": 0.0},
            "leave": {"versions": {engine["engine_id"]: command.get("version") for engine in command.get("engines", [])}},
            "publish": {"versions": {}, "failed": {}},
        }.get(command["kind"], {})

    async def _train(self, cell, step, command_id):
        while True:
            claimed = await self.coordinator.batches.claim(cell, step, command_id)
            if isinstance(claimed, Closed):
                return {}
            await self._pause(0.01)
            if isinstance(claimed, MicroStep):
                await self.coordinator.batches.done(cell, step, command_id, claimed.micro_step_id, {})

    async def _worker(self):
        async with asyncio.TaskGroup() as running:
            while True:
                for execution in await self.coordinator.claim(f"worker-{self._life}", 8, 0.05):
                    running.create_task(self._execution(execution.execution_id))

    async def _execution(self, execution_id):
        await self._pause(0.05)
        if execution_id not in self.recorded:
            self._requests.append([_record(self.layout.run_id, execution_id)])
            self.recorded.add(execution_id)
        await self.coordinator.ended(execution_id, "Completed", "", execution_id)

    async def _flow(self, operations):
        async with asyncio.TaskGroup() as performing:
            started = set()
            while True:
                for entry in self.coordinator.feed.pending():
                    if entry.entry_id not in started:
                        started.add(entry.entry_id)
                        performing.create_task(self._perform(operations, entry))
                await asyncio.sleep(0.005)

    async def _perform(self, operations, entry):
        if entry.kind == "Evaluate":
            await self._pause(0.02)
            assessment = {"score": float(self.random.random() < 0.5), "validity": "valid", "started_s": 0.0, "ended_s": 0.0}
            await self.coordinator.assessed(entry.arguments["execution_id"], assessment)
            return
        while not entry.done:
            try:
                await operations.perform(entry, 5.0)
            except CellFailed:
                await self._pause(0.05)


def _record(run_id, execution_id):
    record = RequestRecord(
        run_id=run_id, execution_id=execution_id, request_id=uuid.uuid4().hex, sequence=0, parent_id="", agent_id="", parent_agent_id="",
        role_class="main_task", branch_reason="root", input_ids=[1, 2, 3], output_ids=[4, 5, 6], output_logprobs=[-0.1, -0.2, -0.3],
        version_spans=[VersionSpan(0, 0, 3)], trainable=True, untrainable_reason="", request_digest="d", history_key="h",
        finish_reason="stop", temperature=1.0,
    )  # fmt: skip
    return {**record_to_row(record), "recorded_s": 1.0}
