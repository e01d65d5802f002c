"""The read side of the trajectory store: sealed and open segments of a run together, from any process, while the run goes on."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.open_segments import OpenSegment, list_open_segments, read_open_segment
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedSegment, SealedStore, upgrade
from gyre_lib.trajectories.segments import Row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan

_DERIVED = {"recorded_s", "n_input", "n_output", "version_first", "version_last"}


class TableSnapshot:
    """The segments that one table had at one moment.

    Open segments are read before the manifests: a segment that is sealed in between is then found in one of the two, never in neither,
    and one found in both counts once.
    """

    def __init__(self, layout: RunLayout, table: str, store: SealedStore | None = None) -> None:
        """Raises InputError for files of a newer schema version."""
        self.table = table
        self.open: list[OpenSegment] = []
        for path in list_open_segments(layout.segments / table):
            try:
                segment = read_open_segment(path)
            except FileNotFoundError:
                continue  # sealed since it was listed: its manifest names it
            if segment.schema is not None:
                self.open.append(segment)
        store = store or SealedStore(layout)
        read = {segment.path.stem for segment in self.open}
        self.sealed: list[SealedSegment] = [segment for segment in store.segments(table) if segment.stem not in read]
        self._store = store

    def open_rows(self) -> pa.Table:
        """Rows of the open segments, in memory."""
        return pa.concat_tables([SCHEMAS[self.table].empty_table(), *(upgrade(self.table, segment.table()) for segment in self.open)])

    def sealed_rows(self) -> ds.Dataset:
        """Rows of the sealed segments, read on demand."""
        return self._store.dataset(self.table, self.sealed)

    def rows(self, filter: pc.Expression | None = None) -> pa.Table:
        """All rows that pass the filter, sealed ones first."""
        parts = []
        if self.sealed:
            parts.append(self.sealed_rows().to_table(filter=filter))
        open_rows = self.open_rows()
        parts.append(open_rows if filter is None else open_rows.filter(filter))
        return pa.concat_tables([part.cast(SCHEMAS[self.table]) for part in parts])


def read_table(layout: RunLayout, table: str, filter: pc.Expression | None = None) -> pa.Table:
    """Every recorded row of a table that passes the filter (superseded rows too), with today's schema."""
    return TableSnapshot(layout, table).rows(filter)


def read_execution(layout: RunLayout, execution_id: str) -> list[RequestRecord]:
    """The request records of one execution in sequence order; sees open segments of live writers."""
    return [row_to_record(row) for row in read_execution_rows(layout, execution_id).to_pylist()]


def read_execution_rows(layout: RunLayout, execution_id: str) -> pa.Table:
    """The same as rows of table `requests`, whose token lists stay in Arrow."""
    return read_table(layout, "requests", pc.field("execution_id") == execution_id).sort_by("sequence")


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
