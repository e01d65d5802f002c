"""Brute force for the theory: groups, a trainer and a dispatch rule, nothing else; it shares no code with the scheduler.

A group is admitted, takes a random time (from a server's pool where `servers` is given, else at once), is ready, and is consumed by a step
of B groups that lasts `training`. Everything the formulas speak of is measured directly.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from math import inf


@dataclass(frozen=True)
class QueueRun:
    """What to play."""

    phi: Fraction
    mu: int
    batch: int
    steps: int
    training: float = 0.35
    sigma: float = 1.0
    """Of the lognormal duration, whose median is 1."""
    order: str = "fifo"
    """Which ready groups a step takes: fifo (oldest version first), lifo, random."""
    continuous: bool = False
    servers: int = 0
    """Groups that run at once; 0: all."""
    stuck_first: bool = False
    """The first group never finishes."""
    seed: int = 0
    warm_up: int = 0
    """Steps left out of the means (not of the staleness sums)."""


@dataclass
class Measured:
    """Sums are over all steps, means over the steps after the warm-up."""

    staleness: list[int] = field(default_factory=list)
    staleness_by_step: list[Fraction] = field(default_factory=list)
    outstanding: int = 0
    """U at the end, before a dispatch."""
    step_time: float = 0.0
    latency: float = 0.0
    beta: float = 0.0
    mean_position: float = 0.0
    ready_after_update: float = 0.0
    unpublished_steps: float = 0.0
    mean_staleness: float = 0.0


def play(run: QueueRun) -> Measured:
    """Play the run. Raises RuntimeError where it cannot go on."""
    rng = random.Random(run.seed)
    depth = int((run.phi + run.mu) * run.batch)
    admitted: list[tuple[float, int, int]] = []
    waiting: deque[int] = deque()
    running: list[tuple[float, int]] = []
    ready: list[int] = []
    ready_at: dict[int, float] = {}
    unconsumed: set[int] = set()
    measured = Measured()
    starts: list[float] = []
    ends: list[float] = []
    consumed: list[tuple[int, int]] = []
    after_update: list[int] = []
    now, version, published, busy_until = 0.0, 0, 0, inf
    batch_size = run.batch

    def admit(count: int) -> None:
        for _ in range(count):
            number = len(admitted)
            admitted.append((now, published, version - published))
            unconsumed.add(number)
            waiting.append(number)
        serve()

    def serve() -> None:
        while waiting and (not run.servers or len(running) < run.servers):
            number = waiting.popleft()
            duration = inf if run.stuck_first and number == 0 else rng.lognormvariate(0.0, run.sigma)
            heappush(running, (now + duration, number))

    def choose() -> list[int]:
        if run.order == "fifo":
            ready.sort(key=lambda number: (admitted[number][1], number), reverse=True)
        elif run.order == "random":
            rng.shuffle(ready)
        return [ready.pop() for _ in range(batch_size)]

    admit(depth)
    while version < run.steps:
        if busy_until == inf and len(ready) >= batch_size:
            starts.append(now)
            for number in choose():
                consumed.append((number, version))
                unconsumed.discard(number)
                measured.staleness.append(version - admitted[number][1])
            busy_until = now + run.training
            continue
        finish = running[0][0] if running else inf
        if finish == inf and busy_until == inf:
            raise RuntimeError("the queue model cannot go on")
        if finish <= busy_until:
            now, number = heappop(running)
            ready.append(number)
            ready_at[number] = now
            if run.continuous:
                admit(1)
            serve()
            continue
        now, busy_until = busy_until, inf
        version += 1
        ends.append(now)
        after_update.append(len(ready))
        if version % run.mu == 0:
            measured.outstanding = sum(version - admitted[number][1] for number in unconsumed)
            published = version
            if not run.continuous:
                admit(run.mu * batch_size)
    _means(run, measured, admitted, consumed, ready_at, starts, ends, after_update)
    return measured


def _means(run, measured, admitted, consumed, ready_at, starts, ends, after_update) -> None:
    first, last = run.warm_up, run.steps - 1
    measured.staleness_by_step = [
        Fraction(sum(measured.staleness[i : i + run.batch]), run.batch) for i in range(0, len(consumed), run.batch)
    ]
    if last <= first + 1:
        return
    chosen = [(number, step) for number, step in consumed if first < step <= last]
    measured.mean_staleness = sum(step - admitted[number][1] for number, step in chosen) / len(chosen)
    measured.step_time = (starts[last] - starts[first]) / (last - first)
    measured.latency = sum(ready_at[number] - admitted[number][0] for number, _ in chosen) / len(chosen)
    offset = sum(ready_at[number] - starts[step - 1] for number, step in chosen) / len(chosen)
    measured.beta = offset / measured.step_time
    intervals = [(step % run.mu, ends[step] - ends[step - 1]) for step in range(first + 1, last + 1)]
    measured.mean_position = sum(i * t for i, t in intervals) / sum(t for _, t in intervals)
    measured.ready_after_update = sum(after_update[first:last]) / (last - first)
    measured.unpublished_steps = sum(admitted[number][2] for number, _ in chosen) / len(chosen)
