"""Packing: bins and time of best-fit-decreasing beside first-fit-decreasing, and what streaming costs in bins."""

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.training.bin_packing import best_fit_decreasing, first_fit_decreasing
from gyre_lib.training.micro_steps import MicroStep
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyExecution, ReadyGroup
from gyre_lib.trajectories.materialisation import TrajectoryRow

CAPACITY = 131_072
MEDIAN, SIGMA = 20_000, 1.0


def run(quick: bool = False) -> list[BenchRow]:
    """Lognormal row lengths (median 20k, sigma 1, cut at the capacity of 131,072 tokens)."""
    rows = []
    for count, limit_ms in ((4096, 6.0), (16_384, 30.0)):
        rows += at_once(count, limit_ms, draws=2 if quick else 8)
    for executions, max_rows in ((16, 5), (16, 1)):
        rows += streaming(1 if quick else 4, groups=32, executions=executions, max_rows=max_rows)
    return rows


def at_once(count: int, limit_ms: float, draws: int) -> list[BenchRow]:
    """Best CPU time over all draws; bins summed over them, as a single bin of one draw is 0.1% of it. First-fit-decreasing beside both."""
    best_s = first_s = math.inf
    bins = least = above_first = 0
    for seed in range(draws):
        sizes = lengths(np.random.default_rng(seed), count).tolist()
        elapsed_s, packed = timed(partial(best_fit_decreasing, sizes, CAPACITY), 5)
        best_s, bins = min(best_s, elapsed_s), bins + len(packed)
        least += math.ceil(sum(sizes) / CAPACITY)
        if seed < 2:
            elapsed_s, first = timed(partial(first_fit_decreasing, sizes, CAPACITY), 1)
            first_s, above_first = min(first_s, elapsed_s), above_first + len(packed) - len(first)
    excess = 100.0 * (bins / least - 1.0)
    name = f"packing {count} rows"
    return [
        BenchRow(f"{name}, CPU time", best_s * 1e3, "ms", f"<= {limit_ms:g}", best_s * 1e3 <= limit_ms, first_s * 1e3),
        BenchRow(f"{name}, bins above the least, mean of {draws}", excess, "%", "<= 0.1", excess <= 0.1),
        BenchRow(f"{name}, bins above first-fit-decreasing", float(above_first), "bins", "<= 0", above_first <= 0),
    ]


def lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    drawn = np.exp(rng.normal(math.log(MEDIAN), SIGMA, count))
    return np.clip(drawn, 1, CAPACITY).astype(int)


def timed(work: Callable[[], list], repeats: int) -> tuple[float, list]:
    """Best CPU time in seconds (one thread, no waiting: what a quiet machine takes), and the result."""
    best = math.inf
    for _ in range(repeats):
        begun = time.process_time()
        result = work()
        best = min(best, time.process_time() - begun)
    return best, result


def streaming(batches: int, groups: int, executions: int, max_rows: int) -> list[BenchRow]:
    """Microbatches of the packing buffer fed group by group, against the same buffer given the whole batch first.

    With several rows an execution is packed as a whole or scored first, so scoring microbatches are counted beside the training ones.
    """
    counts = {"stream": 0, "whole": 0}
    claims, claim_s = 0, 0.0
    for seed in range(batches):
        batch = make_groups(np.random.default_rng(seed), groups, executions, max_rows)
        for way, lookahead in (("stream", PackingSettings(CAPACITY).lookahead), ("whole", 10**9)):
            buffer, left = PackingBuffer(PackingSettings(CAPACITY, lookahead=lookahead)), list(batch)
            buffer.open_batch(0, groups)
            while not buffer.finished:
                while left and buffer.want_group():
                    buffer.add_group(left.pop(0))
                begun = time.process_time()
                micro_step = buffer.claim(0, 0.0)
                claim_s += time.process_time() - begun
                claims += 1
                assert isinstance(micro_step, MicroStep)
                counts[way] += 1
                buffer.done(micro_step.micro_step_id, 0, 0.0, {"scores": scores(micro_step)} if micro_step.kind == "score" else {})
    excess = 100.0 * (counts["stream"] / counts["whole"] - 1.0)
    name = f"streaming {groups} groups of {executions}, up to {max_rows} rows each"
    return [
        BenchRow(f"{name}, microbatches above the whole batch", excess, "%", "<= 1.5", excess <= 1.5),
        BenchRow(f"{name}, CPU time of a claim", 1e3 * claim_s / claims, "ms"),
    ]


def make_groups(rng: np.random.Generator, groups: int, executions: int, max_rows: int) -> list[ReadyGroup]:
    made = []
    for group in range(groups):
        members = []
        for number in range(executions):
            name = f"g{group}-{number}"
            sizes = lengths(rng, int(rng.integers(1, max_rows + 1)))
            rows = [blank_row(name, f"g{group}", place, int(size)) for place, size in enumerate(sizes)]
            members.append(ReadyExecution(name, float(number % 2), rows))
        made.append(ReadyGroup(f"g{group}", 0, members))
    return made


def blank_row(execution_id: str, group_id: str, trajectory: int, tokens: int) -> TrajectoryRow:
    """A row of that length whose last token is its only target."""
    zeros = np.zeros(tokens, np.int32)
    targets = np.zeros(tokens, bool)
    targets[-1] = tokens > 1
    return TrajectoryRow(execution_id, group_id, trajectory, "main_task", zeros, targets, np.zeros(tokens, np.float32), zeros, 1.0)


def scores(micro_step: MicroStep) -> dict[str, tuple[float, int]]:
    counted: dict[str, tuple[float, int]] = {}
    for placed in (item for rows in micro_step.microbatches for item in rows):
        counted[placed.row.execution_id] = (0.0, counted.get(placed.row.execution_id, (0.0, 0))[1] + 1)
    return counted
