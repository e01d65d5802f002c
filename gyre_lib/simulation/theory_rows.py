"""Every formula of `scheduling/theory.py` against brute force: rows (name, expected, measured, tolerance, ok)."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from gyre_lib.scheduling import theory
from gyre_lib.simulation.adversary import AdversarialWorld, random_settings
from gyre_lib.simulation.queue_model import Measured, QueueRun, play

HALF = Fraction(1, 2)
COLD_STARTS = ((3 * HALF, 1), (HALF, 3), (Fraction(0), 4), (Fraction(1), 1), (HALF, 2), (Fraction(0), 3))


@dataclass(frozen=True)
class TheoryRow:
    """`tolerance` 0 means exact (integers and fractions); otherwise it is relative."""

    name: str
    expected: float | str
    measured: float | str
    tolerance: float
    ok: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def theory_rows(quick: bool = False) -> list[TheoryRow]:
    """All rows; `quick` plays a quarter of the steps with twice the tolerance."""
    steps, tolerance = (5_000, 0.02) if quick else (20_000, 0.01)
    return [*_staleness_rows(), *_capacity_rows(), *_continuous_rows(steps, tolerance), *_boundary_rows(steps, tolerance)]


def exact(name: str, expected: Fraction | int | str, measured: Fraction | int | str) -> TheoryRow:
    """A row that must agree exactly."""
    return TheoryRow(name, str(expected), str(measured), 0.0, expected == measured)


def close(name: str, expected: float, measured: float, tolerance: float) -> TheoryRow:
    """A row that must agree to a relative tolerance."""
    return TheoryRow(name, expected, measured, tolerance, abs(measured - expected) <= tolerance * abs(expected))


@cache
def _play(run: QueueRun) -> Measured:
    return play(run)


def _staleness_rows() -> Iterator[TheoryRow]:
    batch = 4
    for phi, mu in ((Fraction(3, 2), 1), (HALF, 3), (Fraction(0), 4), (Fraction(1), 1), (HALF, 2), (Fraction(7, 4), 3)):
        for order in ("fifo", "lifo", "random"):
            steps = 120
            run = _play(QueueRun(phi, mu, batch, steps, sigma=1.5, order=order, seed=3))
            expected = batch * steps * theory.mean_staleness(phi, mu) - run.outstanding
            yield exact(f"finite-window identity, phi={phi} mu={mu} {order}: sum of d", expected, Fraction(sum(run.staleness)))
    for phi, mu in COLD_STARTS:
        run = _play(QueueRun(phi, mu, batch, 12, order="fifo", sigma=0.2))
        measured = Fraction(sum(run.staleness), len(run.staleness))
        expected = theory.cold_start_staleness(phi, mu, 12)
        yield exact(f"cold start, 12 steps at E[d]={float(theory.mean_staleness(phi, mu)):g}, phi={phi} mu={mu}", expected, measured)
    yield exact(
        "live scheduler, adversarial orders of 40 random machines: publications where an identity fails", 0, _broken_publications(40)
    )
    profile = _play(QueueRun(HALF, 3, batch, 9, order="fifo", sigma=0.2)).staleness_by_step
    yield exact("oldest-first profile by step, phi=1/2 mu=3", "0 1 2 3/2 1 2 3/2 1 2", " ".join(map(str, profile)))
    profile = _play(QueueRun(Fraction(0), 4, batch, 8, order="fifo", sigma=0.2)).staleness_by_step
    yield exact("oldest-first profile by step, phi=0 mu=4", "0 1 2 3 0 1 2 3", " ".join(map(str, profile)))
    stuck = _play(QueueRun(Fraction(1), 1, 8, 4_000, stuck_first=True))
    mean = sum(stuck.staleness) / len(stuck.staleness)
    yield close(
        "one group never finishes: limit of the mean, phi=1 mu=1 B=8", float(theory.stuck_group_staleness(Fraction(1), 1, 8)), mean, 0.002
    )
    long = _play(QueueRun(HALF, 3, batch, 12_000, order="random", sigma=1.0))
    mean = sum(long.staleness) / len(long.staleness)
    yield close("steady-state mean staleness, phi=1/2 mu=3", float(theory.mean_staleness(HALF, 3)), mean, 0.005)


def _broken_publications(machines: int) -> int:
    """The scheduler asserts both identities at every publication; a failure is counted here rather than raised."""
    broken = 0
    for seed in range(machines):
        rng = random.Random(seed)
        try:
            AdversarialWorld(random_settings(rng), rng).finish()
        except AssertionError:
            broken += 1
    return broken


def _capacity_rows() -> Iterator[TheoryRow]:
    wrong = tested = 0
    for cells, cell_capacity, standalone in ((8, 144, 0), (4, 288, 0), (1, 1008, 144), (3, 7, 5), (6, 192, 0)):
        for level in range(theory.capacity(0, cells, cell_capacity, standalone) + 2):
            joined = 0
            while joined < cells and theory.capacity(joined + 1, cells, cell_capacity, standalone) >= level:
                joined += 1
            wrong += joined != theory.largest_prefix(level, cells, cell_capacity, standalone)
            tested += 1
    yield exact(f"largest admissible prefix, {tested} water levels: disagreements with Equation 5", 0, wrong)
    wrong = 0
    for dispatched in range(8):
        for launched in range(dispatched + 1):
            for terminated in range(launched + 1):
                for room in range(8):
                    count, started = 0, launched
                    while started < dispatched and started - terminated < room:
                        count, started = count + 1, started + 1
                    wrong += count != theory.launches(dispatched, launched, terminated, room)
    yield exact("launches, Equation 4 against one by one: disagreements", 0, wrong)
    yield exact("core stays (Equation 6), 122B on 32 nodes, mu=1: largest w", 496, theory.largest_level_core_stays(1, 32, 16, 8, 144, 0))
    yield exact("core stays, 122B on 24 nodes, mu=1: largest w", 192, theory.largest_level_core_stays(1, 48, 16, 6, 192, 0))
    never = [mu for mu in range(1, 9) if theory.largest_level_core_stays(mu, 32, 16, 8, 144, 0) < 0]
    yield exact("core stays, 122B on 32 nodes: mu for which it never can", "2 3 4 5 6 7 8", " ".join(map(str, never)))


def _continuous(phi: Fraction, mu: int, steps: int, training: float = 0.35) -> Measured:
    return _play(QueueRun(phi, mu, 8, steps, training=training, continuous=True, warm_up=steps // 10, seed=5))


def _boundary(phi: Fraction, mu: int, steps: int, training: float = 0.35, servers: int = 0) -> Measured:
    return _play(QueueRun(phi, mu, 8, steps, training=training, servers=servers, warm_up=steps // 10, seed=5))


def _continuous_rows(steps: int, tolerance: float) -> Iterator[TheoryRow]:
    for depth_batches, mu in ((3, 1), (4, 3)):
        phi = Fraction(depth_batches - mu)
        run = _continuous(phi, mu, steps)
        name = f"continuous dispatch, Q={8 * depth_batches} B=8 mu={mu}"
        yield close(f"{name}: step time B L/Q", theory.continuous_step_time(run.latency, 8 * depth_batches, 8), run.step_time, tolerance)
        counted = theory.continuous_staleness(8 * depth_batches, 8, run.ready_after_update, run.unpublished_steps)
        yield close(f"{name}: mean staleness by counting", counted, run.mean_staleness, tolerance)
        if mu > 1:
            yield close(f"{name}: mean unpublished steps (mu-1)/2", (mu - 1) / 2, run.unpublished_steps, 4 * tolerance)
        cost = theory.equal_depth_cost(mu, 8, run.ready_after_update)
        boundary = float(theory.mean_staleness(phi, mu))
        yield close(f"equal-depth staleness cost, depth {depth_batches} B, mu={mu}", cost, run.mean_staleness - boundary, 2 * tolerance)
    run = _continuous(Fraction(2), 1, steps)
    expected = theory.continuous_staleness_rollout_bound(run.latency, 0.35, run.step_time)
    yield close("continuous dispatch, rollout-bound mu=1: mean staleness (L + tau)/T", expected, run.mean_staleness, 2 * tolerance)


def _boundary_rows(steps: int, tolerance: float) -> Iterator[TheoryRow]:
    cases = (
        ("mu=1 phi=3/2", 3 * HALF, 1, 0), ("mu=1 phi=1/2", HALF, 1, 0), ("mu=3 phi=1/2", HALF, 3, 0), ("mu=4 phi=0", Fraction(0), 4, 0),
        ("mu=1 phi=3/2, 12 servers", 3 * HALF, 1, 12),
    )  # fmt: skip
    for name, phi, mu, servers in cases:
        run = _boundary(phi, mu, steps, servers=servers)
        expected = theory.boundary_step_time(run.latency, 0.35, float(phi), mu, run.mean_position, run.beta)
        yield close(
            f"boundary step time, {name}, measured beta={run.beta:.3f} ibar={run.mean_position:.3f}", expected, run.step_time, tolerance
        )
    for phi, mu in ((Fraction(2), 1), (Fraction(1), 3)):
        boundary, continuous = _boundary(phi, mu, steps), _continuous(phi, mu, steps)
        expected = theory.equal_depth_time_ratio(boundary.latency, 0.35, float(phi), mu, boundary.mean_position, boundary.beta)
        measured = boundary.step_time / continuous.step_time
        yield close(f"equal depth {float(phi) + mu:g} B, mu={mu}: T_boundary/T_continuous", expected, measured, 3 * tolerance)
    continuous = _continuous(Fraction(1), 1, steps)
    boundary = _boundary(Fraction(round(continuous.mean_staleness * 8), 8), 1, steps)
    expected = theory.equal_staleness_time_ratio(continuous.mean_staleness, boundary.beta)
    yield close(
        f"equal staleness {continuous.mean_staleness:.2f}, mu=1: T_boundary/T_continuous = D/(D + beta)",
        expected, boundary.step_time / continuous.step_time, 4 * tolerance,
    )  # fmt: skip
