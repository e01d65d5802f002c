"""The paper's experiments, simulated: rows (figure, paper, simulated, stderr, relative_error)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.simulation import published
from gyre_lib.simulation.methods import METHODS_24T, METHODS_122B, method
from gyre_lib.simulation.runs import Estimate, Summary, estimate, ratio, run_methods
from gyre_lib.simulation.workload import Workload

STEPS_ABLATION = 12
STEPS_MAIN = 48

METHODS_48 = {
    "E[d]=1": {
        "QwenGyre": method("elastic", 0.5, 2, 4),
        "Async": method("async", 1, 1, 16, streaming=False),
        "Colocate": method("colocate", 0, 3, 32, streaming=False),
    },
    "E[d]=1.5": {
        "QwenGyre": method("elastic", 0.5, 3, 4),
        "Async": method("async", 1.5, 1, 16, streaming=False),
        "Colocate": method("colocate", 0, 4, 32, streaming=False),
    },
}
"""The 48-step comparison. The text gives the ranges of its speedups, not (phi, mu) at E[d] = 1."""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure of the paper beside its simulation."""

    figure: str
    paper: float | None
    simulated: float
    stderr: float
    relative_error: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def row(figure: str, paper: float | None, simulated: Estimate) -> FigureRow:
    """A row; the error is relative to the paper's figure."""
    return FigureRow(figure, paper, simulated.mean, simulated.stderr, None if paper is None else simulated.mean / paper - 1)


def finding(figure: str, value: Any, stderr: float = 0.0) -> dict[str, Any]:
    """The same columns for what the paper has no figure for."""
    return {"figure": figure, "paper": None, "simulated": value, "stderr": stderr, "relative_error": None}


def paper_122b(workload: Workload, seeds: Iterable[int], figures: list[str], jobs: int = 1) -> list[FigureRow]:
    """The ablation (12 steps) and the 48-step speedups of the 122B workload; `figures` names those wanted, empty for all."""
    seeds = list(seeds)
    ablation = [*published.RATIOS_122B, *ORDERINGS, "E0 (h)", "E2 (h)", *STATISTICS_OF_E0]
    main = [f"48 steps, {target}, speedup over {baseline}" for target in METHODS_48 for baseline in published.SPEEDUPS_48]
    wanted = _wanted(figures, [*ablation, *main])
    rows: list[FigureRow] = []
    if names := [name for name in wanted if name in ablation]:
        needed = {method for name in names for method in _methods_of(name)}
        runs = run_methods(workload, {name: m for name, m in METHODS_122B.items() if name in needed}, STEPS_ABLATION, seeds, jobs)
        rows += [_ablation_row(name, runs) for name in names]
    for target, methods in METHODS_48.items():
        baselines = [b for b in published.SPEEDUPS_48 if f"48 steps, {target}, speedup over {b}" in wanted]
        if not baselines:
            continue
        runs = run_methods(workload, {name: m for name, m in methods.items() if name in (*baselines, "QwenGyre")}, STEPS_MAIN, seeds, jobs)
        for baseline in baselines:
            low, high = published.SPEEDUPS_48[baseline]
            name = f"48 steps, {target}, speedup over {baseline}"
            rows.append(row(name, (low + high) / 2, ratio(runs[baseline], runs["QwenGyre"])))
    return rows


STATISTICS_OF_E0 = {
    "mean execution (h)": "mean_execution_h",
    "mean query (h)": "mean_query_h",
    "queries >= 4 h": "queries_of_4_h",
    "harness timeout": "harness_timeouts",
    "overall timeout": "overall_timeouts",
    "slack in E0": "slack",
}


ORDERINGS = {" < ".join(order): order for order in published.ORDERINGS_122B}
"""Rows whose value is 1 where the mean times follow the paper's order, else 0."""


def _methods_of(figure: str) -> tuple[str, ...]:
    """The methods that a figure of the ablation compares."""
    if figure in published.RATIOS_122B:
        return tuple(figure.split("/"))
    return ORDERINGS.get(figure, ("E2",) if figure.startswith("E2") else ("E0",))


def _ablation_row(name: str, runs: dict[str, list[Summary]]) -> FigureRow:
    if name in ORDERINGS:
        hours = [fmean(s.hours for s in runs[m]) for m in ORDERINGS[name]]
        return row(name, 1.0, Estimate(float(all(a < b for a, b in pairwise(hours))), 0.0))
    if name in published.RATIOS_122B:
        over, under = name.split("/")
        return row(name, published.RATIOS_122B[name], ratio(runs[over], runs[under]))
    if name in STATISTICS_OF_E0:
        values = [getattr(s, STATISTICS_OF_E0[name]) for s in runs["E0"]]
        return row(name, published.STATISTICS_122B[name], estimate(values))
    key = name.removesuffix(" (h)")
    return row(name, published.HOURS_122B[key], estimate([s.hours for s in runs[key]]))


def paper_24t(workload: Workload, seeds: Iterable[int], figures: list[str], jobs: int = 1) -> list[FigureRow]:
    """The 48-step comparison of the 2.4T workload, in the reading that its data file states."""
    names = [*published.HOURS_24T, *published.RATIOS_24T, *published.STATISTICS_24T]
    wanted = _wanted(figures, names)
    runs = run_methods(workload, METHODS_24T, STEPS_MAIN, seeds, jobs)
    rows = []
    for name in wanted:
        if name in published.HOURS_24T:
            rows.append(row(name, published.HOURS_24T[name], estimate([s.hours for s in runs[name.removesuffix(" (h)")]])))
        elif name in published.RATIOS_24T:
            over, under = name.split("/")
            rows.append(row(name, published.RATIOS_24T[name], ratio(runs[over], runs[under])))
        else:
            field = {"queries >= 4 h": "queries_of_4_h", "of these, overall timeout": "queries_timed_out"}[name]
            rows.append(row(name, published.STATISTICS_24T[name], estimate([getattr(s, field) for s in runs["elastic"]])))
    return rows


def _wanted(figures: list[str], known: list[str]) -> list[str]:
    for figure in figures:
        if figure not in known:
            raise InputError(f"figure: no figure {figure} in this experiment; it has {', '.join(known)}")
    return [name for name in known if not figures or name in figures]
