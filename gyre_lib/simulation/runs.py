"""Many simulated runs: every method over the same seeds (common queries), summarised as means with standard errors."""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from gyre_lib.config.errors import InputError
from gyre_lib.simulation.methods import Method
from gyre_lib.simulation.queries import Queries
from gyre_lib.simulation.run_record import SimulatedRun
from gyre_lib.simulation.simulator import Simulation
from gyre_lib.simulation.workload import Workload

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What is kept of one run; durations in hours, the rest are shares."""

    hours: float
    mean_staleness: float
    slack: float
    mean_execution_h: float
    mean_query_h: float
    queries_of_4_h: float
    queries_timed_out: float
    """Of the queries of four hours and more: those whose longest execution ended at the overall limit."""
    harness_timeouts: float
    overall_timeouts: float
    mean_prefix: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds and its standard error."""

    mean: float
    stderr: float


def summarise(run: SimulatedRun) -> Summary:
    """The kept figures of a run."""
    durations, queries = run.durations, run.durations.queries_s
    executions = len(durations.executions_s)
    long = [query for query in queries if query >= 4 * HOUR_S]
    return Summary(
        hours=run.total_s / HOUR_S,
        mean_staleness=run.mean_staleness,
        slack=run.slack,
        mean_execution_h=fmean(durations.executions_s) / HOUR_S,
        mean_query_h=fmean(queries) / HOUR_S if queries else 0.0,
        queries_of_4_h=len(long) / len(queries) if queries else 0.0,
        queries_timed_out=durations.queries_of_4_h_timed_out / len(long) if long else 0.0,
        harness_timeouts=durations.harness_timeouts / executions,
        overall_timeouts=durations.overall_timeouts / executions,
        mean_prefix=run.mean_prefix,
    )


def simulate(
    workload: Workload, method: Method, steps: int, seed: int, record: bool = False, queries: Queries | None = None
) -> SimulatedRun:
    """One run of a method; `queries`, if given, are those of this seed and spare drawing them again."""
    settings = method.settings(workload, steps)
    return Simulation(workload, settings, nodes_per_cell=method.nodes, seed=seed, queries=queries, record=record).run()


def run_methods(
    workload: Workload, methods: dict[str, Method], steps: int, seeds: Iterable[int], jobs: int = 1
) -> dict[str, list[Summary]]:
    """All methods over all seeds, in order of the seeds. Raises InputError before anything runs where a method does not fit."""
    seeds = list(seeds)
    if len(seeds) < 2:
        raise InputError(f"seeds: at least 2 for a standard error, got {len(seeds)}")
    for method in methods.values():
        method.settings(workload, steps)
    if jobs <= 1:
        by_seed = [_one_seed((workload, methods, steps, seed)) for seed in seeds]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            by_seed = list(pool.map(_one_seed, [(workload, methods, steps, seed) for seed in seeds]))
    return {name: [row[name] for row in by_seed] for name in methods}


def estimate(values: list[float]) -> Estimate:
    """Mean and standard error."""
    return Estimate(fmean(values), stdev(values) / sqrt(len(values)))


def ratio(over: list[Summary], under: list[Summary]) -> Estimate:
    """Ratio of the mean times; its standard error from the ratios seed by seed (same queries)."""
    by_seed = [a.hours / b.hours for a, b in zip(over, under, strict=True)]
    return Estimate(fmean(s.hours for s in over) / fmean(s.hours for s in under), stdev(by_seed) / sqrt(len(by_seed)))


def _one_seed(job: tuple[Workload, dict[str, Method], int, int]) -> dict[str, Summary]:
    workload, methods, steps, seed = job
    drawn: dict[int, Queries] = {}
    summaries = {}
    for name, method in methods.items():
        size = method.settings(workload, steps).executions_dispatched_per_group
        queries = drawn.setdefault(size, Queries(workload, seed, size))
        summaries[name] = summarise(simulate(workload, method, steps, seed, queries=queries))
    return summaries
