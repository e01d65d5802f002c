"""After a restart: rebuild the coordinator from its logs, close the gaps that a crash can leave, and take up what was running."""

import contextlib
import time
from typing import Any

import httpx

from gyre_lib.coordination.coordinator import PERFORMED_BY_FLOW, Coordinator, Worker
from gyre_lib.coordination.feed import Entry
from gyre_lib.coordination.proxies import Proxy
from gyre_lib.coordination.routing_table import Engine
from gyre_lib.coordination.trajectory_buffer import Execution
from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.replay import replay_entry
from gyre_lib.trajectories.store import read_table


class Recovery:
    """Used once, before the coordinator serves anybody. The journal rebuilds the scheduler, the ledger what the scheduler does not keep."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator

    async def restore(self) -> None:
        """Rebuild everything from journal and ledger; then go on where they stop."""
        entries = list(self._c.journal.entries())
        if not entries:
            self._c.journal.append({"settings": self._c.settings.to_json()})
            return
        done = {fact["id"]: fact["result"] for fact in self._c.ledger.entries() if fact["kind"] == "action_done"}
        feed_entries: list[Entry] = []
        for entry in entries:
            if "event" not in entry:
                continue
            feed_entries += self._replayed(entry, done)
        for fact in self._c.ledger.entries():
            self._replay_fact(fact)
        self._c.feed.restore(feed_entries)
        await self._resume()

    def _replayed(self, entry: dict[str, Any], done: dict[str, Any]) -> list[Entry]:
        event, actions = replay_entry(self._c.scheduler, entry)
        self._c.event_seq = entry["seq"]
        self._c.batches.note(event)
        feed_entries = []
        for index, action in enumerate(actions):
            self._c.take_note(event, action, entry["now"], live=False)
            if isinstance(action, ev.SetTimer):
                self._c.last_timer = action
            if isinstance(action, PERFORMED_BY_FLOW):
                item = self._c.entry(f"{entry['seq']:06d}-{index}", action)
                item.done, item.result = item.entry_id in done, done.get(item.entry_id, {})
                feed_entries.append(item)
            if isinstance(action, ev.BurstDone):
                self._c.burst = action.burst + 1
            if isinstance(action, ev.Publish):
                self._c.table.published_version = self._c.scheduler.published_version
            self._c.run_done = self._c.run_done or isinstance(action, ev.RunDone)
        return feed_entries

    def _replay_fact(self, fact: dict[str, Any]) -> None:
        match fact["kind"]:
            case "benchmark":
                execution = Execution(fact["execution"], fact["group"], fact["task_path"], fact["task_id"], fact["version"])
                self._c.buffer.add_benchmark_execution(execution)
                self._c.buffer.launch(fact["execution"], fact["now"])
            case "rank":
                self._c.cells.pids.setdefault(fact["cell"], {})[fact["shard"]] = fact["pid"]
            case "engine":
                self._c.table.set_engine(Engine(**fact["engine"]))
            case "proxy":
                self._c.known_proxies[fact["proxy_id"]] = Proxy(fact["proxy_id"], fact["url"], fact["control_url"], fact["uds"])
            case "claimed":
                self._c.buffer.claim(fact["execution"], fact["worker"], fact["now"], self._c.config.rollout.overall_budget_s)
                self._c.workers.setdefault(fact["worker"], Worker(fact["worker"], time.time(), set()))
            case "ended":
                self._c.buffer.end(fact["execution"], fact["now"], fact["outcome"], fact["detail"], fact["artifact"])
                execution = self._c.buffer.executions[fact["execution"]]
                execution.requests, execution.output_tokens = fact["requests"], fact["output_tokens"]
            case "settled":
                self._c.buffer.settle(fact["execution"], fact["now"], fact["score"], fact["validity"], fact["outcome"])

    async def _resume(self) -> None:
        """Close the gaps that a crash can leave between ledger and journal, and take up what was running."""
        self._c.table.published_version = self._c.scheduler.published_version
        for group_id in list(self._c.buffer.groups):
            self._c.buffer.settled_group(group_id, time.time())
        await self._c.batches.restore_statuses()
        for execution in self._c.buffer.executions.values():
            if execution.reached("launched") and not execution.reached("ended"):
                self._c.open_route(execution)
        for proxy in self._c.known_proxies.values():
            # One that is gone registers again when it is back.
            with contextlib.suppress(httpx.HTTPError):
                await self._c.proxies.register(proxy)
        for execution in list(self._c.buffer.executions.values()):
            await self._resume_execution(execution)
        for group in list(self._c.buffer.groups.values()):
            if group.status in ("ready", "lost") and not self._c.run_done:
                await self._c.apply(ev.GroupReady(group.group_id) if group.status == "ready" else ev.GroupLost(group.group_id))
        self._write_missing_rows()
        if self._c.last_timer is not None:
            self._c.arm(self._c.last_timer)

    def _write_missing_rows(self) -> None:
        """Rows whose fact was durable when the crash came before the row."""
        known = set(read_table(self._c.layout, "executions").column("execution_id").to_pylist())
        for execution in self._c.buffer.executions.values():
            if execution.reached("settled") and execution.execution_id not in known:
                self._c.tables.execution(execution)
        for group in self._c.buffer.groups.values():
            if group.status != "consumed":
                self._c.tables.group(group, self._c.buffer)

    async def _resume_execution(self, execution: Execution) -> None:
        if execution.reached("settled") or execution.stage == "queued":
            return
        if execution.reached("ended"):
            if execution.train:
                await self._c.apply(ev.ExecutionEnded(execution.execution_id))
            await self._c.after_end(execution)
            return
        if not execution.reached("claimed"):
            self._c.launch_orders.put_nowait(execution.execution_id)
