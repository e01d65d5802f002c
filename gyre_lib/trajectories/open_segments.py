"""Open segments: Arrow IPC streams that a live writer appends to, and how to read one whose tail may be torn.

A stream is one schema message, then record batch messages. A writer killed in the middle of a write leaves an incomplete last message;
readers stop before it, the writer that comes back cuts it. No reader maps the file, since a cut under a mapping would kill the reader.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

SUFFIX = ".arrow"


@dataclass(frozen=True)
class OpenSegment:
    """What an open segment holds: whole batches, the bytes they take with the schema, and the bytes of a torn tail after them."""

    path: Path
    schema: pa.Schema | None
    batches: list[pa.RecordBatch]
    good_bytes: int
    torn_bytes: int

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def table(self) -> pa.Table:
        """All rows; without a whole schema message the segment holds none and this raises ValueError."""
        if self.schema is None:
            raise ValueError(f"{self.path}: no whole schema message")
        return pa.Table.from_batches(self.batches, self.schema)


def read_open_segment(path: Path, start: int = 0, schema: pa.Schema | None = None) -> OpenSegment:
    """Read from byte `start` (0, or the `good_bytes` of an earlier read whose schema is passed on). Raises FileNotFoundError."""
    with pa.OSFile(str(path), "rb") as file:
        file.seek(start)
        buffer = file.read_buffer(max(0, file.size() - start))
    source = pa.BufferReader(buffer)
    reader = pa.ipc.MessageReader.open_stream(source)
    batches: list[pa.RecordBatch] = []
    good = 0
    while True:
        try:
            message = reader.read_next_message()
            if schema is None:
                schema = pa.ipc.read_schema(message)
            else:
                batches.append(pa.ipc.read_record_batch(message, schema))
        except (StopIteration, EOFError, OSError, pa.ArrowException):
            break
        good = source.tell()
    if batches and not _intact(batches[-1]):
        batches.pop()
        good = _end_of(buffer, len(batches) + (start == 0))
    return OpenSegment(path, schema, batches, start + good, len(buffer) - good)


def list_open_segments(folder: Path) -> list[Path]:
    """Open segments of one table's folder, by writer and number."""
    try:
        return sorted(folder.glob(f"*{SUFFIX}"))
    except FileNotFoundError:
        return []


def cut_torn_tail(segment: OpenSegment) -> None:
    """Truncate the file after its last whole batch, durably."""
    with open(segment.path, "r+b") as file:
        file.truncate(segment.good_bytes)
        os.fsync(file.fileno())


def _intact(batch: pa.RecordBatch) -> bool:
    """A crash of the machine (not of the process) may leave a last batch whose body was never written: zeros."""
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return all(value > 0 for value in batch.column("recorded_s").to_pylist())


def _end_of(buffer: pa.Buffer, messages: int) -> int:
    source = pa.BufferReader(buffer)
    reader = pa.ipc.MessageReader.open_stream(source)
    for _ in range(messages):
        reader.read_next_message()
    return source.tell()
