"""Records of model calls: made durable through the segment writer before the harness may see the end of a response."""

from collections.abc import Iterable

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.segments import GroupCommit, SegmentWriter
from gyre_lib.trajectories.store import read_execution, read_table, record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord

TABLE = "requests"


class Recorder:
    """Appends to this proxy's segments and reads back what earlier processes of the run left."""

    def __init__(self, layout: RunLayout, proxy_id: str, segment_bytes: int) -> None:
        self._layout = layout
        self._known_before = _executions_on_disk(layout)
        self._commit = GroupCommit(SegmentWriter(layout, TABLE, proxy_id, segment_bytes=segment_bytes))

    async def append(self, record: RequestRecord) -> None:
        """Durable on return; rows that arrive together share one write."""
        await self._commit.append(record_to_row(record))

    def has_earlier(self, execution_id: str) -> bool:
        """Whether records of this execution were on disk when this process began."""
        return execution_id in self._known_before

    def read(self, execution_id: str) -> list[RequestRecord]:
        """Records of an execution in sequence order (reads files: call it off the event loop)."""
        return read_execution(self._layout, execution_id)

    async def close(self) -> None:
        await self._commit.close()


def _executions_on_disk(layout: RunLayout) -> frozenset[str]:
    if not (layout.segments / TABLE).is_dir():
        return frozenset()
    names: Iterable[str] = read_table(layout, TABLE).column("execution_id").unique().to_pylist()
    return frozenset(names)
