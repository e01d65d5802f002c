"""Search each policy's free choices for a workload at equal mean staleness: the honest comparison, and a plan for a cluster.

Async chooses its split, Colocate what it leaves in rollout, Elastic its cell size; all choose (phi, mu) on the line
phi + (mu - 1)/2 = E[d], and streaming or not. `elastic+` is the elastic policy with spread reroutes, headroom before joins, and joins on the
first ready group without a hold: a switch costs seconds and a late join minutes. Candidates are first compared over few short runs; the
best of each family then over full runs with all seeds. The last row says what the best elastic machine would take if training took no time:
no join policy can gain more than that on it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from statistics import fmean
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.simulation.experiments import finding
from gyre_lib.simulation.methods import Method, method
from gyre_lib.simulation.runs import Summary, estimate, ratio, run_methods
from gyre_lib.simulation.workload import Workload

ELASTIC_PLUS: dict[str, Any] = {"spread_reroutes": True, "supply_groups": 1, "supply_hold_s": 0.0}
FAMILIES = ("async", "colocate", "elastic", "elastic+")
HEADROOMS = (100, 110, 120, 135)
MOST_STEPS_PER_BURST = 4
SCREEN_SEEDS = 2
SCREEN_STEPS = 12
KEEP = 2


@dataclass(frozen=True, slots=True)
class TuneRow:
    """The best of a family at one mean staleness; `simulated` is hours, `over_elastic` its time over that of the paper's policy."""

    figure: str
    paper: float | None
    simulated: float
    stderr: float
    relative_error: float | None
    over_elastic: float
    over_elastic_stderr: float
    mean_staleness: float
    phi: float
    mu: int
    nodes: int
    streaming: bool
    headroom_percent: int
    tried: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def tune(workload: Workload, staleness: Iterable[str], seeds: Iterable[int], steps: int, jobs: int = 1) -> list[TuneRow]:
    """Rows for every target staleness and family, fastest first within a target."""
    rows: list[TuneRow] = []
    seeds = list(seeds)
    for target in staleness:
        best, tried = _best_of_each(workload, _fraction(target), seeds, steps, jobs, FAMILIES)
        reference = best["elastic"][1]
        found = [_row(target, family, chosen, runs, reference, tried[family]) for family, (chosen, runs) in best.items()]
        rows += sorted(found, key=lambda r: r.simulated)
        rows.append(_bound(workload, target, best["elastic"], seeds, steps, jobs))
    return rows


def plan(workload: Workload, staleness: str, seeds: Iterable[int], steps: int, jobs: int = 1) -> list[dict[str, Any]]:
    """What to write into a run's configuration for this cluster: a row per setting, the fastest elastic machine at this staleness."""
    best, tried = _best_of_each(workload, _fraction(staleness), list(seeds), steps, jobs, ("elastic", "elastic+"))
    family = min(best, key=lambda name: fmean(s.hours for s in best[name][1]))
    chosen, runs = best[family]
    settings = chosen.settings(workload, chosen.mu)
    hours, slack = estimate([s.hours for s in runs]), fmean(s.slack for s in runs)
    return [
        finding("cells.count", settings.cells),
        finding("cells.capacity", settings.cell_capacity),
        finding("nodes per cell", chosen.nodes),
        finding("scheduling.extra_dispatch", float(chosen.phi)),
        finding("scheduling.steps_per_burst", chosen.mu),
        finding("scheduling.join_headroom", settings.join_headroom_percent / 100),
        finding("scheduling.spread_reroutes", settings.spread_reroutes),
        finding("scheduling.supply_fraction", settings.supply_groups / settings.groups_per_batch),
        finding("scheduling.supply_hold_s", settings.supply_hold_s),
        finding(f"hours of {steps} steps", hours.mean, hours.stderr),
        finding("idle share of training time", slack),
        finding("candidates tried", sum(tried.values())),
    ]


def candidates(workload: Workload, family: str, staleness: Fraction) -> Iterator[Method]:
    """Every method of a family on the staleness line that fits the cluster."""
    cluster = workload.cluster
    sizes = range(cluster.nodes_per_rank, cluster.nodes + 1, cluster.nodes_per_rank)
    for phi, mu in depths(workload, staleness):
        if family == "async":
            for nodes in sizes[:-1]:
                for streaming in (False, True):
                    yield method("async", phi, mu, nodes, streaming=streaming)
        elif family == "colocate":
            for nodes in sizes[(len(sizes) - 1) // 2 :]:
                for streaming in (False, True):
                    yield method("colocate", phi, mu, nodes, streaming=streaming)
        else:
            for nodes in [size for size in sizes if cluster.nodes % size == 0 and cluster.nodes // size >= 2]:
                if family == "elastic":
                    yield method("elastic", phi, mu, nodes)
                else:
                    for headroom in HEADROOMS:
                        yield method("elastic", phi, mu, nodes, join_headroom_percent=headroom, **ELASTIC_PLUS)


def depths(workload: Workload, staleness: Fraction) -> list[tuple[Fraction, int]]:
    """(phi, mu) with phi + (mu - 1)/2 = E[d] and whole groups. Raises InputError where there is none."""
    batch = workload.batch.groups_per_batch
    line = [(staleness - Fraction(mu - 1, 2), mu) for mu in range(1, MOST_STEPS_PER_BURST + 1)]
    found = [(phi, mu) for phi, mu in line if phi >= 0 and (phi * batch).denominator == 1]
    if not found:
        raise InputError(f"staleness: no (phi, mu) with phi*B whole (B = {batch}) has mean staleness {staleness}")
    return found


def _best_of_each(
    workload: Workload, staleness: Fraction, seeds: list[int], steps: int, jobs: int, families: tuple[str, ...]
) -> tuple[dict[str, tuple[Method, list[Summary]]], dict[str, int]]:
    tried: dict[str, int] = {}
    finalists: dict[str, list[Method]] = {}
    for family in families:
        choices = [m for m in candidates(workload, family, staleness) if steps % m.mu == 0]
        if not choices:
            raise InputError(f"steps: {steps} steps are no whole number of bursts for any {family} method at this staleness")
        tried[family] = len(choices)
        keyed = {str(i): m for i, m in enumerate(choices)}
        short = SCREEN_STEPS if steps > SCREEN_STEPS and all(SCREEN_STEPS % m.mu == 0 for m in choices) else steps
        runs = run_methods(workload, keyed, short, seeds[:SCREEN_SEEDS], jobs)
        order = sorted(keyed, key=lambda key: fmean(s.hours for s in runs[key]))
        finalists[family] = [keyed[key] for key in order[:KEEP]]
    named = {f"{family} {i}": m for family, methods in finalists.items() for i, m in enumerate(methods)}
    runs = run_methods(workload, named, steps, seeds, jobs)
    best = {}
    for family in families:
        name = min((n for n in named if n.rsplit(" ", 1)[0] == family), key=lambda n: fmean(s.hours for s in runs[n]))
        best[family] = (named[name], runs[name])
    return best, tried


def _bound(workload: Workload, target: str, best: tuple[Method, list[Summary]], seeds: list[int], steps: int, jobs: int) -> TuneRow:
    """The best elastic machine with training that takes no time."""
    chosen, reference = best
    free = workload.training.model_copy(update={"node_seconds_per_step": 1.0, "update_s": 0.0, "drain_s": 0.0})
    runs = run_methods(workload.model_copy(update={"training": free}), {"bound": chosen}, steps, seeds, jobs)["bound"]
    return replace(_row(target, "elastic", chosen, runs, reference, 1), figure=f"E[d]={target} elastic if training took no time")


def _row(target: str, family: str, chosen: Method, runs: list[Summary], reference: list[Summary], tried: int) -> TuneRow:
    hours, over = estimate([s.hours for s in runs]), ratio(runs, reference)
    options = dict(chosen.options)
    return TuneRow(
        figure=f"E[d]={target} best {family}",
        paper=None,
        simulated=hours.mean,
        stderr=hours.stderr,
        relative_error=None,
        over_elastic=over.mean,
        over_elastic_stderr=over.stderr,
        mean_staleness=fmean(s.mean_staleness for s in runs),
        phi=float(chosen.phi),
        mu=chosen.mu,
        nodes=chosen.nodes,
        streaming=chosen.streaming,
        headroom_percent=options.get("join_headroom_percent", 100),
        tried=tried,
    )


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"staleness: a number, got {text}") from error
    if value < 0:
        raise InputError(f"staleness: zero or more, got {text}")
    return value
