"""The coordinator's append-only logs: JSON lines, on disk before anything that follows from them is released.

Two logs share the code: the *journal* (scheduler events with the actions they gave, one file per burst: replaying it rebuilds the scheduler)
and the *ledger* (facts about executions, groups and actions that the scheduler does not keep).
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Append-only JSON lines in numbered files `NAME-0000.jsonl` of one folder. One writer at a time."""

    def __init__(self, folder: Path, name: str, on_failure: Callable[[OSError], None] | None = None) -> None:
        """`on_failure` is told of an entry that could not be written, before the error is raised."""
        self._on_failure = on_failure
        self.folder = folder
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files()
        self.torn_bytes = sum(_cut_torn_tail(path) for path in files)
        """Bytes of half-written lines that were cut off at start."""
        self._number = int(files[-1].stem.rsplit("-", 1)[1]) if files else 0
        self._file = self._path().open("ab", buffering=0)

    def files(self) -> list[Path]:
        """Every file of the log, in order."""
        return sorted(self.folder.glob(f"{self.name}-[0-9]*.jsonl"))

    def append(self, *entries: dict[str, Any]) -> None:
        """Write the entries and return when they are on disk.

        Raises OSError (a full disk, say) after cutting what was half written. Whoever acted on the entries must then stop: what it holds in
        memory is ahead of what a restart will find.
        """
        data = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)
        durable = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, f"{self._path()}: only a part could be written")
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), durable)
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def next_file(self) -> Path:
        """Close the current file and begin the next; returns the closed one, which never changes again."""
        closed = self._path()
        self._file.close()
        self._number += 1
        self._file = self._path().open("ab", buffering=0)
        return closed

    def entries(self) -> Iterator[dict[str, Any]]:
        """Every entry written so far, oldest first."""
        for path in self.files():
            yield from read_entries(path)

    def close(self) -> None:
        self._file.close()

    def _path(self) -> Path:
        return self.folder / f"{self.name}-{self._number:04d}.jsonl"


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of one file; a torn last line (a writer died in mid-write, or is writing now) is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


def _cut_torn_tail(path: Path) -> int:
    """Cut a half-written last line; returns how many bytes went."""
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep < len(data):
        with path.open("r+b") as file:
            file.truncate(keep)
            os.fsync(file.fileno())
    return len(data) - keep
