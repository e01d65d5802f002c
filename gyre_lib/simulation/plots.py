"""Plots of one recorded simulated run, and a page that shows them beside an experiment's rows."""

from base64 import b64encode
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from gyre_lib.simulation.methods import Method
from gyre_lib.simulation.run_record import SimulatedRun
from gyre_lib.simulation.runs import HOUR_S, simulate
from gyre_lib.simulation.workload import Workload

COLOURS = {"rollout": "#8fb8de", "to_training": "#f2c14e", "training": "#d1495b", "to_rollout": "#edae49"}


def write_report(folder: Path, title: str, workload: Workload, method: Method, steps: int, rows: list[dict[str, Any]]) -> list[Path]:
    """Simulate one run of the method with recording, and write its PNG plots and `report.html`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    run = simulate(workload, method, steps, seed=0, record=True)
    cells = method.settings(workload, steps).cells
    plots = {
        "role-timeline": lambda axes: role_timeline(axes, run, cells),
        "water-level": lambda axes: water_level(axes, run),
        "utilisation": lambda axes: utilisation(axes, run, cells),
        "durations": lambda axes: durations(axes, run, workload),
    }
    files = []
    for name, draw in plots.items():
        figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
        draw(axes)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=110)
        plt.close(figure)
    page = folder / "report.html"
    page.write_text(_page(f"{title}: {method.label}, {steps} steps", files, rows))
    return [*files, page]


def role_timeline(axes: Axes, run: SimulatedRun, cells: int) -> None:
    """One bar per cell, coloured by role; publications as lines."""
    end = run.total_s
    for cell in range(cells):
        changes = [(0.0, "rollout"), *((at, role) for at, c, role in run.roles if c == cell), (end, "")]
        for (since, role), (until, _) in pairwise(changes):
            axes.barh(cell, (until - since) / HOUR_S, left=since / HOUR_S, color=COLOURS[role], height=0.9)
    for at in run.publications_s:
        axes.axvline(at / HOUR_S, color="black", linewidth=0.6)
    axes.set(xlabel="hours (lines: publications)", ylabel="cell", title="Roles", yticks=range(cells), xlim=(0, end / HOUR_S))
    axes.invert_yaxis()
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()], COLOURS, ncols=4, loc="upper right", fontsize=7)


def water_level(axes: Axes, run: SimulatedRun) -> None:
    """w, running executions and capacity over time."""
    at = np.array([level[0] for level in run.levels]) / HOUR_S
    for column, label in ((1, "water level w"), (2, "running"), (3, "capacity C(k)")):
        axes.step(at, [level[column] for level in run.levels], where="post", label=label, linewidth=1)
    axes.set(xlabel="hours", ylabel="executions", title="Water level", xlim=(0, run.total_s / HOUR_S))
    axes.legend(fontsize=7)


def utilisation(axes: Axes, run: SimulatedRun, cells: int) -> None:
    """Share of cells in training, and of rollout capacity in use."""
    edges = np.linspace(0, run.total_s, 200)
    training = np.zeros(len(edges))
    for cell in range(cells):
        changes = [(0.0, "rollout"), *((at, role) for at, c, role in run.roles if c == cell)]
        index = np.searchsorted([at for at, _ in changes], edges, side="right") - 1
        training += np.array([changes[i][1] == "training" for i in index])
    at = np.array([level[0] for level in run.levels])
    index = np.maximum(0, np.searchsorted(at, edges, side="right") - 1)
    used = [run.levels[i][2] / run.levels[i][3] if run.levels[i][3] else 0.0 for i in index]
    axes.plot(edges / HOUR_S, training / cells, label="cells in training", color=COLOURS["training"])
    axes.plot(edges / HOUR_S, used, label="rollout capacity in use", color=COLOURS["rollout"])
    axes.set(
        xlabel="hours", ylabel="share", ylim=(0, 1.05), xlim=(0, run.total_s / HOUR_S), title=f"Utilisation (training idle {run.slack:.0%})"
    )
    axes.legend(fontsize=7)


def durations(axes: Axes, run: SimulatedRun, workload: Workload) -> None:
    """Durations of executions and queries, with the two limits."""
    for values, label in ((run.durations.executions_s, "executions"), (run.durations.queries_s, "queries")):
        axes.hist(np.array(values) / HOUR_S, bins=60, density=True, histtype="step", label=label)
    for limit in (workload.execution.harness_limit_s, workload.execution.overall_limit_s):
        axes.axvline(limit / HOUR_S, color="grey", linestyle="--", linewidth=0.8)
    axes.set(xlabel="hours (dashed: harness and overall limit)", ylabel="density", title="Durations")
    axes.legend(fontsize=7)


def _page(title: str, plots: list[Path], rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(row.get(name)))}</td>" for name in names) + "</tr>" for row in rows)
    images = "".join(f'<img alt="{plot.stem}" src="data:image/png;base64,{b64encode(plot.read_bytes()).decode()}">' for plot in plots)
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}img{display:block;max-width:100%}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style><h1>{escape(title)}</h1>'
        f"<table><tr>{head}</tr>{body}</table>{images}\n"
    )


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
