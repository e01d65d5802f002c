"""The one-page report of a run: a self-contained HTML file with its figures, role timeline, score curve and water level."""

import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig, load_config
from gyre_lib.coordination.run_figures import RunFigures, run_figures

ROLE_COLOURS = {"rollout": "#8fb8de", "to_training": "#f2c14e", "training": "#d1603d", "to_rollout": "#f2c14e"}
ROLE_NAMES = {"rollout": "rollout", "to_training": "switching", "training": "training"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; } p.note { color: #5a6b7b; margin-top: .2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: .2rem .8rem .2rem 0; text-align: left; }
th { border-bottom: 1px solid #b8c4cf; font-weight: 600; } td.number, th.number { text-align: right; } svg { max-width: 100%; height: auto; }
code { background: #f0f3f6; padding: 0 .2rem; }
"""


def write_report(layout: RunLayout) -> Path:
    """Write the report of a run, live or finished; returns its path. Raises InputError when there is no run."""
    figures, config = run_figures(layout), load_config(layout.config)
    partial = layout.report.with_suffix(".partial")
    partial.write_text(_page(figures, config))
    partial.rename(layout.report)
    return layout.report


def held_out_change(figures: RunFigures) -> dict[str, Any] | None:
    """First against last held-out evaluation: scores, standard errors, and the gain in standard errors of the difference."""
    if len(figures.held_out) < 2:
        return None
    before, after = figures.held_out[0], figures.held_out[-1]
    gain = after["mean_score"] - before["mean_score"]
    error = ((before["standard_error"] or 0.0) ** 2 + (after["standard_error"] or 0.0) ** 2) ** 0.5
    return {"before": before, "after": after, "gain": gain, "standard_errors": gain / error if error else float("inf")}


def _page(figures: RunFigures, config: RunConfig) -> str:
    scheduler = figures.scheduler
    sections = [
        _held_out(figures),
        _section(
            "Score per burst",
            "Mean reward of the groups that each burst's steps trained on.",
            _plot_scores(figures) + _table(figures.scores),
        ),
        _section(
            "Role timeline",
            "What each cell did: cell 0 is the core, the others are satellites that join and leave.",
            _plot_roles(figures, config.cells.count),
        ),
        _section(
            "Water level",
            "Executions dispatched and not yet terminated. A cell may join training only while the other cells can hold all of them.",
            _plot_water_level(figures, config),
        ),
        _section("Transitions", "Every change of role, with the seconds of its phases.", _table(_transition_rows(figures))),
        _section("Training steps", "", _table(_step_rows(figures))),
        _section("Wall time by phase", "", _table(figures.wall_by_phase)),
        _section("Staleness", "", f"<p>{html.escape(staleness_line(scheduler))}</p>"),
        _section(
            "Ask for more",
            "",
            f"<p><code>gyre sql {figures.run_id} --list</code> names the views; <code>gyre show {figures.run_id} EXECUTION</code> shows a trajectory tree.</p>",
        ),
    ]
    title = f"Run {html.escape(figures.run_id)}"
    policy = f"policy {config.scheduling.policy}, {config.cells.count} cells, {scheduler['version']} training steps in {scheduler['burst']} bursts"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><p class='note'>{policy}; {figures.ended_s - figures.started_s:.0f} s</p>{''.join(sections)}</html>"
    )


def staleness_line(scheduler: dict[str, Any]) -> str:
    """The measured mean staleness and whether the exact identity holds, in one line."""
    holds = "holds exactly" if scheduler["identity_ok"] else "IS BROKEN"
    return (
        f"mean staleness {scheduler['mean_staleness_exact']} versions over {scheduler['consumed_groups']} consumed groups"
        f" (steady state: {scheduler['target_staleness']:g}); the staleness identity {holds} at {scheduler['identity_checks']} publications"
    )


def _held_out(figures: RunFigures) -> str:
    change = held_out_change(figures)
    if change is None:
        return ""
    text = (
        f"<p><b>{change['before']['mean_score']:.3f} ± {change['before']['standard_error']:.3f}</b> (version {change['before']['version']})"
        f" → <b>{change['after']['mean_score']:.3f} ± {change['after']['standard_error']:.3f}</b> (version {change['after']['version']}):"
        f" a gain of {change['gain']:+.3f}, {change['standard_errors']:.1f} standard errors.</p>"
    )
    return _section("Held-out score", "Mean score on tasks that are never trained on, ± standard error.", text)


def _transition_rows(figures: RunFigures) -> list[dict[str, Any]]:
    return [
        {
            "at_s": row["started_s"] - figures.started_s,
            "cell": row["cell"],
            "direction": row["direction"].replace("_", " "),
            "outcome": row["outcome"],
            "seconds": row["duration_s"],
            "executions rerouted": row["rerouted_executions"],
            "requests rerouted": row["rerouted_requests"],
            "phases": ", ".join(f"{name} {seconds:.2f}" for name, seconds in (row["phases"] or {}).items()),
        }
        for row in figures.transitions
    ]


def _step_rows(figures: RunFigures) -> list[dict[str, Any]]:
    return [
        {
            "step": row["step"],
            "cells": row["cells"],
            "score": row["mean_reward"],
            "loss": row["loss"],
            "gradient norm": row["grad_norm"],
            "staleness": row["staleness_mean"],
            "seconds": row["duration_s"],
            "phases": ", ".join(f"{name} {seconds:.2f}" for name, seconds in (row["seconds"] or {}).items()),
        }
        for row in figures.steps
    ]


def _section(title: str, note: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>" + (f"<p class='note'>{html.escape(note)}</p>" if note else "") + body


def _table(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th{_number_class(rows[0][name])}>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td{_number_class(value)}>{html.escape(_text(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _number_class(value: Any) -> str:
    return " class='number'" if isinstance(value, int | float) else ""


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.6, height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot.close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


def _plot_scores(figures: RunFigures) -> str:
    figure, axes = _figure(2.6)
    steps = [row["step"] for row in figures.steps]
    axes.plot(steps, [row["mean_reward"] for row in figures.steps], marker="o", color="#2b6a99", label="training batch")
    if figures.held_out:
        versions = [row["version"] - 0.5 for row in figures.held_out]
        scores, errors = ([row[name] for row in figures.held_out] for name in ("mean_score", "standard_error"))
        axes.errorbar(versions, scores, yerr=errors, fmt="s", capsize=4, color="#d1603d", label="held-out tasks (± s.e.)")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean score")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    return _svg(figure)


def _plot_roles(figures: RunFigures, cells: int) -> str:
    from matplotlib.patches import Patch

    figure, axes = _figure(0.5 * cells + 1.0)
    for cell, role, start, end in figures.role_spans(cells):
        axes.barh(cell, end - start, left=start - figures.started_s, height=0.7, color=ROLE_COLOURS[role])
    axes.set_yticks(range(cells), ["core" if cell == 0 else f"satellite {cell}" for cell in range(cells)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start")
    patches = [Patch(color=ROLE_COLOURS[role], label=name) for role, name in ROLE_NAMES.items()]
    axes.legend(handles=patches, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def _plot_water_level(figures: RunFigures, config: RunConfig) -> str:
    figure, axes = _figure(2.4)
    times = [time_s - figures.started_s for time_s, _ in figures.water_level]
    axes.step(times, [level for _, level in figures.water_level], where="post", color="#2b6a99")
    for joined in range(config.cells.count):
        capacity = config.cells.standalone_capacity + (config.cells.count - 1 - joined) * config.cells.capacity
        axes.axhline(capacity, color="#b8c4cf", linewidth=0.8, linestyle="--")
        axes.text(times[-1], capacity, f" cell {joined} may join below", va="center", fontsize=8, color="#5a6b7b")
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("executions")
    return _svg(figure)
