"""After processes have (re)started: bring engines and ranks back to the roles that the scheduler believes they have."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import psutil

from gyre_lib.coordination.command_queue import CellFailed
from gyre_lib.coordination.coordinator import Coordinator
from gyre_lib.coordination.operations import Operations
from gyre_lib.coordination.routing_table import STANDALONE
from gyre_lib.engines.control import EngineControl, EngineError
from gyre_lib.scheduling import events as ev
from gyre_lib.scheduling.scheduler import LOST, ROLLOUT

RETRY_S = 3.0
log = logging.getLogger("gyre.coordinator")


class Reestablish:
    def __init__(self, coordinator: Coordinator, operations: Operations) -> None:
        self._c = coordinator
        self._operations = operations

    async def after_restart(self) -> None:
        """The coordinator is new, the other processes are not: ask the engines what they serve, and hand the open batch out again."""
        for cell, pids in self._c.cells.pids.items():
            if not all(psutil.pid_exists(pid) for pid in pids.values()):
                await self._c.commands.down(cell, "its ranks are gone")
        for engine in list(self._c.table.engines.values()):
            try:
                version = await asyncio.to_thread(_served_version, engine.url)
            except EngineError:
                # It died meanwhile; its supervisor restarts it and says so.
                continue
            engine.weight_version = version
            await self.engine(engine.cell, version)
        if self._c.cells.is_training(0):
            self._operations.cells_settled.clear()
            self._c.spawn(self._train_again())

    async def engine(self, cell: int, weight_version: int) -> None:
        """An engine is up. It serves if its cell is in rollout, once it holds the published version (it may have started before that was
        published)."""
        published = self._c.table.published_version
        if cell != STANDALONE and self._c.scheduler.roles[cell] != ROLLOUT:
            return
        if weight_version != published:
            folder = self._c.layout.published / str(published)
            for engine in self._c.table.engines_of(cell):
                await asyncio.to_thread(_load, engine.url, folder, published)
        await self._c.engine_up(cell, published)
        await self._c.apply(ev.EngineReady(cell))

    async def cells(self) -> None:
        """All ranks of all cells are new: satellites start over in rollout; a core that was training takes up its batch again."""
        core_trains = self._c.cells.is_training(0)
        if core_trains:
            self._operations.cells_settled.clear()
        for cell in [cell for cell in self._c.cells.training() if cell > 0]:
            await self._c.cells.down(cell, "its ranks were restarted")
            await self._c.cells.up_again(cell)
            await self.lost_satellite(cell)
        if core_trains:
            await self._train_again()

    async def lost_satellite(self, cell: int) -> None:
        """The ranks of a training satellite are gone; its engines take the memory back and serve again."""
        if cell == 0 or self._c.scheduler.roles[cell] != LOST:
            return
        alive = True
        if cell in self._c.cells.memory_released:
            self._c.cells.memory_released.discard(cell)
            try:
                for engine in self._c.table.engines_of(cell):
                    await asyncio.to_thread(EngineControl(engine.url).resume_memory)
            except EngineError as error:
                # The whole node may be gone. Its supervisor says when a new engine is up, which has its memory.
                log.warning("cell %d: its engines are gone with its ranks: %s", cell, error)
                alive = False
        if alive:
            await self._c.engine_up(cell, self._c.table.published_version)
        await self._c.apply(ev.InRollout(cell))
        if not alive:
            await self._c.apply(ev.EngineLost(cell))

    async def _train_again(self) -> None:
        """Put the training cells where the step began, whatever they did of it since: the core at the step's weights (from its checkpoint
        if need be), satellites at what it shows, gradients empty; then hand the batch out."""
        version, step = self._c.scheduler.version, self._c.batches.step
        manifest = await self._core_again(step, version)
        for cell in self._c.cells.training()[1:]:
            try:
                await self._join(cell, step, version, manifest)
            except CellFailed as error:
                await self._c.cells.down(cell, str(error))
                await self.lost_satellite(cell)
        # Only now no rank is in the train command of an earlier life any more.
        await self._c.cells.begin_batch_anew()
        self._operations.cells_settled.set()

    async def _core_again(self, step: int | None, version: int) -> dict[str, Any]:
        """The core's manifest, once the core is back; without it nothing can go on, so it is waited for."""
        while True:
            try:
                await self._join(0, step, version, None)
                report = await self._c.commands.run(0, f"reexpose-{self._c.cells.generation(0)}", "expose", version=version)
            except CellFailed as error:
                log.warning("the core is not back: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._operations.exposed = version, report["result"]["manifest"]
            return report["result"]["manifest"]

    async def _join(self, cell: int, step: int | None, version: int, manifest: dict[str, Any] | None) -> None:
        engines = self._c.engine_addresses(cell)
        await self._c.commands.run(
            cell, f"rejoin-{self._c.cells.generation(cell)}", "join", step=step, version=version, manifest=manifest, engines=engines
        )


def _load(url: str, folder: Path, version: int) -> None:
    with EngineControl(url) as engine:
        engine.load_folder(folder, version)


def _served_version(url: str) -> int:
    with EngineControl(url, timeout_s=5.0) as engine:
        return engine.weight_version()
