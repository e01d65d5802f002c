"""The `gyre` command. Each subcommand lives in a module of its own; what it needs is imported when it runs."""

import importlib
import sys

import typer

from gyre_lib.config.errors import InputError

app = typer.Typer(
    name="gyre",
    help="Elastic reinforcement learning for agents whose one task takes hours.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = {
    "demo": "demo",
    "up": "services",
    "down": "services",
    "status": "services",
    "run": "run",
    "burst": "run",
    "sql": "sql",
    "show": "show",
    "report": "report",
    "simulate": "simulate",
    "theory": "theory",
    "bench": "bench",
    "doctor": "doctor",
}
"""Command name -> module of this package that has a function of that name."""

for name, module in COMMANDS.items():
    app.command(name)(getattr(importlib.import_module(f"gyre_lib.commands.{module}"), name))


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 bad usage or bad input."""
    try:
        app()
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
