"""The equality matrix: the streamed update in real processes against one plain process that does the batch unpacked in one go."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.config.run_config import TrainingConfig
from gyre_lib.models.tiny_model import write_tiny_model
from gyre_lib.training.local_cells import LocalCells, train_batch
from gyre_lib.training.local_ranks import LocalRanks
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyGroup
from gyre_lib.training.random_batches import random_groups
from gyre_lib.training.reference import PlainTrainer

SETTINGS = TrainingConfig(learning_rate=1e-4, ratio_low=0.6, ratio_high=1.4, stall_limit_s=120.0)
MOST_RANKS = 12
"""Larger layouts are left out: a small machine would only measure its scheduler."""


def run(quick: bool = False) -> list[BenchRow]:
    with tempfile.TemporaryDirectory() as folder:
        return equality(Path(folder), quick)


def equality(folder: Path, quick: bool) -> list[BenchRow]:
    """{TP 1,2} x {PP 1,2,4} x {DP 1,2} x {cells 1,2,3} x {pauses or not} x {packed or not}: gradients of three steps and final weights
    against the plain unpacked trainer. `quick`: up to 4 ranks, packed with pauses."""
    shape = write_tiny_model(folder)
    batches = [random_groups(seed, 3, 4, shape.vocab, lambda rng: int(rng.integers(10, 120)), first_group=10 * seed) for seed in range(3)]
    ((gradients, weights),) = LocalRanks(1, _reference, folder, batches).results(600.0)
    rng = np.random.default_rng(0)
    rows = []
    for tp, pp, dp, count in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2, 3)):
        if tp * pp * dp * count > (4 if quick else MOST_RANKS):
            continue
        for paused, packed in ((True, True), (False, True), (True, False)):
            if quick and not (paused and packed):
                continue
            worst = _worst(folder, batches, gradients, weights, rng, paused, packed, tp=tp, pp=pp, dp=dp, cells=count)
            name = f"equality tp{tp} pp{pp} dp{dp} cells{count}, {'pauses' if paused else 'at once'}, {'packed' if packed else 'unpacked'}"
            rows.append(BenchRow(name, worst, "relative", "<= 1e-5", worst <= 1e-5))
    return rows


def _reference(rank: int, folder: Path, batches: list[list[ReadyGroup]]) -> Any:
    trainer, gradients = PlainTrainer(folder, SETTINGS), []
    for groups in batches:
        trainer.step(groups)
        gradients.append(trainer.gradients())
    return gradients, trainer.weights()


def _worst(
    folder: Path,
    batches: list[list[ReadyGroup]],
    gradients: list[dict[str, Any]],
    weights: dict[str, Any],
    rng: np.random.Generator,
    paused: bool,
    packed: bool,
    **sizes: int,
) -> float:
    """The largest relative difference of any tensor in any step."""
    buffer = PackingBuffer(PackingSettings(row_tokens=256 if packed else 1, row_limit_tokens=256, data_parallel=sizes["dp"]))
    worst = 0.0
    with LocalCells(folder, buffer, SETTINGS, sizes["cells"], sizes["tp"], sizes["pp"], sizes["dp"]) as cells:
        for step, groups in enumerate(batches):
            joins = {cell: int(rng.integers(0, 8)) for cell in range(1, sizes["cells"])}
            pauses = {number: int(rng.integers(0, 6)) for number in range(len(groups))} if paused else None
            train_batch(cells, step, groups, joins=joins, pauses=pauses)
            worst = max(worst, largest_difference(cells.call(0, "gradients"), gradients[step]))
        for cell in range(sizes["cells"]):
            worst = max(worst, largest_difference(cells.call(cell, "weights"), weights))
    return worst


def largest_difference(values: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest over tensors of |a - b| / |b|, norms. Raises ValueError when one side lacks a tensor."""
    if set(values) != set(reference):
        raise ValueError(f"only on one side: {sorted(set(values) ^ set(reference))}")

    def difference(name: str, expected: np.ndarray) -> float:
        apart = float(np.linalg.norm(values[name].astype(np.float64) - expected))
        return apart / max(float(np.linalg.norm(expected)), 1e-30)

    return max(difference(name, expected) for name, expected in reference.items())
