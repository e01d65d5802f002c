"""`gyre theory`: the paper's formulas against brute force."""

from typing import Annotated

import typer

from gyre_lib.commands.output import print_rows


def theory(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with `rows`.")] = False,
    quick: Annotated[bool, typer.Option(help="A quarter of the steps, twice the tolerance.")] = False,
) -> None:
    """Check every formula of the paper (staleness, capacity, step times) against brute-force simulation."""
    from gyre_lib.simulation.theory_rows import theory_rows

    rows = theory_rows(quick)
    print_rows([row.as_json() for row in rows], as_json)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
