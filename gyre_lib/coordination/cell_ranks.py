"""The training ranks of all cells, as the coordinator knows them: which are up, which cells train, and under which command they do."""

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.scheduler import BATCH, TO_TRAINING, TRAINING, UPDATE

if TYPE_CHECKING:
    from gyre_lib.coordination.coordinator import Coordinator


class CellRanks:
    def __init__(self, coordinator: "Coordinator") -> None:
        self._c = coordinator
        self.ready: dict[int, set[int]] = {}
        """Shards of each cell that are up."""
        self.pids: dict[int, dict[int, int]] = {}
        self.memory_released: set[int] = set()
        """Cells whose engines have given their memory to training."""
        self._generations: dict[int, int] = {}

    def training(self) -> list[int]:
        return [cell for cell in range(self._c.settings.cells) if self.is_training(cell)]

    def is_training(self, cell: int) -> bool:
        return self._c.scheduler.roles[cell] == TRAINING

    # -- they start and die

    async def up(self, cell: int, shard: int, pid: int) -> bool:
        """A rank of the cell has started; True once all ranks of all cells have."""
        self.pids.setdefault(cell, {})[shard] = pid
        self._c.ledger.append({"kind": "rank", "now": time.time(), "cell": cell, "shard": shard, "pid": pid})
        ranks = self.ready.setdefault(cell, set())
        if shard in ranks or not ranks:
            await self._c.commands.up(cell)
            self._begin_generation(cell)
            ranks.clear()
        ranks.add(shard)
        return all(len(self.ready.get(c, ())) == self._c.config.cells.ranks_per_cell for c in range(self._c.settings.cells))

    async def up_again(self, cell: int) -> None:
        """The ranks that were reported down are in fact new ones."""
        await self._c.commands.up(cell)
        self._begin_generation(cell)
        self.ready[cell] = set(range(self._c.config.cells.ranks_per_cell))

    async def down(self, cell: int, reason: str) -> None:
        """The cell's ranks died: what it holds of the batch returns to the queue, and it leaves the prefix."""
        self.ready.pop(cell, None)
        await self._c.commands.down(cell, reason)
        if self._c.batches.step is not None:
            self._c.batches.packing.hand_back(cell)
        if cell != 0 and self._c.scheduler.roles[cell] in (TRAINING, TO_TRAINING):
            updating = self._c.scheduler.phase == UPDATE
            await self._c.apply(ev.SatelliteLost(cell))
            if updating and self._c.scheduler.phase == BATCH:
                # It died after its work and before the update: its gradients are gone.
                for entry in self._c.feed.pending():
                    if entry.kind == "Update":
                        await self._c.feed.finish(entry.entry_id, {"superseded": True})
                await self.begin_batch_anew()

    def kill(self, cell: int) -> None:
        """End the ranks of a cell that has stopped answering; their supervisor then does what it does for dead ones."""
        for pid in self.pids.get(cell, {}).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- they train

    def generation(self, cell: int) -> str:
        """Changes with every start of the coordinator and of the cell's ranks, and whenever a batch begins anew: commands of an earlier life
        are not taken for done."""
        return f"{int(self._c.started_s)}.{self._generations.get(cell, 0)}"

    def _begin_generation(self, cell: int) -> None:
        self._generations[cell] = self._generations.get(cell, 0) + 1

    def train_command(self, cell: int, step: int) -> str:
        """Id of the command under which the cell's work on the batch counts; what a rank asks or reports under another is of an earlier life."""
        return f"train-{step}-{cell}-{self.generation(cell)}"

    async def send_train(self, cell: int, step: int) -> None:
        await self._c.commands.send(cell, self.train_command(cell, step), "train", step=step)

    async def begin_batch_anew(self) -> None:
        """All training cells train the open batch from its beginning, with empty gradients; what they did of it so far counts for nothing."""
        step = self._c.batches.step
        if step is None:
            return
        cells = self.training()
        self._c.batches.train_again()
        for cell in cells:
            self._c.batches.packing.hand_back(cell)
            self._c.batches.packing.readmit(cell)
            self._begin_generation(cell)
        for cell in cells:
            await self.send_train(cell, step)
