"""Commands for the cells' ranks: an ordered sequence per cell that every rank of it executes, and their reports."""

import asyncio
import contextlib
import time
from collections import defaultdict
from typing import Any


class CellFailed(RuntimeError):
    """A rank reported an error, or its cell is down."""


class CommandQueue:
    """Lives on the coordinator's event loop. A command repeated under its id is not queued again; its report is awaited again."""

    def __init__(self, ranks_per_cell: int) -> None:
        self._ranks_per_cell = ranks_per_cell
        self._commands: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._reports: dict[tuple[int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
        self._down: dict[int, str] = {}
        self._failed: set[tuple[int, str]] = set()
        self._changed = asyncio.Condition()
        # Ranks remember the last number they executed; a restarted coordinator must not number below it.
        self._first_seq = int(time.time())

    async def send(self, cell: int, command_id: str, kind: str, **arguments: Any) -> None:
        async with self._changed:
            again = (cell, command_id) in self._failed
            self._failed.discard((cell, command_id))
            if again or not any(command["id"] == command_id for command in self._commands[cell]):
                self._commands[cell].append({"seq": self._next_seq(cell), "id": command_id, "kind": kind, **arguments})
                self._changed.notify_all()

    async def result(self, cell: int, command_id: str) -> dict[str, Any]:
        """Shard 0's report once every rank has reported. Raises CellFailed."""
        async with self._changed:
            await self._changed.wait_for(lambda: cell in self._down or self._complete(cell, command_id))
            if not self._complete(cell, command_id):
                raise CellFailed(f"cell {cell}: {self._down[cell]}")
        reports = self._reports[cell, command_id]
        for shard, report in sorted(reports.items()):
            if not report["ok"]:
                self._forget(cell, command_id)
                raise CellFailed(f"cell {cell} rank {shard}: {report['error']}")
        return reports[0]

    def _forget(self, cell: int, command_id: str) -> None:
        """A command that failed may be given again under its id: what stood in its way may be gone."""
        self._reports.pop((cell, command_id), None)
        self._failed.add((cell, command_id))

    async def run(self, cell: int, command_id: str, kind: str, **arguments: Any) -> dict[str, Any]:
        await self.send(cell, command_id, kind, **arguments)
        return await self.result(cell, command_id)

    async def after(self, cell: int, seq: int, timeout_s: float) -> list[dict[str, Any]]:
        """Commands later than `seq`; waits for one up to the time-out, then returns an empty list."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._next_seq(cell) > max(seq, self._first_seq) + 1), timeout_s)
            return [command for command in self._commands[cell] if command["seq"] > seq]

    async def report(self, cell: int, report: dict[str, Any]) -> None:
        async with self._changed:
            self._reports[cell, report["command_id"]][report["shard"]] = report
            self._changed.notify_all()

    async def down(self, cell: int, reason: str) -> None:
        """The cell's ranks are gone: whoever waits for a report gets CellFailed."""
        async with self._changed:
            self._down[cell] = reason
            self._changed.notify_all()

    async def up(self, cell: int) -> None:
        """New ranks of the cell have started: they begin with an empty sequence."""
        async with self._changed:
            self._down.pop(cell, None)
            self._commands[cell] = []
            for key in [key for key in self._reports if key[0] == cell]:
                del self._reports[key]

    def is_down(self, cell: int) -> bool:
        return cell in self._down

    def _next_seq(self, cell: int) -> int:
        return self._first_seq + len(self._commands[cell]) + 1

    def _complete(self, cell: int, command_id: str) -> bool:
        return len(self._reports.get((cell, command_id), {})) >= self._ranks_per_cell
