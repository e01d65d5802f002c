"""Records of model calls: made durable through the segment writer before the harness may see the end of a response."""

import copy

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.segments import GroupCommit, SegmentWriter
from gyre_lib.trajectories.store import TableSnapshot, read_execution, record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord

TABLE = "requests"


class Recorder:
    """Appends to this proxy's segments and reads back what earlier processes of the run left."""

    def __init__(self, layout: RunLayout, proxy_id: str, segment_bytes: int) -> None:
        self._layout = layout
        snapshot = TableSnapshot(layout, TABLE)
        self._known_before = _executions(snapshot)
        self._own_before = _executions(snapshot, proxy_id)
        self._commit = GroupCommit(SegmentWriter(layout, TABLE, proxy_id, segment_bytes=segment_bytes))

    async def append(self, record: RequestRecord) -> None:
        """Durable on return; rows that arrive together share one write."""
        await self._commit.append(record_to_row(record))

    def has_earlier(self, execution_id: str) -> bool:
        """Whether records of this execution were on disk when this process began."""
        return execution_id in self._known_before

    def has_earlier_own(self, execution_id: str) -> bool:
        """Whether an earlier process of this proxy's name wrote records of this execution."""
        return execution_id in self._own_before

    def read(self, execution_id: str) -> list[RequestRecord]:
        """Records of an execution in sequence order (reads files: call it off the event loop)."""
        return read_execution(self._layout, execution_id)

    async def close(self) -> None:
        await self._commit.close()


def _executions(snapshot: TableSnapshot, writer: str = "") -> frozenset[str]:
    """Execution ids in the segments of one writer, or of all."""
    snapshot = copy.copy(snapshot)
    if writer:
        snapshot.open = [segment for segment in snapshot.open if segment.path.stem.rpartition("-")[0] == writer]
        snapshot.sealed = [segment for segment in snapshot.sealed if segment.stem.rpartition("-")[0] == writer]
    names = set(snapshot.open_rows().column("execution_id").to_pylist())
    if snapshot.sealed:
        names.update(snapshot.sealed_rows().to_table(columns=["execution_id"]).column("execution_id").to_pylist())
    return frozenset(names)
