"""`gyre bench`: measure a part of the system, beside a baseline in the same run where there is one."""

from pathlib import Path
from typing import Annotated

import typer

from gyre_lib.commands.output import print_rows

FOLDER = Path(__file__).parents[1] / "benchmarks"
NOT_BENCHMARKS = {"__init__", "rows", "mock_engine"}
TAKES_AN_HOUR = {"learning"}


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark; `all` for every one but `learning`, which takes an hour.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes: does it run, not how fast is it.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with `rows`.")] = False,
) -> None:
    """Measure a part of the system."""
    import importlib

    from gyre_lib.config.errors import InputError

    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    if name != "all" and name not in names:
        raise InputError(f"{name}: no such benchmark; there are {', '.join(names)}")
    rows = []
    for chosen in [other for other in names if other not in TAKES_AN_HOUR] if name == "all" else [name]:
        rows += importlib.import_module(f"gyre_lib.benchmarks.{chosen}").run(quick=quick)
    print_rows([row.as_json() for row in rows], json)
