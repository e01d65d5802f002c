"""Merging small sealed segments: fewer files to open, better compression, same rows.

A compacted segment names the segments that it replaces; from the moment its manifest entry is there readers take it instead of them, so
that there is no moment with a row missing or twice. The replaced files stay for a while, for readers that listed them before.
"""

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedSegment, SealedStore

WRITER = "compacted"
GRACE_S = 600.0
COMPRESSION_LEVEL = 3


@dataclass(frozen=True)
class Compacted:
    """What one pass over a table did."""

    table: str
    merged: int
    rows: int
    bytes_before: int
    bytes_after: int
    removed_files: int


def compact(
    layout: RunLayout, table: str, *, segment_bytes: int = 64 * 2**20, clock: Callable[[], float] = time.time, url: str | None = None
) -> Compacted:
    """Merge runs of segments below half of `segment_bytes` into segments of about that size. Safe while writers and readers are at work.

    Raises InputError for an unknown table, or when another compaction of it is going on.
    """
    if table not in SCHEMAS:
        raise InputError(f"table {table}: no such table; there are {', '.join(SCHEMAS)}")
    store = SealedStore(layout, url)
    folder = layout.segments / table
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f".{WRITER}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"table {table}: a compaction is going on") from error
        removed = _remove_old(store, table, clock())
        merged = rows = before = after = 0
        for run in _runs(store.segments(table), segment_bytes):
            replaced = sorted({name for segment in run for name in (segment.file, *segment.replaces)})
            content = store.dataset(table, run).to_table()
            stem = f"{WRITER}-{len(store.manifest_of(table, WRITER)):06d}"
            segment = store.seal(table, WRITER, stem, content, replaces=replaced, compression_level=COMPRESSION_LEVEL, sealed_s=clock())
            merged += len(run)
            rows += segment.rows
            before += sum(item.bytes for item in run)
            after += segment.bytes
        return Compacted(table, merged, rows, before, after, removed)
    finally:
        os.close(lock)


def compact_all(layout: RunLayout, **options: Any) -> list[Compacted]:
    """Every table of a run; options as for `compact`."""
    return [compact(layout, table, **options) for table in SCHEMAS]


def _runs(segments: list[SealedSegment], segment_bytes: int) -> list[list[SealedSegment]]:
    """Groups of at least two small segments that together stay below the limit."""
    runs: list[list[SealedSegment]] = []
    current: list[SealedSegment] = []
    for segment in segments:
        if segment.bytes > segment_bytes // 2:
            continue
        if current and sum(item.bytes for item in current) + segment.bytes > segment_bytes:
            runs.append(current)
            current = []
        current.append(segment)
    return [run for run in [*runs, current] if len(run) > 1]


def _remove_old(store: SealedStore, table: str, now_s: float) -> int:
    """Delete files that were replaced longer ago than readers need them."""
    old = [name for segment in store.manifest_of(table, WRITER) if now_s - segment.sealed_s > GRACE_S for name in segment.replaces]
    return store.remove(table, old) if old else 0
