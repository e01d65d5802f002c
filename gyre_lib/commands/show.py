"""`gyre show`: one execution's tree, trajectories and assessments."""

from pathlib import Path
from typing import Annotated

import typer


def show(
    run: Annotated[str, typer.Argument(help="Run name, or the path of a run's folder.")],
    execution: Annotated[str, typer.Argument(help="Execution id, such as g00001-03.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file instead.")] = None,
) -> None:
    """Show the trajectory tree of an execution: agents, classes, branches, versions, targets, score."""
    from gyre_lib.commands.run_folder import find_run
    from gyre_lib.config.errors import InputError
    from gyre_lib.trajectories.viewer import gather
    from gyre_lib.trajectories.viewer_page import render_page
    from gyre_lib.trajectories.viewer_text import render
    from gyre_lib.trajectories.views import open_connection

    layout = find_run(run)
    record = gather(open_connection(layout), execution)
    if html is None:
        typer.echo(render(record))
        return
    try:
        html.write_text(render_page(record, layout.run_id))
    except OSError as error:
        raise InputError(f"{html}: {error.strerror}") from error
    typer.echo(f"wrote {html}")
