"""`gyre run` and `gyre burst`: train."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyre_lib.commands.services import runs_folder


def run(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML); shipped ones lie in data/configs.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the configuration and say what would run.")] = False,
) -> None:
    """Train a policy; a run of the same name that was stopped goes on. Starts what is not up, and stops what it started."""
    from gyre_lib.config.run_config import load_config
    from gyre_lib.coordination.run_services import check_config, prepare_run, resolve_paths

    loaded = resolve_paths(load_config(config, overrides))
    check_config(loaded)
    if dry_run:
        _describe(loaded)
        return
    layout = prepare_run(loaded, runs_folder())
    raise typer.Exit(run_flow("training-run", layout.run_id))


def burst(run: Annotated[str, typer.Argument(help="Name of a run whose services are up (gyre up).")]) -> None:
    """Carry out the run's next burst, or finish one that was interrupted."""
    from gyre_lib.config.layout import RunLayout
    from gyre_lib.coordination.client import CoordinatorClient, find_coordinator

    client = CoordinatorClient(find_coordinator(RunLayout(runs_folder() / run)))
    number = client.start_run()["burst"]
    raise typer.Exit(run_flow("burst", run, str(number)))


def run_flow(*arguments: str) -> int:
    """Run a flow in a process of its own, against the platform of the runs folder; returns its exit code.

    The terminal gets what the flow prints and its warnings; everything else that it logs is in the UI.
    """
    from gyre_lib.coordination.platform import find_platform, flow_environment, platform_url, start_platform, stop_platform

    runs = runs_folder()
    started_here = find_platform(runs) is None
    platform = start_platform(runs)
    try:
        environment = flow_environment(runs, f"{platform_url(platform)}/api") | {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING"}
        with subprocess.Popen(
            [sys.executable, "-m", "flows.launch", *arguments], env=environment, stdout=subprocess.PIPE, text=True
        ) as flow:
            assert flow.stdout is not None
            for line in flow.stdout:
                if not line.startswith("{"):
                    typer.echo(line.rstrip())
        return flow.returncode
    finally:
        if started_here:
            stop_platform(runs)


def _describe(config: object) -> None:
    from gyre_lib.config.run_config import RunConfig
    from gyre_lib.rollout.tasks import find_tasks

    assert isinstance(config, RunConfig)
    s, c = config.scheduling, config.cells
    depth = (s.phi + s.steps_per_burst) * s.groups_per_batch
    staleness = float(s.phi) + (s.steps_per_burst - 1) / 2
    training, held_out = (
        len(find_tasks(Path(folder), config.rollout.task_format)) for folder in (config.rollout.tasks, config.rollout.heldout_tasks)
    )
    lines = {
        "run": config.name,
        "policy": f"{s.policy}, {s.bursts} bursts of {s.steps_per_burst} steps",
        "batch": f"{s.groups_per_batch} groups of {s.executions_per_group} executions a step",
        "queue depth": f"{depth} groups = {depth * s.executions_per_group} executions; expected staleness {staleness:g}",
        "capacity": f"{c.standalone_capacity + c.count * c.capacity} executions with every cell in rollout",
        "cells": f"{c.count} on {c.device}, {c.ranks_per_cell} ranks each",
        "tasks": f"{training} training, {held_out} held out",
        "model": config.model.path,
    }
    for name, text in lines.items():
        typer.echo(f"{name:<12} {text}")
