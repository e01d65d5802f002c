"""`gyre simulate`: the paper's experiments, a search for the best schedule, and replay of a live run's journal."""

from pathlib import Path
from typing import Annotated

import typer

from gyre_lib.commands.output import print_rows

EXPERIMENTS = {
    "paper-122b": "the paper's ablation and 48-step comparison, Qwen 3.6 122B on 32 nodes",
    "paper-2.4t": "the paper's 48-step comparison, Qwen 3.8 2.4T on 192 nodes",
    "tune": "the best of each policy at equal mean staleness",
    "plan": "what K, C_e, phi and mu to choose for a workload file",
    "replay": "replay RUN's journal through the scheduler, comparing every action",
    "calibrate": "make a workload file from RUN's tables (--output)",
}
DEFAULT_WORKLOADS = {"paper-122b": "nl2repo-122b", "paper-2.4t": "nl2repo-2.4t", "tune": "nl2repo-122b", "plan": "nl2repo-122b"}


def simulate(
    experiment: Annotated[str, typer.Argument(help="; ".join(f"{name}: {what}" for name, what in EXPERIMENTS.items()))],
    target: Annotated[str | None, typer.Argument(help="replay, calibrate: the run, by name or folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with `rows`.")] = False,
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure (repeatable), as in the table, e.g. E1/E0.")] = None,
    workload: Annotated[str | None, typer.Option(help="Workload: a shipped name or a YAML file.")] = None,
    seeds: Annotated[int, typer.Option(help="Independent runs of each method.")] = 12,
    steps: Annotated[int, typer.Option(help="tune, plan: training steps of a run.")] = 48,
    staleness: Annotated[list[str] | None, typer.Option(help="tune, plan: mean staleness E[d] (repeatable).")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots and report.html to this folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="calibrate: the workload file to write.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
) -> None:
    """Simulate the paper's experiments or your own cluster with the live scheduler, or replay a live run."""
    from gyre_lib.config.errors import InputError

    if experiment not in EXPERIMENTS:
        raise InputError(f"experiment: {experiment} is none of {', '.join(EXPERIMENTS)}")
    if experiment in ("replay", "calibrate"):
        rows = _of_run(experiment, target, output)
    else:
        if seeds < 2:
            raise InputError(f"seeds: at least 2 for a standard error, got {seeds}")
        rows = _of_workload(experiment, workload or DEFAULT_WORKLOADS[experiment], figure or [], seeds, steps, staleness or [], jobs, plots)
    print_rows(rows, as_json)


def _of_run(experiment: str, target: str | None, output: Path | None) -> list[dict]:
    from gyre_lib.commands.run_folder import find_run
    from gyre_lib.config.errors import InputError
    from gyre_lib.scheduling.replay import ReplayError

    if target is None:
        raise InputError(f"run: gyre simulate {experiment} needs a run")
    layout = find_run(target)
    if experiment == "replay":
        from gyre_lib.simulation.replayed_run import replay_rows

        try:
            return replay_rows(layout.journal)
        except ReplayError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
    from gyre_lib.simulation.calibration import calibrate

    if output is None:
        raise InputError("output: gyre simulate calibrate needs --output FILE.yaml")
    return calibrate(layout, output)


def _of_workload(
    experiment: str, workload: str, figures: list[str], seeds: int, steps: int, staleness: list[str], jobs: int, plots: Path | None
) -> list[dict]:
    from gyre_lib.simulation import experiments, tuning
    from gyre_lib.simulation.workload import load_workload

    loaded = load_workload(workload)
    if experiment == "paper-122b":
        rows = [row.as_json() for row in experiments.paper_122b(loaded, range(seeds), figures, jobs)]
    elif experiment == "paper-2.4t":
        rows = [row.as_json() for row in experiments.paper_24t(loaded, range(seeds), figures, jobs)]
    elif experiment == "tune":
        rows = [row.as_json() for row in tuning.tune(loaded, staleness or ["1", "1.5"], range(seeds), steps, jobs)]
    else:
        rows = tuning.plan(loaded, (staleness or ["1.5"])[0], range(seeds), steps, jobs)
    if plots is not None:
        from gyre_lib.simulation.plots import write_report

        method = experiments.METHODS_24T["elastic"] if experiment == "paper-2.4t" else experiments.METHODS_122B["E0"]
        write_report(plots, experiment, loaded, method, experiments.STEPS_ABLATION, rows)
    return rows
