"""The coordinator: the shell around the pure scheduler. It journals events, releases actions, and knows every execution and engine.

One event loop, no threads of its own except for reading and writing segments. Order of an event: the scheduler decides, the journal has it
on disk, then the actions are released. What a flow has to perform (transitions, steps, publications, evaluations) goes to the feed; what
needs no person's eye (launches, timers, cancellations) is done here at once.

After a restart the journal rebuilds the scheduler, the ledger what it does not keep; nothing is dispatched or counted twice.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig
from gyre_lib.coordination.batch_feeder import BatchFeeder
from gyre_lib.coordination.cell_ranks import CellRanks
from gyre_lib.coordination.command_queue import CommandQueue
from gyre_lib.coordination.feed import Entry, Feed
from gyre_lib.coordination.journal import Journal
from gyre_lib.coordination.proxies import Proxies, Proxy
from gyre_lib.coordination.recording import Tables
from gyre_lib.coordination.routing_table import Engine, Route, RoutingTable
from gyre_lib.coordination.trajectory_buffer import PLACEHOLDER, Execution, Group, TrajectoryBuffer
from gyre_lib.rollout.sandboxes.circuit import SandboxCircuit, SandboxServiceDown
from gyre_lib.rollout.tasks import find_tasks
from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings
from gyre_lib.trajectories.compaction import compact_all

PERFORMED_BY_FLOW = (ev.Dispatch, ev.OpenBatch, ev.ToTraining, ev.ToRollout, ev.Update, ev.Publish, ev.BurstDone, ev.RunDone)


@dataclass
class Worker:
    worker_id: str
    seen_s: float
    cancelled: set[str]


log = logging.getLogger("gyre.coordinator")
CLAIM_LOST_S = 15.0
"""A claim that its worker does not know of after this long was never received."""
WORKER_LOST_S = 30.0
"""A worker silent for this long is taken for dead; its executions end as infrastructure failures."""


class Coordinator:
    def __init__(self, layout: RunLayout, config: RunConfig, secret: str) -> None:
        self.layout = layout
        self.config = config
        self.tasks = find_tasks(Path(config.rollout.tasks), config.rollout.task_format)
        self.settings = SchedulerSettings.from_config(config)
        self.scheduler = Scheduler(self.settings)
        self.journal = Journal(layout.journal, "burst", on_failure=_stop_here)
        self.ledger = Journal(layout.journal, "ledger", on_failure=_stop_here)
        self.buffer = TrajectoryBuffer()
        # Proxies keep the highest version they have seen: a restarted coordinator must not count below it.
        self.table = RoutingTable(first_version=int(time.time()))
        self.feed = Feed()
        self.commands = CommandQueue(config.cells.ranks_per_cell)
        self.proxies = Proxies(self.table, secret)
        self.tables = Tables(layout, config)
        self.batches = BatchFeeder(self)
        self.launch_orders: asyncio.Queue[str] = asyncio.Queue()
        self.sandboxes = SandboxCircuit()
        self.workers: dict[str, Worker] = {}
        self.cells = CellRanks(self)
        self.known_proxies: dict[str, Proxy] = {}
        self.started_s = time.time()
        self.burst = 0
        self.run_done = False
        self._secret = secret.encode()
        self._query_order = self._shuffled_tasks()
        self.event_seq = 0
        self.last_timer: ev.SetTimer | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def life(self) -> str:
        """Names this start of the coordinator."""
        return f"{self.started_s:.6f}"

    # -- events and actions

    async def apply(self, event: ev.Event) -> None:
        """Give the scheduler an event; release its actions once the journal has them."""
        now = time.time()
        actions = self.scheduler.handle(event, now)
        self.event_seq += 1
        seq = self.event_seq
        entry = {"seq": seq, "now": now, "event": ev.to_json(event), "actions": [ev.to_json(action) for action in actions]}
        self.journal.append(entry)
        for action in actions:
            self.take_note(event, action, now)
        for index, action in enumerate(actions):
            await self._release(f"{seq:06d}-{index}", action)

    async def _release(self, action_id: str, action: ev.Action) -> None:
        match action:
            case ev.Launch(executions):
                await self._launch(executions)
            case ev.SetTimer():
                self.arm(action)
            case ev.CancelExecutions(executions):
                self._cancel(executions)
            case ev.OpenBatch(step):
                self.batches.open(step)
        if isinstance(action, PERFORMED_BY_FLOW):
            await self.feed.put(self.entry(action_id, action))
        if isinstance(action, ev.OpenBatch):
            self.spawn(self.batches.supply())
        if isinstance(action, ev.BurstDone):
            self.tables.seal_journal(self.journal.next_file())
            self.spawn(asyncio.to_thread(compact_all, self.layout))
            self.burst = action.burst + 1
        if isinstance(action, ev.RunDone):
            self.run_done = True
            self.cancel_outstanding("the run has ended")

    def take_note(self, event: ev.Event, action: ev.Action, now: float, live: bool = True) -> None:
        """What an action changes in the buffer; the same live and when the journal is read again (rows are written live only)."""
        match action:
            case ev.Dispatch(groups, executions, version):
                replaced = self.buffer.groups[event.group] if isinstance(event, ev.GroupLost) else None
                for group_id, members in zip(groups, executions, strict=True):
                    self._dispatch(group_id, members, version, now, replaced, live)
            case ev.Launch(executions):
                for execution_id in executions:
                    self.buffer.launch(execution_id, now)

    def _dispatch(self, group_id: str, members: tuple[str, ...], version: int, now: float, replaced: Group | None, live: bool) -> None:
        """Enter a group; a group that replaces a lost one runs the same query again."""
        if replaced is not None:
            replaced.status = "requeued"
            task_path, task_id = replaced.task_path, replaced.task_id
        else:
            task = self._query_order[(int(group_id[1:]) - 1) % len(self._query_order)]
            task_path, task_id = str(task.folder), task.task_id
        group = Group(group_id, task_path, task_id, version, keep=self.settings.executions_per_group, dispatched_s=now)
        executions = [Execution(execution_id, group_id, task_path, task_id, version, dispatched_s=now) for execution_id in members]
        if self.buffer.dispatch(group, executions) and live:
            self.tables.group(group, self.buffer)

    def entry(self, action_id: str, action: ev.Action) -> Entry:
        arguments = {key: value for key, value in ev.to_json(action).items() if key != "kind"}
        return Entry(action_id, type(action).__name__, self.burst, arguments)

    def arm(self, timer: ev.SetTimer) -> None:
        self.last_timer = timer
        asyncio.get_running_loop().call_later(timer.delay_s, lambda: self.spawn(self.apply(ev.TimerFired(timer.token))))

    # -- executions

    def token(self, execution_id: str) -> str:
        """The execution's API key: not guessable, and the same after a restart."""
        return "gyre-" + hmac.new(self._secret, execution_id.encode(), hashlib.sha256).hexdigest()

    async def _launch(self, executions: tuple[str, ...]) -> None:
        for execution_id in executions:
            self.open_route(self.buffer.executions[execution_id])
        try:
            await self.proxies.push()
        finally:
            # The routes are in the table whatever happens to a proxy now; an order that is lost would never end.
            for execution_id in executions:
                self.launch_orders.put_nowait(execution_id)

    def open_route(self, execution: Execution) -> None:
        rollout = self.config.rollout
        digest = hashlib.sha256(self.token(execution.execution_id).encode()).hexdigest()
        self.table.open(
            Route(
                execution.execution_id,
                digest,
                "",
                rollout.max_context_tokens,
                rollout.max_output_tokens,
                rollout.temperature,
                execution.train,
            )
        )

    async def launch_benchmark(self, executions: list[Execution]) -> None:
        """Executions of evaluate-policy: beside the scheduler's counters, never trained."""
        now = time.time()
        for execution in executions:
            self.ledger.append(
                {
                    "kind": "benchmark",
                    "now": now,
                    "execution": execution.execution_id,
                    "task_path": execution.task_path,
                    "task_id": execution.task_id,
                    "group": execution.group_id,
                    "version": execution.dispatch_version,
                }
            )
            self.buffer.add_benchmark_execution(execution)
            self.buffer.launch(execution.execution_id, now)
        await self._launch(tuple(execution.execution_id for execution in executions))

    async def register_proxy(self, proxy: Proxy) -> None:
        """A proxy has started, or has not heard from us for a while: it gets the full table."""
        if self.known_proxies.get(proxy.proxy_id) != proxy:
            self.ledger.append({"kind": "proxy", "now": time.time(), **asdict(proxy)})
            self.known_proxies[proxy.proxy_id] = proxy
        await self.proxies.register(proxy)

    async def claim(self, worker_id: str, slots: int, timeout_s: float) -> list[Execution]:
        """Launch orders for a worker, at most `slots`; waits for the first up to the time-out. None while the sandbox service is down."""
        self.heard_from(worker_id)
        if self.problem or not self.proxies.registered:
            await asyncio.sleep(timeout_s)
            return []
        claimed: list[Execution] = []
        while len(claimed) < slots:
            try:
                wait = timeout_s if not claimed else 0.05
                execution_id = await asyncio.wait_for(self.launch_orders.get(), wait)
            except TimeoutError:
                break
            execution = self.buffer.executions[execution_id]
            if self.buffer.claim(execution_id, worker_id, time.time(), self.config.rollout.overall_budget_s):
                self.ledger.append({"kind": "claimed", "now": time.time(), "execution": execution_id, "worker": worker_id})
                claimed.append(execution)
        return claimed

    def heard_from(self, worker_id: str) -> Worker:
        """Note a sign of life."""
        worker = self.workers.setdefault(worker_id, Worker(worker_id, time.time(), set()))
        worker.seen_s = time.time()
        return worker

    async def heartbeat(self, worker_id: str, running: set[str]) -> set[str]:
        """What a worker says it runs; returns what it shall cancel. An execution that it should run and does not know of (it never heard
        of its claim, or its report was lost) has ended."""
        worker = self.heard_from(worker_id)
        overdue = time.time() - CLAIM_LOST_S
        for execution in list(self.buffer.executions.values()):
            unknown = execution.stage == "claimed" and execution.worker_id == worker_id and execution.execution_id not in running
            if unknown and execution.claimed_s < overdue:
                await self.ended(execution.execution_id, "InfrastructureFailed", f"{worker_id} does not run it", "", by_worker=False)
        return worker.cancelled

    @property
    def problem(self) -> str:
        """Why nothing is launched any more; empty while all is well."""
        try:
            self.sandboxes.check()
        except SandboxServiceDown as down:
            return str(down)
        return ""

    async def ended(
        self, execution_id: str, outcome: str, detail: str, artifact_ref: str, artifact_digest: str = "", by_worker: bool = True
    ) -> None:
        """A launched execution terminated: revoke its key, fix its records, count it once, and have its work evaluated.

        `by_worker`: the worker itself says so, so a failure speaks of its sandboxes.
        """
        execution = self.buffer.executions[execution_id]
        if execution.reached("ended"):
            return
        counts = await self.proxies.close(execution_id)
        self.table.close(execution_id)
        now = time.time()
        if not self.buffer.end(execution_id, now, outcome, detail, artifact_ref):
            return
        execution.requests, execution.output_tokens = counts["requests"], counts["output_tokens"]
        if by_worker:
            self._watch_sandboxes(execution)
        self.ledger.append(
            {
                "kind": "ended",
                "now": now,
                "execution": execution_id,
                "outcome": outcome,
                "detail": detail,
                "artifact": artifact_ref,
                **counts,
            }
        )
        if artifact_ref:
            self.tables.artifact(execution, artifact_digest)
        if execution.train:
            await self.apply(ev.ExecutionEnded(execution_id))
        await self.after_end(execution)

    def _watch_sandboxes(self, execution: Execution) -> None:
        if execution.outcome == "InfrastructureFailed":
            self.sandboxes.failed(execution.outcome_detail)
        elif execution.outcome != "Cancelled":
            self.sandboxes.succeeded()

    async def after_end(self, execution: Execution) -> None:
        if execution.outcome == "Cancelled":
            await self.settle(execution.execution_id, None, "cancelled")
        elif execution.outcome == "OverallTimeout":
            await self.settle(execution.execution_id, None, "unresolved")
        elif execution.outcome == "InfrastructureFailed" or not execution.artifact_ref:
            # What it had made by then is kept, but a score of it would blame the policy for the machine.
            await self.settle(execution.execution_id, 0.0, PLACEHOLDER)
        else:
            await self.feed.put(self._evaluation(execution))

    def _evaluation(self, execution: Execution) -> Entry:
        arguments = {"execution_id": execution.execution_id, "group_id": execution.group_id, "task_id": execution.task_id}
        return Entry(f"evaluate-{execution.execution_id}", "Evaluate", self.burst, arguments)

    async def assessed(self, execution_id: str, assessment: dict[str, Any]) -> None:
        """One evaluation's result. An unresolved one settles nothing: it is tried again, or the overall budget ends."""
        execution = self.buffer.executions[execution_id]
        execution.evaluation_attempts += 1
        self.tables.assessment(execution, assessment)
        if assessment["validity"] == "valid":
            await self.settle(execution_id, assessment["score"], "valid")

    async def settle(self, execution_id: str, score: float | None, validity: str, outcome: str | None = None) -> None:
        execution = self.buffer.executions[execution_id]
        now = time.time()
        if not self.buffer.settle(execution_id, now, score, validity, outcome):
            return
        self.ledger.append(
            {"kind": "settled", "now": now, "execution": execution_id, "score": score, "validity": validity, "outcome": outcome}
        )
        self.tables.execution(execution)
        await self.feed.finish_if_there(f"evaluate-{execution_id}", {"score": score, "validity": validity})
        if not execution.train:
            self.batches.requests.forget(execution_id)
        else:
            await self._after_settlement(execution.group_id, now)

    async def _after_settlement(self, group_id: str, now: float) -> None:
        self._cancel(tuple(self.buffer.surplus(group_id)))
        status = self.buffer.settled_group(group_id, now)
        if status is None:
            return
        self.tables.group(self.buffer.groups[group_id], self.buffer)
        if self.run_done:
            return
        await self.apply(ev.GroupReady(group_id) if status == "ready" else ev.GroupLost(group_id))
        await self.batches.supply()

    def _cancel(self, executions: tuple[str, ...]) -> None:
        for execution_id in executions:
            execution = self.buffer.executions[execution_id]
            if execution.reached("ended"):
                continue
            if execution.reached("claimed") and execution.worker_id in self.workers:
                self.workers[execution.worker_id].cancelled.add(execution_id)
            else:
                self.spawn(self.ended(execution_id, "Cancelled", "not needed any more", ""))

    def cancel_outstanding(self, reason: str) -> None:
        """Cancel every execution that still runs or waits."""
        self._cancel(tuple(e.execution_id for e in self.buffer.executions.values() if not e.reached("ended")))

    def launch_order(self, execution: Execution) -> dict[str, Any]:
        """What a worker needs to run an execution."""
        rollout = self.config.rollout
        proxy = self.proxies.of(execution.execution_id)
        return {
            "execution_id": execution.execution_id,
            "group_id": execution.group_id,
            "task_path": execution.task_path,
            "task_format": rollout.task_format,
            "token": self.token(execution.execution_id),
            "proxy_socket": proxy.uds,
            "harness": rollout.harness,
            "sandbox": rollout.sandbox,
            "harness_budget_s": rollout.harness_budget_s,
            "overall_budget_s": rollout.overall_budget_s,
            "max_turns": rollout.max_turns,
            "max_output_tokens": rollout.max_output_tokens,
            "max_context_tokens": rollout.max_context_tokens,
            "temperature": rollout.temperature,
        }

    def benchmark_executions(self, benchmark_id: str, task_paths: list[str], samples: int) -> list[Execution]:
        """The executions of evaluate-policy, the same for a repeated request."""
        version = self.table.published_version
        return [
            Execution(f"{benchmark_id}-{number:03d}-{sample:02d}", benchmark_id, path, Path(path).name, version, train=False)
            for number, path in enumerate(task_paths)
            for sample in range(samples)
        ]

    # -- engines

    def add_engine(self, engine: Engine) -> None:
        """An engine process is there; it does not serve yet."""
        self.table.set_engine(engine)
        self.ledger.append({"kind": "engine", "now": time.time(), "engine": asdict(engine)})

    async def engine_up(self, cell: int, weight_version: int) -> None:
        """The engines of a cell (or the standalone pool) serve this version."""
        moved = self.table.serve([engine.engine_id for engine in self.table.engines_of(cell)], weight_version)
        await self.proxies.push()
        self.tables.engines(self.table.engines_of(cell), "serving", moved)

    async def engine_down(self, cell: int, reason: str) -> None:
        """The engines of a cell died: its executions move, their requests are retried elsewhere."""
        moved = self.table.move_away([engine.engine_id for engine in self.table.engines_of(cell)])
        await self.proxies.push()
        self.tables.engines(self.table.engines_of(cell), reason, moved)
        await self.apply(ev.EngineLost(cell))

    def engine_addresses(self, cell: int) -> list[dict[str, str]]:
        """The engines of a cell, as its ranks are told."""
        return [{"engine_id": engine.engine_id, "url": engine.url} for engine in self.table.engines_of(cell)]

    # -- time

    async def tick(self) -> None:
        """Once a second: overall budgets that have ended, workers that are gone."""
        now = time.time()
        for execution in list(self.buffer.executions.values()):
            if execution.reached("ended") and not execution.reached("settled") and now > execution.deadline_s:
                await self.settle(execution.execution_id, None, "unresolved", "OverallTimeout")
        for worker in [w for w in self.workers.values() if now - w.seen_s > WORKER_LOST_S]:
            await self._worker_lost(worker.worker_id)
            del self.workers[worker.worker_id]

    async def _worker_lost(self, worker_id: str) -> None:
        for execution in list(self.buffer.executions.values()):
            if execution.worker_id == worker_id and not execution.reached("ended"):
                await self.ended(execution.execution_id, "InfrastructureFailed", f"worker {worker_id} is gone", "", by_worker=False)

    def spawn(self, work: Any) -> None:
        """Run a coroutine beside the caller; an error in it is the coordinator's error."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "coordinator background task failed", "exception": task.exception()}
            )

    def _shuffled_tasks(self) -> list[Any]:
        """Training queries in an order fixed by the seed, so that a replay dispatches the same."""
        order = list(self.tasks)
        random.Random(self.config.training.seed).shuffle(order)
        return order


def _stop_here(error: OSError) -> None:
    """A fact that could not be written: end the process, so that the restart goes on from what is durable."""
    log.critical("the coordinator stops: %s", error)
    logging.shutdown()
    os._exit(1)
