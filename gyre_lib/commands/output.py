"""How every command prints rows: a table for people, one JSON object for programs."""

import json
from collections.abc import Iterable
from typing import Any

import typer


def print_rows(rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    rows = list(rows)
    if as_json:
        typer.echo(json.dumps({"rows": rows}, default=str))
        return
    if not rows:
        typer.echo("(no rows)")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in (names, *cells):
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
