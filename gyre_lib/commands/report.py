"""`gyre report`: the one-page report of a run."""

from typing import Annotated

import typer

from gyre_lib.commands.output import print_rows
from gyre_lib.commands.services import runs_folder


def report(
    run: Annotated[str, typer.Argument(help="Name of a run.")],
    json: Annotated[bool, typer.Option("--json", help="Print the scores per burst as one JSON object instead.")] = False,
) -> None:
    """Write the run's report (HTML) and print where it is."""
    from gyre_lib.config.layout import RunLayout
    from gyre_lib.coordination.run_figures import run_figures
    from gyre_lib.coordination.run_report import write_report

    layout = RunLayout(runs_folder() / run)
    if json:
        print_rows(run_figures(layout).scores, as_json=True)
    else:
        typer.echo(str(write_report(layout)))
