"""SQL over a run: its tables and the shipped views in one locked DuckDB connection.

For each table `<table>_log` has every recorded row and `<table>` the latest row of each key. `config` has the run's settings,
`vocabulary` the text of each token id. Views are the files of data/sql: a comment that says the question, then one CREATE VIEW, or
CREATE MACRO … AS TABLE for a question with arguments.

The connection cannot touch files, other databases, extensions or settings: the data reaches it as Arrow, and external access is locked.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import yaml

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.schemas import KEYS, SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedStore
from gyre_lib.trajectories.store import TableSnapshot
from gyre_lib.trajectories.vocabulary import find_tokenizer, read_vocabulary

VIEWS_FOLDER = Path(__file__).resolve().parents[2] / "data" / "sql"
_CREATE = re.compile(r"CREATE (VIEW|MACRO) (\w+)\s*(?:\(([^)]*)\))? AS", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_READ_ON_DEMAND = ("requests", "admissions", "micro_steps")
"""Tables with a row per model call or the like: never loaded whole. The others are loaded when the connection is opened."""
_NEVER_SUPERSEDED = ("requests", "engines")


@dataclass(frozen=True)
class ShippedView:
    """A view of data/sql. `parameters` is empty for a plain view."""

    name: str
    question: str
    notes: str
    parameters: tuple[str, ...]
    sql: str

    @property
    def words(self) -> set[str]:
        """Names in its SQL, comments aside."""
        return set(_WORD.findall("\n".join(line for line in self.sql.splitlines() if not line.startswith("--"))))

    def call(self, arguments: Iterable[str]) -> tuple[str, list[str]]:
        """The query that shows it and its values. Raises InputError when the arguments do not fit."""
        values = list(arguments)
        if len(values) != len(self.parameters):
            needed = ", ".join(self.parameters) or "no arguments"
            raise InputError(f"view {self.name}: takes {needed}, got {len(values)}")
        marks = ", ".join("?" * len(values))
        return (f"SELECT * FROM {self.name}({marks})" if values else f"SELECT * FROM {self.name}"), values


def shipped_views(folder: Path = VIEWS_FOLDER) -> dict[str, ShippedView]:
    """Views by name, each after those that it uses. Raises InputError for a file that is no view."""
    views = {}
    for path in sorted(folder.glob("*.sql")):
        text = path.read_text()
        found = _CREATE.search(text)
        if found is None or not text.startswith("--"):
            raise InputError(f"{path}: a view file is a comment with its question, then CREATE VIEW or CREATE MACRO … AS TABLE")
        comment = [line.removeprefix("--").strip() for line in text.splitlines() if line.startswith("--")]
        parameters = tuple(name.split(":=")[0].strip() for name in (found[3] or "").split(",") if name.strip())
        views[found[2]] = ShippedView(found[2], comment[0], " ".join(comment[1:]), parameters, text)
    ordered: dict[str, ShippedView] = {}
    while len(ordered) < len(views):
        ready = [view for view in views.values() if view.name not in ordered and not view.words & (views.keys() - ordered - {view.name})]
        if not ready:
            raise InputError(f"{folder}: views use each other in a circle: {', '.join(views.keys() - ordered)}")
        ordered |= {view.name: view for view in ready}
    return ordered


def find_view(name: str) -> ShippedView:
    """Raises InputError that lists the names."""
    views = shipped_views()
    if name not in views:
        raise InputError(f"view {name}: no such view; there are {', '.join(sorted(views))}")
    return views[name]


def needs_vocabulary(sql: str) -> bool:
    """Whether a query shows token texts, directly or through a shipped view (reading a large vocabulary takes a moment)."""
    words = set(_WORD.findall(sql))
    return "vocabulary" in words or any(view.name in words and "vocabulary" in view.words for view in shipped_views().values())


def open_connection(layout: RunLayout, vocabulary: bool = True) -> duckdb.DuckDBPyConnection:
    """The run as it is now. Without `vocabulary` that table is empty. Raises InputError when there is no such run."""
    if not layout.segments.is_dir():
        raise InputError(f"run {layout.run_id}: no recorded data in {layout.segments.absolute()}")
    connection = duckdb.connect()
    connection.execute("SET python_enable_replacements = false")
    store = SealedStore(layout)
    for table in SCHEMAS:
        _create_table(connection, TableSnapshot(layout, table, store))
    settings = _settings(layout)
    connection.register("config", pa.table({"field": list(settings), "value": list(settings.values())}, _CONFIG))
    tokenizer = find_tokenizer(layout, settings.get("model.path", "")) if vocabulary else None
    connection.register("vocabulary", read_vocabulary(tokenizer))
    for view in shipped_views().values():
        connection.execute(view.sql)
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def ask(connection: duckdb.DuckDBPyConnection, sql: str, values: Iterable[Any] = ()) -> pa.Table:
    """The answer to one question. Raises InputError with DuckDB's message in one line for a wrong query or one that is no question."""
    try:
        statements = connection.extract_statements(sql)
        kinds = {statement.type for statement in statements}
        if len(statements) != 1 or not kinds <= {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}:
            raise InputError("query: one SELECT, please; a run's data is read-only")
        return connection.sql(sql, params=list(values)).to_arrow_table()
    except duckdb.Error as error:
        raise InputError(" ".join(str(error).split("\n\nLINE")[0].split())) from error


_CONFIG = pa.schema([("field", pa.string()), ("value", pa.string())])


def _create_table(connection: duckdb.DuckDBPyConnection, snapshot: TableSnapshot) -> None:
    table = snapshot.table
    if table in _READ_ON_DEMAND and snapshot.sealed:
        connection.register(f"{table}_sealed", snapshot.sealed_rows())
        connection.register(f"{table}_open", snapshot.open_rows())
        both = f"UNION ALL SELECT * FROM {table}_open" if snapshot.open else ""
        connection.execute(f"CREATE VIEW {table}_log AS SELECT * FROM {table}_sealed {both}")
    else:
        connection.register(f"{table}_log", snapshot.rows())
    latest = f"QUALIFY row_number() OVER (PARTITION BY {', '.join(KEYS[table])} ORDER BY recorded_s DESC) = 1"
    kind = "VIEW" if table in _READ_ON_DEMAND else "TABLE"
    connection.execute(f"CREATE {kind} {table} AS SELECT * FROM {table}_log {'' if table in _NEVER_SUPERSEDED else latest}")


def _settings(layout: RunLayout) -> dict[str, str]:
    """The run's configuration as `section.field` -> text, with today's defaults of what it leaves out. Old runs are read, not judged."""
    from gyre_lib.config.run_config import RunConfig

    try:
        data = yaml.safe_load(layout.config.read_text()) or {}
    except FileNotFoundError:
        data = {}
    return dict(_flatten(RunConfig.model_validate({}).model_dump(), "")) | dict(_flatten(data, ""))


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield prefix, "" if value is None else str(value)
        return
    for name, item in value.items():
        yield from _flatten(item, f"{prefix}.{name}" if prefix else name)
