"""`gyre sql`: questions to a run's data, while it goes on or afterwards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_lib.commands.output import print_rows
from gyre_lib.config.errors import InputError


def sql(
    run: Annotated[str, typer.Argument(help="Run name, or the path of a run's folder.")],
    query: Annotated[
        list[str] | None, typer.Argument(metavar="[QUERY | VALUE...]", help="One SELECT; with --view, the values that the view takes.")
    ] = None,
    view: Annotated[str, typer.Option("--view", help="Show a shipped view instead of a query.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the views with the question each answers, and the tables.")] = False,
    columns: Annotated[str, typer.Option("--columns", help="Describe the columns of a table.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with `rows`.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="Write the answer to this Parquet file.")] = None,
) -> None:
    """Ask a run's tables with SQL (DuckDB). Read-only; sees what running processes have recorded so far."""
    from gyre_lib.commands.run_folder import find_run
    from gyre_lib.trajectories.schemas import SCHEMAS, column_meanings
    from gyre_lib.trajectories.views import ask, find_view, needs_vocabulary, open_connection, shipped_views

    values = list(query or [])
    if sum(map(bool, (listed, columns, view))) > 1 or sum(map(bool, (json, csv, parquet))) > 1:
        raise InputError("options: at most one of --view, --list, --columns, and one of --json, --csv, --parquet")
    if listed:
        shown = [{"view": _signature(item), "question": item.question} for item in shipped_views().values()]
        shown += [{"view": table, "question": f"table of {len(schema)} columns: --columns {table}"} for table, schema in SCHEMAS.items()]
        _show(sorted(shown, key=lambda row: row["view"]), json, csv, parquet)
        return
    if columns:
        if columns not in SCHEMAS:
            raise InputError(f"table {columns}: no such table; there are {', '.join(SCHEMAS)}")
        _show(column_meanings(columns), json, csv, parquet)
        return
    layout = find_run(run)
    if view:
        text, values = find_view(view).call(values)
    elif len(values) == 1:
        text, values = values[0], []
    else:
        raise InputError(f"query: one query in quotes, got {len(values)} arguments; --list names the shipped views")
    connection = open_connection(layout, vocabulary=needs_vocabulary(text))
    _show(ask(connection, text, values), json, csv, parquet)


def _signature(view: Any) -> str:
    return f"{view.name}({', '.join(view.parameters)})" if view.parameters else view.name


def _one_line(value: Any) -> Any:
    """Token texts hold line breaks; in a table they are written as escapes."""
    return value.translate({10: "\\n", 13: "\\r", 9: "\\t"}) if isinstance(value, str) else value


def _show(answer: Any, as_json: bool, as_csv: bool, parquet: Path | None) -> None:
    """`answer` is an Arrow table or a list of rows."""
    import pyarrow as pa

    if not as_csv and parquet is None:
        rows = answer if isinstance(answer, list) else answer.to_pylist()
        print_rows(rows if as_json else [{name: _one_line(value) for name, value in row.items()} for row in rows], as_json)
        return
    table = pa.Table.from_pylist(answer) if isinstance(answer, list) else answer
    if parquet is not None:
        import pyarrow.parquet as pq

        try:
            pq.write_table(table, parquet, compression="zstd")
        except OSError as error:
            raise InputError(f"{parquet}: {error.strerror or error}") from error
        typer.echo(f"{table.num_rows} rows in {parquet}")
        return
    import csv
    import sys

    writer = csv.writer(sys.stdout)
    writer.writerow(table.column_names)
    writer.writerows(tuple(row.values()) for row in table.to_pylist())
