"""What a burst and a run leave in the UI: markdown and table artifacts, and the report file."""

import json
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from gyre_lib.coordination.run_figures import RunFigures, proxy_stats_path, run_figures
from gyre_lib.coordination.run_report import held_out_change, staleness_line, write_report
from tasks.connection import coordinator_of, layout_of


@task(task_run_name="report of burst {burst}")
def report_burst(run: str, burst: int) -> dict[str, Any]:
    """Attach what the burst did to its page: roles, water level, scores, staleness, and how to look at its trajectories."""
    layout = layout_of(run)
    figures = run_figures(layout)
    score = next((row for row in figures.scores if row["burst"] == burst), {})
    transitions = [row for row in figures.transitions if row["burst"] == burst]
    create_markdown_artifact(
        _burst_text(figures, burst, score, transitions), key=f"{run}-burst-{burst}", description=f"Burst {burst} of {run}"
    )
    if transitions:
        create_table_artifact(
            _transition_rows(figures, transitions), key=f"{run}-burst-{burst}-roles", description="Role timeline: cell transitions"
        )
    steps = [row for row in figures.steps if row["burst"] == burst]
    seconds = max(row["updated_s"] for row in steps) - min(row["opened_s"] for row in steps) if steps else 0.0
    cells = max((row["cells"] for row in steps), default=0)
    return {"burst": burst, "score": score.get("score"), "transitions": len(transitions), "cells": cells, "seconds": seconds}


@task(task_run_name="report of run {run}")
def report_run(run: str) -> dict[str, Any]:
    """Keep the proxies' counters, write the report, and say in one table how the run went."""
    layout = layout_of(run)
    stats = coordinator_of(run).stats()
    proxy_stats_path(layout).write_text(json.dumps(stats))
    report = write_report(layout)
    figures = run_figures(layout)
    if not figures.scheduler["identity_ok"]:
        raise RuntimeError(f"run {run}: the staleness identity is broken: {figures.scheduler}")
    create_table_artifact(figures.scores, key=f"{run}-scores", description=f"Scores of {run}; {staleness_line(figures.scheduler)}")
    return {"report": str(report), "bursts": len(figures.scores), "staleness": figures.scheduler["mean_staleness_exact"], **stats}


def _burst_text(figures: RunFigures, burst: int, score: dict[str, Any], transitions: list[dict[str, Any]]) -> str:
    cells = max([row["cells"] for row in figures.steps if row["burst"] == burst], default=0)
    lines = [
        f"# Burst {burst} of {figures.run_id}",
        "",
        f"- training score **{score.get('score') or 0:.3f}** over {score.get('executions') or 0} executions, {score.get('steps') or 0} steps",
        f"- up to **{cells} cells** trained one batch together; {len(transitions)} changes of role",
        f"- {staleness_line(figures.scheduler)}",
        f"- water level now {figures.scheduler['water_level']}: executions that have not terminated",
        "",
        "Look at its trajectories:",
        "",
        f'    gyre sql {figures.run_id} "SELECT execution_id, task_id, score FROM executions WHERE train ORDER BY settled_s DESC LIMIT 20"',
        f"    gyre show {figures.run_id} EXECUTION_ID --html execution.html",
    ]
    change = held_out_change(figures)
    if change is not None:
        lines.insert(4, f"- held-out score {change['before']['mean_score']:.3f} → {change['after']['mean_score']:.3f}")
    return "\n".join(lines)


def _transition_rows(figures: RunFigures, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "at (s)": round(row["started_s"] - figures.started_s, 1),
            "cell": row["cell"],
            "direction": row["direction"].replace("_", " "),
            "outcome": row["outcome"],
            "seconds": round(row["duration_s"], 2),
            "executions rerouted": row["rerouted_executions"],
            "requests rerouted": row["rerouted_requests"],
            "phases": ", ".join(f"{name} {seconds:.2f}" for name, seconds in (row["phases"] or {}).items()),
        }
        for row in transitions
    ]
