"""The append side of the trajectory store: rows become durable in an open segment, full segments are sealed in the background.

Group commit: rows that arrive while a write is on its way to the disk go together into the next batch and share its fsync. One writer
name belongs to one live process; a second one is refused. A writer that was killed comes back under its name, cuts the torn tail, and
goes on in the same segment.
"""

import asyncio
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories import compaction, open_segments
from gyre_lib.trajectories.open_segments import cut_torn_tail, read_open_segment
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedStore, sync_folder, upgrade

Row = dict[str, Any]
_WRITER_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TornTail:
    """A tail that was cut when its writer came back: no row in it had been acknowledged."""

    file: str
    rows_kept: int
    bytes_cut: int


class _Commit:
    """Batches that share one write; `done` once they are durable or refused."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.done = False
        self.error: Exception | None = None


class SegmentWriter:
    """Appends rows of one table. Safe to use from several threads.

    `run_id` and `recorded_s` are filled in when a row lacks them; missing nullable columns are null; unknown columns are refused.
    """

    def __init__(self, layout: RunLayout, table: str, writer: str, *, segment_bytes: int = 64 * 2**20, url: str | None = None) -> None:
        """`url` None: where the run's configuration says. Raises InputError for an unknown table or a writer name in use."""
        if table not in SCHEMAS:
            raise InputError(f"table {table}: no such table; there are {', '.join(SCHEMAS)}")
        if not _WRITER_NAME.fullmatch(writer) or writer == compaction.WRITER:
            raise InputError(f"writer {writer}: lower case, digits and dashes, and not {compaction.WRITER}")
        self.table, self.writer = table, writer
        self.torn_tails: list[TornTail] = []
        self._layout = layout
        self._folder = layout.segments / table
        self._folder.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._schema = SCHEMAS[table]
        self._names = frozenset(self._schema.names)
        self._row_type = pa.struct(list(self._schema))
        self._required = [column.name for column in self._schema if not column.nullable]
        self._store = SealedStore(layout, url)
        self._lock_file = self._take_name()
        self._queue_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting = _Commit()
        self._path: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._last_recorded_s = 0.0
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix=f"seal-{table}")
        self._unsealed: list[Path] = []
        self._closed = False
        self._broken = False
        self._number = 0
        try:
            self._recover()
        except BaseException:
            os.close(self._lock_file)
            raise

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows, all or none; durable on return. Raises InputError for a row that does not fit, OSError when the disk refuses."""
        if not rows:
            return
        batch = self._batch(rows)
        with self._queue_lock:
            commit = self._waiting
            commit.batches.append(batch)
        with self._write_lock:
            if not commit.done:
                self._write(self._take_waiting())
        if commit.error is not None:
            raise commit.error

    def seal(self) -> None:
        """Seal what is open now; returns when all of it is Parquet. Raises what sealing raised; the rows stay readable as they are."""
        with self._write_lock:
            self._rotate()
        self._sealer.submit(self._seal_waiting).result()

    def close(self) -> None:
        """Seal and give the writer's name back. Closing twice does nothing."""
        if self._closed:
            return
        try:
            self.seal()
        finally:
            self._closed = True
            self._sealer.shutdown()
            os.close(self._lock_file)

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_name(self) -> int:
        descriptor = os.open(self._folder / f".{self.writer}.lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(f"writer {self.writer}: table {self.table} already has a live writer of this name") from error
        return descriptor

    def _recover(self) -> None:
        """Cut torn tails, drop open files that were already sealed, go on in the newest segment."""
        sealed = {segment.stem for segment in self._store.manifest_of(self.table, self.writer)}
        left = sorted(self._folder.glob(f"{self.writer}-[0-9]*{open_segments.SUFFIX}"))
        left = [path for path in left if path.stem.rpartition("-")[0] == self.writer]
        self._number = max((int(stem.rpartition("-")[2]) for stem in (*sealed, *(path.stem for path in left))), default=-1) + 1
        for path in left:
            if path.stem in sealed:
                path.unlink()
                continue
            segment = read_open_segment(path)
            if segment.torn_bytes:
                cut_torn_tail(segment)
                self.torn_tails.append(TornTail(path.name, segment.rows, segment.torn_bytes))
                logger.warning("%s: cut a torn tail of %d bytes, kept %d rows", path, segment.torn_bytes, segment.rows)
            if segment.schema is None or not segment.batches:
                path.unlink()
            elif path == left[-1] and segment.good_bytes < self._segment_bytes and segment.schema.equals(self._schema, check_metadata=True):
                self._path, self._size = path, segment.good_bytes
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            else:
                self._seal_file(path)

    def _batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        for row in rows:
            if unknown := row.keys() - self._names:
                raise InputError(f"table {self.table}: unknown column {', '.join(sorted(unknown))}")
        now_s = max(time.time(), self._last_recorded_s + 1e-6)
        self._last_recorded_s = now_s
        defaults = {"run_id": self._layout.run_id, "recorded_s": now_s}
        try:
            batch = pa.RecordBatch.from_struct_array(pa.array([defaults | row for row in rows], self._row_type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"table {self.table}: {self._misfit(rows) or error}") from error
        for name in self._required:
            if batch.column(name).null_count:
                raise InputError(f"table {self.table}: column {name} is missing")
        return batch

    def _misfit(self, rows: Sequence[Row]) -> str:
        """Which column does not take its values, and why."""
        for column in self._schema:
            try:
                pa.array([row.get(column.name) for row in rows], column.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                return f"column {column.name}: {error}"
        return ""

    def _take_waiting(self) -> _Commit:
        with self._queue_lock:
            commit, self._waiting = self._waiting, _Commit()
        return commit

    def _write(self, commit: _Commit) -> None:
        """Write what waits; whoever waits for it raises the error."""
        try:
            self._write_durably([batch.serialize() for batch in commit.batches])
        except Exception as error:
            commit.error = error
        finally:
            commit.done = True

    def _write_durably(self, messages: list[pa.Buffer]) -> None:
        if self._broken or self._closed:
            raise OSError(
                f"writer {self.writer} of table {self.table} is {'broken by an earlier disk error' if self._broken else 'closed'}"
            )
        if self._path is None:
            self._open_next()
        if self._size == 0:
            messages = [self._schema.serialize(), *messages]
        content = memoryview(b"".join(messages))
        size = self._size + len(content)
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fdatasync(self._descriptor)
        except OSError:
            self._broken = True  # unless the half-written batch can be cut, nothing may follow it
            os.ftruncate(self._descriptor, self._size)
            self._broken = False
            raise
        self._size = size
        if self._size >= self._segment_bytes:
            self._rotate()

    def _open_next(self) -> None:
        path = self._folder / f"{self.writer}-{self._number:06d}{open_segments.SUFFIX}"
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._path, self._size = path, 0
        self._number += 1
        sync_folder(self._folder)

    def _rotate(self) -> None:
        """Close the open file and hand it to the sealing thread; the next append opens another."""
        if self._path is None:
            return
        os.close(self._descriptor)
        path, self._path = self._path, None
        self._unsealed.append(path)
        self._sealer.submit(self._seal_waiting)

    def _seal_waiting(self) -> None:
        """Runs in the sealing thread. What fails is tried again with the next segment, on closing, and at the next start."""
        for path in list(self._unsealed):
            self._seal_file(path)
            self._unsealed.remove(path)

    def _seal_file(self, path: Path) -> None:
        try:
            segment = read_open_segment(path)
            if segment.batches:
                self._store.seal(self.table, self.writer, path.stem, upgrade(self.table, segment.table()), sealed_s=time.time())
            path.unlink()
        except Exception:
            logger.exception("%s: could not be sealed; its rows stay readable as they are", path)
            raise


class GroupCommit:
    """Async front of a SegmentWriter: rows awaited at the same time share one write and one fsync."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._waiting: list[tuple[Row, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="group-commit")

    async def append(self, row: Row) -> None:
        """Durable on return. Raises what the writer raises, for this row only. A cancelled caller's row is still written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, future))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        await future

    async def close(self) -> None:
        """Wait for rows on their way, then close the writer."""
        if self._flushing is not None:
            await self._flushing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        self._thread.shutdown()

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            errors = await loop.run_in_executor(self._thread, self._append, [row for row, _ in batch])
            for (_, future), error in zip(batch, errors, strict=True):
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        self._flushing = None

    def _append(self, rows: list[Row]) -> list[Exception | None]:
        """One error slot per row: when a batch is refused, each row is tried alone so that one bad row hurts nobody else.

        Any error is handed to those who wait: none may be left waiting.
        """
        try:
            self._writer.append(rows)
            return [None] * len(rows)
        except InputError as error:
            if len(rows) == 1:
                return [error]
        except Exception as error:
            return [error] * len(rows)
        return [self._append([row])[0] for row in rows]
