"""A run of a few rank processes under a coordinator double."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig
from gyre_lib.models.tiny_model import write_tiny_model
from gyre_lib.training.packing import PackingBuffer, PackingSettings
from gyre_lib.training.random_batches import random_groups
from gyre_lib.transfer.transport import open_transport
from gyre_lib.transfer.weight_exposure import WeightPull
from tests.cells.doubles import CoordinatorDouble, EngineDouble

VOCAB = 211
START_LIMIT_S = 180.0


@dataclass
class CellsUnderTest:
    """Running ranks of some cells, one engine double per cell, and the coordinator double."""

    run: RunLayout
    config: RunConfig
    coordinator: CoordinatorDouble
    engines: list[EngineDouble]
    processes: list["subprocess.Popen[bytes]"]
    model_dir: Path
    _pull: WeightPull = field(default_factory=lambda: WeightPull(open_transport("mooncake")))
    _commands: int = 0

    def engine_of(self, cell: int) -> list[dict[str, str]]:
        return [{"engine_id": f"cell-{cell}", "url": self.engines[cell].url}]

    def command(self, cell: int, kind: str, **arguments: Any) -> dict[str, Any]:
        """Run a command that succeeds; the first rank's report."""
        return self.coordinator.run(cell, self.fresh_id(kind), kind, **arguments)

    def fresh_id(self, kind: str) -> str:
        self._commands += 1
        return f"{kind}-{self._commands}"

    def join_all(self, step: int, version: int) -> None:
        """The core joins and exposes its weights; then every satellite joins with them."""
        self.command(0, "join", step=step, version=version, manifest=None, engines=self.engine_of(0))
        manifest = self.command(0, "expose", version=version)["result"]["manifest"]
        for cell in range(1, self.config.cells.count):
            self.command(cell, "join", step=step, version=version, manifest=manifest, engines=self.engine_of(cell))

    def open_batch(self, step: int, seed: int = 0) -> None:
        packing = PackingBuffer(PackingSettings(row_tokens=256, data_parallel=self.config.cells.data_parallel))
        packing.open_batch(step, 2)
        for group in random_groups(seed, 2, 4, VOCAB, lambda rng: int(rng.integers(20, 120)), version=step):
            packing.add_group(group)
        self.coordinator.packing = packing

    def weights_of(self, cell: int, version: int) -> torch.Tensor:
        """What the cell's first rank holds, read as any satellite would read it."""
        manifest = self.command(cell, "expose", version=version)["result"]["manifest"]["shards"][0]
        slab = torch.zeros(manifest["nbytes"] // 4)
        self._pull.pull_into(slab, manifest, version, timeout_s=20)
        return slab


@pytest.fixture(scope="module")
def start_cells(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Callable[..., CellsUnderTest]]:
    """Starts the ranks of a run with the given `cells` settings; everything is stopped at the end of the module."""
    started: list[CellsUnderTest] = []

    def start(**cells: Any) -> CellsUnderTest:
        folder = tmp_path_factory.mktemp("run")
        write_tiny_model(folder / "model", num_hidden_layers=2)
        run = RunLayout(folder / "run-1")
        config = RunConfig.model_validate(
            {"cells": cells, "model": {"path": str(folder / "model")}, "training": {"learning_rate": 1e-3, "stall_limit_s": 60.0}}
        )
        for path in (run.root, run.published, run.checkpoints):
            path.mkdir()
        run.config.write_text(yaml.safe_dump(config.model_dump()))
        n = config.cells.ranks_per_cell
        coordinator = CoordinatorDouble(ranks_per_cell=n)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n * config.cells.count)}
        processes = []
        for rank in range(n * config.cells.count):
            cell, shard = divmod(rank, n)
            where = ("--cell", str(cell), "--shard", str(shard))
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "gyre_lib.cells.rank", "--run-dir", str(run.root), "--coordinator", coordinator.url, *where],
                        env=os.environ | rendezvous | {"RANK": str(rank), "OMP_NUM_THREADS": "1", "GYRE_CONTROL_SECRET": "secret"},
                        stdout=log,
                        stderr=log,
                    )
                )
        engines = [EngineDouble() for _ in range(config.cells.count)]
        started.append(CellsUnderTest(run, config, coordinator, engines, processes, folder / "model"))
        deadline = time.monotonic() + START_LIMIT_S
        while len(coordinator.ready) < len(processes):
            for rank, process in enumerate(processes):
                assert process.poll() is None, (folder / f"rank-{rank}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"only {coordinator.ready} came up in {START_LIMIT_S:g} s"
            time.sleep(0.1)
        return started[-1]

    yield start
    for cells in started:
        for process in cells.processes:
            process.kill()
            process.wait()
        cells.coordinator.stop()
        for engine in cells.engines:
            engine.stop()
