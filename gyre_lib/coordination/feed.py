"""What the burst flow has to do: an ordered feed of actions and evaluations, each with an id and done once."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """One piece of work. `kind` is an action's class name, or `Evaluate`."""

    entry_id: str
    kind: str
    burst: int
    arguments: dict[str, Any]
    seq: int = 0
    done: bool = False
    result: dict[str, Any] = field(default_factory=dict)


class Feed:
    """Lives on the coordinator's event loop. Followers read it from any position; a re-run flow asks for what is not done."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._by_id: dict[str, Entry] = {}
        self._changed = asyncio.Condition()

    def restore(self, entries: Iterable[Entry]) -> None:
        """Fill a new feed after a restart."""
        for entry in entries:
            self._put(entry)

    async def put(self, entry: Entry) -> None:
        async with self._changed:
            if entry.entry_id not in self._by_id:
                self._put(entry)
                self._changed.notify_all()

    async def finish(self, entry_id: str, result: dict[str, Any]) -> None:
        async with self._changed:
            entry = self._by_id[entry_id]
            entry.done, entry.result = True, result
            self._changed.notify_all()

    async def finish_if_there(self, entry_id: str, result: dict[str, Any]) -> None:
        """Finish an entry that may never have been put (an execution that left nothing to evaluate)."""
        if entry_id in self._by_id:
            await self.finish(entry_id, result)

    def get(self, entry_id: str) -> Entry | None:
        return self._by_id.get(entry_id)

    def pending(self) -> list[Entry]:
        return [entry for entry in self._entries if not entry.done]

    async def after(self, seq: int, timeout_s: float) -> list[Entry]:
        """Entries later than `seq` that are not done; waits for one up to the time-out."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: len(self._entries) > seq), timeout_s)
            return [entry for entry in self._entries[seq:] if not entry.done]

    def _put(self, entry: Entry) -> None:
        entry.seq = len(self._entries) + 1
        self._entries.append(entry)
        self._by_id[entry.entry_id] = entry
