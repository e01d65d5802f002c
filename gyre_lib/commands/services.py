"""`gyre up`, `gyre status`, `gyre down`: the processes of a machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_lib.commands.output import print_rows

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with `rows`.")]


def runs_folder() -> Path:
    """GYRE_RUNS, or `runs` under the current folder."""
    import os

    return Path(os.environ.get("GYRE_RUNS", "runs")).resolve()


def up(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration whose run's services shall be up; without it, Prefect alone.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Start Prefect and, with CONFIG, the coordinator, proxy, cells and worker of its run; prints the addresses."""
    from gyre_lib.config.run_config import load_config
    from gyre_lib.coordination.platform import platform_url, start_platform
    from gyre_lib.coordination.run_services import prepare_run, start_services

    runs = runs_folder()
    layout = prepare_run(load_config(config, overrides), runs) if config is not None else None
    platform = start_platform(runs)
    typer.echo(f"Prefect UI  {platform_url(platform)}")
    if layout is not None:
        services = start_services(layout)
        for process in services.processes:
            typer.echo(f"{process.name:<16} {process.address or f'process {process.pid}'}")
        typer.echo(f"logs        {layout.logs}")


def status(json: Json = False) -> None:
    """Show what is up: process, id, address, memory, restarts."""
    print_rows(_rows(runs_folder()), json)


def down() -> None:
    """Stop everything that `gyre up` started, and wait until it is gone."""
    from gyre_lib.config.layout import RunLayout
    from gyre_lib.coordination.platform import stop_platform
    from gyre_lib.coordination.run_services import stop_services

    runs = runs_folder()
    for folder in _run_folders(runs):
        if stop_services(RunLayout(folder)):
            typer.echo(f"stopped {folder.name}")
    if stop_platform(runs):
        typer.echo("stopped Prefect")


def _run_folders(runs: Path) -> list[Path]:
    return sorted(path.parent for path in runs.glob("*/services.json") if not path.parent.name.startswith("."))


def _rows(runs: Path) -> list[dict[str, Any]]:
    import psutil

    from gyre_lib.coordination.platform import platform_folder
    from gyre_lib.coordination.services_file import ServiceProcess, read_services_file

    rows = []
    for folder in [*_run_folders(runs), platform_folder(runs)]:
        services = read_services_file(folder / "services.json")
        if services is None:
            continue
        supervisor = ServiceProcess(
            "supervisor", services.supervisor_pid, services.supervisor_created_s, "", str(folder / "logs/supervisor.log")
        )
        for process in [supervisor, *services.processes]:
            alive = process.alive
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)] if alive else []
            rows.append(
                {
                    "run": folder.name.lstrip("."),
                    "process": process.name,
                    "pid": process.pid,
                    "state": "up" if alive else "gone",
                    "address": process.address,
                    "memory_mib": round(sum(_unique_memory(member) for member in tree) / 2**20),
                    "restarts": process.restarts,
                    "log": process.log,
                }
            )
    return rows


def _unique_memory(process: Any) -> int:
    """Proportional set size in bytes: pages shared between processes count once over all of them."""
    import psutil

    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
