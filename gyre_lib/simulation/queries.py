"""The random part of a simulated run, drawn per query so that every method meets the same queries (common random numbers).

Queries are drawn in blocks, each from its own seed, so query q of seed s is the same whatever else is drawn.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from gyre_lib.simulation.workload import ExecutionPart, Workload

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Query:
    """One query's executions, each a plain number; times in seconds."""

    work_s: list[float]
    """Harness work at full load."""
    evaluation_s: list[float]
    """Evaluation time, with its retries."""
    stuck: list[bool]
    """The evaluation never answers."""
    failed: list[bool]
    """The infrastructure fails before the harness works."""
    training_work: float
    """Relative training work of the group, mean 1."""


class Queries:
    """`queries[q]` is the q-th query of this seed, with `size` executions."""

    def __init__(self, workload: Workload, seed: int, size: int) -> None:
        self._workload = workload
        self._seed = seed
        self._size = size
        self._drawn: list[Query] = []
        self._mean_work_s = _mean_work(workload) if workload.training.work_exponent else 1.0

    def __getitem__(self, number: int) -> Query:
        while number >= len(self._drawn):
            self._draw_block(len(self._drawn) // _BLOCK)
        return self._drawn[number]

    def _draw_block(self, block: int) -> None:
        execution, shape = self._workload.execution, (_BLOCK, self._size)
        rng = np.random.default_rng((self._seed, block))
        work, evaluation = _durations(rng, execution, shape)
        failures = rng.geometric(1 - execution.evaluation_failure_rate, shape)
        stuck_query = rng.random((_BLOCK, 1)) < execution.stuck_query_share
        stuck = stuck_query & (rng.random(shape) < execution.stuck_rate / execution.stuck_query_share)
        failed = rng.random(shape) < execution.infrastructure_failure_rate
        training = lognormal(rng, self._workload.training.group_cv, (_BLOCK,))
        training = training * (_limited(work, execution).mean(axis=1) / self._mean_work_s) ** self._workload.training.work_exponent
        columns = (work.tolist(), (evaluation * failures).tolist(), stuck.tolist(), failed.tolist(), training.tolist())
        self._drawn += [Query(*row) for row in zip(*columns, strict=True)]


def _durations(rng: np.random.Generator, execution: ExecutionPart, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Harness work and evaluation time in seconds, (queries, executions)."""
    queries, size = shape
    if not execution.recorded:
        log_work = execution.query_sigma * rng.standard_normal((queries, 1)) + execution.execution_sigma * rng.standard_normal(shape)
        return execution.median_s * np.exp(log_work), execution.evaluation_mean_s * lognormal(rng, execution.evaluation_cv, shape)
    drawn = np.empty((queries, size, 2))
    for row, index in enumerate(rng.integers(len(execution.recorded), size=queries)):
        query = np.asarray(execution.recorded[index])
        drawn[row] = query[rng.permutation(len(query))[:size] if len(query) >= size else rng.integers(len(query), size=size)]
    return drawn[..., 0], drawn[..., 1]


def _limited(work: np.ndarray, execution: ExecutionPart) -> np.ndarray:
    return np.minimum(work, execution.harness_limit_s)


def _mean_work(workload: Workload) -> float:
    """Mean harness work within the limit, from a fixed sample, so that training work has mean 1 whatever the seed."""
    execution = workload.execution
    work, _ = _durations(np.random.default_rng(0), execution, (2048, workload.batch.executions_per_group))
    return float(
        (_limited(work, execution).mean(axis=1) ** workload.training.work_exponent).mean() ** (1 / workload.training.work_exponent)
    )


def lognormal(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> np.ndarray:
    """Lognormal draws with mean 1 and this coefficient of variation."""
    sigma = sqrt(log(1 + cv * cv))
    return np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)
