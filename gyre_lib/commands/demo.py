"""`gyre demo`: everything on this machine, a few bursts, and what came of them."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_lib.commands.output import print_rows

CONFIG = Path(__file__).parents[2] / "data/configs/demo.yaml"
QUESTIONS = (
    (
        "How did the score move with the policy version that sampled the execution?",
        "SELECT r.version_first AS version, count(DISTINCT e.execution_id) AS executions, round(avg(e.score), 3) AS score "
        "FROM executions e JOIN requests r USING (execution_id) WHERE e.train AND e.validity = 'valid' AND r.parent_id = '' "
        "GROUP BY 1 ORDER BY 1",
    ),
    (
        "Which queries does the policy find hardest?",
        "SELECT task_id, count(*) AS executions, round(avg(score), 2) AS score FROM executions WHERE train AND validity = 'valid' "
        "GROUP BY 1 ORDER BY score, 1 LIMIT 5",
    ),
    (
        "How many tokens did the engines emit, and how many of them were trained on?",
        "SELECT (SELECT sum(n_output) FROM requests) AS emitted, (SELECT sum(target_tokens) FROM train_steps) AS trained, "
        "(SELECT count(*) FROM requests WHERE reroutes > 0) AS rerouted_requests",
    ),
)


def demo(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the services up afterwards (gyre down stops them).")] = False,
) -> None:
    """Start all services, train a tiny policy for a few bursts, and print what came of it."""
    from gyre_lib.commands.run import run_flow
    from gyre_lib.commands.services import runs_folder
    from gyre_lib.config.run_config import load_config
    from gyre_lib.coordination.platform import platform_url, start_platform, stop_platform
    from gyre_lib.coordination.run_services import prepare_run, start_services, stop_services

    runs = runs_folder()
    named = any(override.startswith("name=") for override in overrides or [])
    name = [] if named else [f"name=demo-{time.strftime('%m%d-%H%M%S')}"]
    layout = prepare_run(load_config(CONFIG, [*name, *(overrides or [])]), runs)
    started = time.monotonic()
    try:
        platform = start_platform(runs)
        url = platform_url(platform)
        typer.echo(f"Prefect UI: {url}  (watch the bursts there)")
        start_services(layout)
        typer.echo(f"services up after {time.monotonic() - started:.0f} s; logs in {layout.logs}")
        for arguments in (
            ("evaluate-policy", layout.run_id, "before"),
            ("training-run", layout.run_id),
            ("evaluate-policy", layout.run_id, "after"),
        ):
            if run_flow(*arguments) != 0:
                raise typer.Exit(1)
        print_summary(layout.run_id, runs, url)
        typer.echo(f"whole demo: {time.monotonic() - started:.0f} s")
    finally:
        if not keep:
            stop_services(layout)
            stop_platform(runs)


def print_summary(run: str, runs: Path, ui: str) -> None:
    """What the demo ends with."""
    from gyre_lib.config.layout import RunLayout
    from gyre_lib.coordination.run_figures import run_figures
    from gyre_lib.coordination.run_report import held_out_change, staleness_line, write_report
    from gyre_lib.trajectories.store import connect

    layout = RunLayout(runs / run)
    figures = run_figures(layout)
    _headline("Score per burst (training batches)")
    print_rows(
        [{key: row[key] for key in ("burst", "steps", "executions", "score", "staleness", "cells")} for row in figures.scores], False
    )
    change = held_out_change(figures)
    if change is not None:
        _headline("Held-out score (tasks never trained on)")
        print_rows(figures.held_out, False)
        typer.echo(f"gain {change['gain']:+.3f} = {change['standard_errors']:.1f} standard errors of the difference")
    _headline("Transitions")
    print_rows([_transition(row, figures.started_s) for row in figures.transitions], False)
    _headline("Serving without a break")
    errors = figures.proxy.get("harness_visible_errors", "unknown")
    typer.echo(
        f"requests rerouted: {figures.requests['rerouted_requests']} of {figures.requests['requests']}; harness-visible errors: {errors}"
    )
    _headline("Staleness")
    typer.echo(staleness_line(figures.scheduler))
    _headline("Wall time by phase")
    print_rows(figures.wall_by_phase, False)
    for question, sql in QUESTIONS:
        _headline(question)
        typer.echo(f'gyre sql {run} "{sql}"')
        with connect(layout.root) as database:
            cursor = database.execute(sql)
            names = [column[0] for column in cursor.description]
            print_rows([dict(zip(names, row, strict=True)) for row in cursor.fetchall()], False)
    _headline("Look further")
    typer.echo(f"UI      {ui}  (gyre up shows it again)")
    typer.echo(f"report  {write_report(layout)}")


def _transition(row: dict[str, Any], started_s: float) -> dict[str, Any]:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in (row["phases"] or {}).items())
    return {
        "at_s": round(row["started_s"] - started_s, 1),
        "cell": row["cell"],
        "direction": row["direction"],
        "outcome": row["outcome"],
        "seconds": round(row["duration_s"], 2),
        "rerouted": row["rerouted_requests"],
        "phases": phases,
    }


def _headline(text: str) -> None:
    typer.echo(f"\n== {text}")
