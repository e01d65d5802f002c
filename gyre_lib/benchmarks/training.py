"""Training: throughput against a plain loop, idle time of pipeline stages, cost of the update. (`equality` has the matrix of layouts.)

Ranks are forked processes on gloo with one thread each. Figures of one rank without waiting are per CPU second, so that other work on the
machine does not count; what waits is measured in wall time.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.config.run_config import ModelConfig, TrainingConfig
from gyre_lib.models.tiny_model import write_tiny_model
from gyre_lib.training.cell_trainer import CellTrainer
from gyre_lib.training.local_cells import LocalCells, train_batch
from gyre_lib.training.local_ranks import LocalRanks
from gyre_lib.training.micro_steps import MicroStep
from gyre_lib.training.packed_batch import pack
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyGroup
from gyre_lib.training.random_batches import random_groups
from gyre_lib.training.rank_layout import RankLayout

MODEL = {"hidden_size": 160, "head_dim": 40, "intermediate_size": 480, "vocab_size": 611}
"""About 1.9 million parameters."""
SETTINGS = TrainingConfig(learning_rate=1e-4, ratio_low=0.6, ratio_high=1.4, stall_limit_s=120.0)


def run(quick: bool = False) -> list[BenchRow]:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        shape = write_tiny_model(model_dir, **MODEL)
        groups = random_groups(0, 4, 4, shape.vocab, lambda rng: int(rng.integers(150, 500)))
        rows = throughput(model_dir, groups[:1], rounds=4 if quick else 24)
        rows += idle_shares(model_dir, groups)
        rows += update_cost(model_dir, groups)
    return rows


class BufferSource:
    """A packing buffer in this process."""

    def __init__(self, buffer: PackingBuffer):
        self.buffer = buffer

    def claim(self) -> Any:
        return self.buffer.claim(0, 0.0)

    def done(self, micro_step: MicroStep, stats: Any) -> None:
        self.buffer.done(micro_step.micro_step_id, 0, 0.0, stats)


def filled_buffer(groups: list[ReadyGroup], step: int = 0) -> PackingBuffer:
    buffer = PackingBuffer(PackingSettings(row_tokens=2048))
    buffer.open_batch(step, len(groups))
    for group in groups:
        buffer.add_group(group)
    return buffer


def drawn(buffer: PackingBuffer) -> list[MicroStep]:
    """All micro-steps of a filled buffer."""
    micro_steps = []
    while isinstance(claimed := buffer.claim(0, 0.0), MicroStep):
        micro_steps.append(claimed)
    return micro_steps


def throughput(model_dir: Path, groups: list[ReadyGroup], rounds: int) -> list[BenchRow]:
    """One cell, nothing to wait for, beside a plain loop over the same microbatches with the same model in the same process.

    Medians of rounds that alternate which goes first.
    """
    (figures,) = LocalRanks(1, _throughput, model_dir, groups, rounds).results(600.0)
    cell, plain, tokens = figures
    ratio = plain / cell
    return [
        BenchRow("one cell, forward and backward", tokens / cell, "tokens/CPU-s", baseline=tokens / plain),
        BenchRow("one cell against a plain loop", ratio, "of its tokens/s", ">= 0.95", ratio >= 0.95),
    ]


def _throughput(rank: int, model_dir: Path, groups: list[ReadyGroup], rounds: int) -> tuple[float, float, int]:
    trainer = CellTrainer(model_dir, ModelConfig(), SETTINGS, RankLayout(0, 1, 0))
    micro_steps = drawn(filled_buffer(groups))
    tokens = sum(micro_step.tokens for micro_step in micro_steps)
    spent: dict[str, list[float]] = {"cell": [], "plain": []}
    for step in range(rounds + 1):
        source = BufferSource(filled_buffer(groups, step))
        trainer.begin_batch(step)
        ways: list[tuple[str, Callable[[], object]]] = [
            ("cell", partial(trainer.train_stream, source)),
            ("plain", partial(_plain_loop, trainer, micro_steps)),
        ]
        for way, work in ways if step % 2 else reversed(ways):
            begun = time.process_time()
            work()
            spent[way].append(time.process_time() - begun)
        trainer.drop_gradients()
    return statistics.median(spent["cell"][1:]), statistics.median(spent["plain"][1:]), tokens


def _plain_loop(trainer: CellTrainer, micro_steps: list[MicroStep]) -> None:
    """What anyone would write for packed rows: forward, log-probs of the targets, weighted loss, backward."""
    model = trainer.model
    for micro_step in micro_steps:
        batch = pack(micro_step, 0, torch.device("cpu"))
        assert batch is not None
        hidden = model.run(batch.token_ids, batch.bounds, batch.longest, None)
        logits = model.logits(hidden[batch.positions - 1]) / batch.temperature[:, None]
        log_probs = torch.log_softmax(logits, dim=-1).gather(1, batch.token_ids[batch.positions][:, None]).squeeze(1)
        weight = (log_probs.detach() - batch.logprobs).exp().clamp(max=5.0)
        (-(batch.advantage[batch.execution] / batch.execution_targets.float()[batch.execution]) * weight * log_probs).sum().backward()


def idle_shares(model_dir: Path, groups: list[ReadyGroup]) -> list[BenchRow]:
    """Two stages: what share of the stream's wall time each waits for input or for its neighbour, all at once and with pauses."""
    rows = []
    for way, waits in (("all at once", 0), ("groups withheld", 30)):
        buffer = PackingBuffer(PackingSettings(row_tokens=2048))
        with LocalCells(model_dir, buffer, SETTINGS, pp=2) as cells:
            _, streams = train_batch(cells, 0, groups, pauses={number: waits for number in range(len(groups))})
        for stage, report in enumerate(streams[0]):
            total = report.compute_s + report.idle_s + report.neighbour_s
            name = f"two stages, {way}, stage {stage}"
            rows.append(BenchRow(f"{name}: waiting for input", report.idle_s / total, "share"))
            rows.append(BenchRow(f"{name}: waiting for the other stage", report.neighbour_s / total, "share"))
            rows.append(BenchRow(f"{name}: drains", report.drains, "per batch", "= 1", report.drains == 1))
    return rows


def update_cost(model_dir: Path, groups: list[ReadyGroup]) -> list[BenchRow]:
    """Reduction, Adam and broadcast over two cells, per million parameters; best of three updates."""
    buffer = PackingBuffer(PackingSettings(row_tokens=2048))
    with LocalCells(model_dir, buffer, SETTINGS, cells=2) as cells:
        millions = cells.call(0, "read_slab").size / 1e6
        reports = [train_batch(cells, step, groups[:1], joins={1: 0})[0] for step in range(3)]
    names = {"reduction to the core": "reduce_s", "normalise, clip and Adam": "update_s", "broadcast to the satellite": "broadcast_s"}
    return [
        BenchRow(f"update of two cells: {name}", 1e3 * min(getattr(report, field) for report in reports) / millions, "ms/M parameters")
        for name, field in names.items()
    ]
