"""The random part of a simulated run, drawn per query so that every method meets the same queries (common random numbers).

Queries are drawn in blocks, each from its own seed, so query q of seed s is the same whatever else is drawn.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from gyre_lib.simulation.workload import Workload

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

    def __getitem__(self, number: int) -> Query:
        while number >= len(self._drawn):
            self._draw_block(len(self._drawn) // _BLOCK)
        return self._drawn[number]

    def _draw_block(self, block: int) -> None:
        execution, shape = self._workload.execution, (_BLOCK, self._size)
        rng = np.random.default_rng((self._seed, block))
        if execution.recorded:
            work, evaluation = self._recorded(rng)
        else:
            log_work = execution.query_sigma * rng.standard_normal((_BLOCK, 1)) + execution.execution_sigma * rng.standard_normal(shape)
            work = execution.median_s * np.exp(log_work)
            evaluation = execution.evaluation_mean_s * lognormal(rng, execution.evaluation_cv, shape)
        failures = rng.geometric(1 - execution.evaluation_failure_rate, shape)
        stuck_query = rng.random((_BLOCK, 1)) < execution.stuck_query_share
        stuck = stuck_query & (rng.random(shape) < execution.stuck_rate / execution.stuck_query_share)
        failed = rng.random(shape) < execution.infrastructure_failure_rate
        training = lognormal(rng, self._workload.training.group_cv, (_BLOCK,))
        columns = (work.tolist(), (evaluation * failures).tolist(), stuck.tolist(), failed.tolist(), training.tolist())
        self._drawn += [Query(*row) for row in zip(*columns, strict=True)]

    def _recorded(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        recorded = self._workload.execution.recorded
        work, evaluation = np.empty((_BLOCK, self._size)), np.empty((_BLOCK, self._size))
        for row, index in enumerate(rng.integers(len(recorded), size=_BLOCK)):
            query = np.asarray(recorded[index])
            chosen = query[rng.permutation(len(query))[: self._size] if len(query) >= self._size else rng.integers(len(query), size=self._size)]
            work[row], evaluation[row] = chosen[:, 0], chosen[:, 1]
        return work, evaluation


def lognormal(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> np.ndarray:
    """Lognormal draws with mean 1 and this coefficient of variation."""
    sigma = sqrt(log(1 + cv * cv))
    return np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)
