"""The read side of the trajectory store: sealed and open segments of a run together, from any process, while the run goes on."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.open_segments import OpenSegment, list_open_segments, read_open_segment
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedSegment, SealedStore, sealed_stems, upgrade
from gyre_lib.trajectories.segments import Row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan

_DERIVED = {"recorded_s", "n_input", "n_output", "version_first", "version_last"}


class TableSnapshot:
    """The segments that one table had at one moment.

    Open segments are read before the manifests: one that is sealed in between is found in one of the two at least. Found in both, the
    sealed one counts, since it has what was appended after the reading; so each writer's rows are seen up to a point, once, without gaps.
    """

    def __init__(self, layout: RunLayout, table: str, store: SealedStore | None = None) -> None:
        """Raises InputError for files of a newer schema version."""
        self.table = table
        self._store = store or SealedStore(layout)
        found = [segment for path in list_open_segments(layout.segments / table) if (segment := _read_if_there(path)) is not None]
        self.sealed: list[SealedSegment] = self._store.segments(table)
        sealed = sealed_stems(self.sealed)
        self.open = [segment for segment in found if segment.path.stem not in sealed]

    def open_rows(self) -> pa.Table:
        """Rows of the open segments, in memory, as one chunk (a segment has a batch per append)."""
        parts = [SCHEMAS[self.table].empty_table(), *(upgrade(self.table, segment.table()) for segment in self.open)]
        return pa.concat_tables(parts).combine_chunks()

    def sealed_rows(self) -> ds.Dataset:
        """Rows of the sealed segments, read on demand."""
        return self._store.dataset(self.table, self.sealed)

    def rows(self, filter: pc.Expression | None = None, columns: list[str] | None = None) -> pa.Table:
        """All rows that pass the filter, sealed ones first."""
        parts = []
        if self.sealed:
            parts.append(self.sealed_rows().to_table(filter=filter, columns=columns))
        open_rows = self.open_rows()
        open_rows = open_rows if filter is None else open_rows.filter(filter)
        parts.append(open_rows if columns is None else open_rows.select(columns))
        return pa.concat_tables([part.cast(parts[-1].schema) for part in parts])


def _read_if_there(path: Path) -> OpenSegment | None:
    """None when it has no whole schema yet, or was sealed since it was listed (its manifest names it then)."""
    try:
        segment = read_open_segment(path)
    except FileNotFoundError:
        return None
    return segment if segment.schema is not None else None


def read_table(layout: RunLayout, table: str, filter: pc.Expression | None = None, columns: list[str] | None = None) -> pa.Table:
    """Every recorded row of a table that passes the filter (superseded rows too), with today's schema; only these columns if given."""
    return TableSnapshot(layout, table).rows(filter, columns)


def read_execution(layout: RunLayout, execution_id: str) -> list[RequestRecord]:
    """The request records of one execution in sequence order; sees open segments of live writers."""
    return [row_to_record(row) for row in read_execution_rows(layout, execution_id).to_pylist()]


def read_execution_rows(layout: RunLayout, execution_id: str) -> pa.Table:
    """The same as rows of table `requests`, whose token lists stay in Arrow. A RequestFollower costs less where many are read."""
    snapshot = TableSnapshot(layout, "requests")
    parts = [SCHEMAS["requests"].empty_table()]
    wanted = pc.field("execution_id") == execution_id
    if snapshot.sealed:
        parts.append(snapshot.sealed_rows().to_table(filter=wanted))
    for segment in snapshot.open:
        batches = [batch for batch in segment.batches if execution_id in batch.column("execution_id").to_pylist()]
        if batches:
            parts.append(upgrade("requests", pa.Table.from_batches(batches, segment.schema)).filter(wanted))
    return pa.concat_tables(parts).sort_by("sequence")


def record_to_row(record: RequestRecord) -> Row:
    """A record as a row of table `requests`."""
    spans = record.version_spans
    row = {name: getattr(record, name) for name in RequestRecord.__dataclass_fields__}
    row["version_spans"] = [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
    row["n_input"] = len(record.input_ids)
    row["n_output"] = len(record.output_ids)
    row["version_first"] = spans[0].version if spans else None
    row["version_last"] = spans[-1].version if spans else None
    return row


def row_to_record(row: Row) -> RequestRecord:
    """The inverse of record_to_row. Raises BadRecord for a row that contradicts itself."""
    values = {name: value for name, value in row.items() if name not in _DERIVED}
    values["version_spans"] = [VersionSpan(**span) for span in row["version_spans"]]
    return RequestRecord(**values)


def record_outlines(requests: pa.Table) -> list[RequestRecord]:
    """Rows of table `requests` as records without their tokens: one output token stands for all, so that nothing long is copied."""
    lists = ("input_ids", "output_ids", "output_logprobs", "version_spans")
    rows = requests.drop_columns(list(lists)).to_pylist()
    return [_outline(row, row["n_output"] > 0) for row in rows]


def _outline(row: Row, emitted: bool) -> RequestRecord:
    tokens: Row = {"input_ids": [], "output_ids": [], "output_logprobs": [], "version_spans": []}
    if emitted:
        tokens |= {"output_ids": [0], "output_logprobs": [0.0], "version_spans": [{"version": 0, "start": 0, "end": 1}]}
    return row_to_record(row | tokens)


def connect(run_dir: Path | str) -> duckdb.DuckDBPyConnection:
    """A read-only DuckDB connection to a run as it is now, with its tables and views; for notebooks and commands.

    Raises InputError when there is no such run. Later rows are seen by a new connection.
    """
    from gyre_lib.trajectories.views import open_connection

    return open_connection(RunLayout(Path(run_dir)))
