"""Follow table `requests` while it grows, so that one execution's rows are at hand when it closes: reading costs what is new, not what is old.

Rows are kept by execution until they are forgotten. What was sealed before it was followed (after a restart) is read from the store.
"""

import threading
from pathlib import Path

import pyarrow as pa

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.open_segments import list_open_segments, read_open_segment
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import upgrade
from gyre_lib.trajectories.store import read_execution_rows

TABLE = "requests"


class RequestFollower:
    """One reader's place in every open segment of a run. Thread-safe."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._read: dict[Path, tuple[int, pa.Schema]] = {}
        self._rows: dict[str, list[pa.Table]] = {}
        self._lock = threading.Lock()

    def execution(self, execution_id: str, expected: int) -> pa.Table:
        """The rows of one closed execution in sequence order; `expected` is how many it has, as its proxy counted them at closure."""
        with self._lock:
            self._catch_up()
            rows = self._rows.get(execution_id, [])
            if sum(part.num_rows for part in rows) != expected:
                return read_execution_rows(self._layout, execution_id)
            return pa.concat_tables([SCHEMAS[TABLE].empty_table(), *rows]).sort_by("sequence")

    def forget(self, execution_id: str) -> None:
        """Its rows will not be asked for again."""
        with self._lock:
            self._rows.pop(execution_id, None)

    def _catch_up(self) -> None:
        for path in list_open_segments(self._layout.segments / TABLE):
            start, schema = self._read.get(path, (0, None))
            try:
                if path.stat().st_size == start:
                    continue
                segment = read_open_segment(path, start, schema)
            except FileNotFoundError:
                continue
            if segment.schema is None:
                continue
            self._read[path] = (segment.good_bytes, segment.schema)
            for batch in segment.batches:
                self._keep(pa.Table.from_batches([batch], segment.schema))

    def _keep(self, rows: pa.Table) -> None:
        rows = upgrade(TABLE, rows).cast(SCHEMAS[TABLE])
        executions = rows.column("execution_id").to_pylist()
        start = 0
        for end in range(1, len(executions) + 1):
            if end == len(executions) or executions[end] != executions[start]:
                self._rows.setdefault(executions[start], []).append(rows.slice(start, end - start))
                start = end
