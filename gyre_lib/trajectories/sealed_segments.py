"""Sealed segments: immutable zstd Parquet files at a storage URL, and the manifests that say which of them count.

Each writer has one manifest per table, replaced atomically after the file it names is durable. The segments of a table are those named
by all manifests, less those that a compacted segment replaces. A Parquet file without a manifest entry does not exist.
"""

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import yaml
from fsspec.implementations.local import LocalFileSystem

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.schemas import SCHEMA_VERSION, SCHEMAS, schema_version

SUFFIX = ".parquet"
MANIFEST = ".manifest.json"
ROWS_PER_GROUP = 2048
"""Small enough that reading one execution decodes little more than its own rows."""

_REQUEST_OPTIONS: dict[str, Any] = {
    # Token ids and log-probs byte plane by byte plane: the planes of small ids are nearly constant, a dictionary of ids would be as big
    # as the ids. Statistics only where a query prunes by them: on the token lists they would cost a sixth of the writing time.
    "use_byte_stream_split": ["input_ids.list.element", "output_ids.list.element", "output_logprobs.list.element"],
    "use_dictionary": [
        "run_id",
        "execution_id",
        "agent_id",
        "parent_agent_id",
        "role_class",
        "branch_reason",
        "untrainable_reason",
        "finish_reason",
        "temperature",
        "engine_ids.list.element",
        "api",
        "model_requested",
        "metadata",
        "version_spans.list.element.version",
        "version_first",
        "version_last",
    ],
    "write_statistics": ["execution_id", "sequence", "recorded_s"],
}


@dataclass(frozen=True)
class SealedSegment:
    """One entry of a manifest. `replaces` names the segments whose rows a compacted one holds."""

    file: str
    rows: int
    bytes: int
    sealed_s: float
    replaces: list[str] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return self.file.removesuffix(SUFFIX)


def storage_url(layout: RunLayout) -> str:
    """The run's `storage.url`; empty (the run's own folder) when the run has no configuration file yet."""
    try:
        config = yaml.safe_load(layout.config.read_text()) or {}
    except FileNotFoundError:
        return ""
    return str((config.get("storage") or {}).get("url") or "")


class SealedStore:
    """The sealed segments of one run: in its folder, or under `<url>/<run_id>` on any fsspec file system."""

    def __init__(self, layout: RunLayout, url: str | None = None) -> None:
        """`url` None reads the run's configuration. Raises InputError for an unknown or unusable URL."""
        url = storage_url(layout) if url is None else url
        self._layout = layout
        location = f"{url.rstrip('/')}/{layout.run_id}" if url else str(layout.segments.absolute())
        try:
            self.filesystem, root = fsspec.core.url_to_fs(location)
        except (ValueError, ImportError) as error:
            raise InputError(f"storage.url: {url}: {error}") from error
        self.root = root.rstrip("/")
        self._local = isinstance(self.filesystem, LocalFileSystem)

    def segments(self, table: str) -> list[SealedSegment]:
        """Segments of a table, in order of name."""
        self.filesystem.invalidate_cache(self._folder(table))
        try:
            listing = self.filesystem.ls(self._folder(table), detail=False)
        except FileNotFoundError:
            return []
        entries = [entry for path in listing if path.endswith(MANIFEST) for entry in self._read_manifest(path)]
        replaced = {name for entry in entries for name in entry.replaces}
        return sorted((entry for entry in entries if entry.file not in replaced), key=lambda entry: entry.file)

    def dataset(self, table: str, segments: list[SealedSegment]) -> ds.Dataset:
        """The segments as one Arrow dataset with today's schema (columns that older files lack are null)."""
        return ds.dataset(
            [f"{self._folder(table)}/{segment.file}" for segment in segments],
            schema=SCHEMAS[table],
            format="parquet",
            filesystem=None if self._local else self.filesystem,
        )

    def seal(
        self,
        table: str,
        writer: str,
        stem: str,
        rows: pa.Table,
        *,
        sealed_s: float,
        replaces: Iterable[str] = (),
        compression_level: int = 1,
    ) -> SealedSegment:
        """Write rows as segment `stem` and enter it in the writer's manifest. Durable on return; sealing a stem again replaces it."""
        name = f"{stem}{SUFFIX}"
        scratch = self._scratch(table)
        try:
            write_parquet(table, rows, scratch, compression_level)
            size = scratch.stat().st_size
            self._move(scratch, f"{self._folder(table)}/{name}")
        finally:
            scratch.unlink(missing_ok=True)
        segment = SealedSegment(name, rows.num_rows, size, sealed_s, list(replaces))
        others = [entry for entry in self.manifest_of(table, writer) if entry.file != name]
        self._write_manifest(table, f"{self._folder(table)}/{writer}{MANIFEST}", [*others, segment])
        return segment

    def manifest_of(self, table: str, writer: str) -> list[SealedSegment]:
        """What one writer has sealed."""
        try:
            return self._read_manifest(f"{self._folder(table)}/{writer}{MANIFEST}")
        except FileNotFoundError:
            return []

    def remove(self, table: str, files: Iterable[str]) -> int:
        """Delete files that no reader needs any more (replaced long enough ago); returns how many there were."""
        unwanted = set(files)
        self.filesystem.invalidate_cache(self._folder(table))
        present = [path for path in self.filesystem.ls(self._folder(table), detail=False) if path.rpartition("/")[2] in unwanted]
        for path in present:
            self.filesystem.rm_file(path)
        return len(present)

    def _folder(self, table: str) -> str:
        return f"{self.root}/{table}"

    def _read_manifest(self, path: str) -> list[SealedSegment]:
        content = json.loads(self.filesystem.cat_file(path))
        if content["schema_version"] > SCHEMA_VERSION:
            raise InputError(f"{path}: written by schema version {content['schema_version']}; this program knows {SCHEMA_VERSION}")
        return [SealedSegment(**entry) for entry in content["segments"]]

    def _write_manifest(self, table: str, path: str, segments: list[SealedSegment]) -> None:
        content = {"schema_version": SCHEMA_VERSION, "table": table, "segments": [asdict(segment) for segment in segments]}
        scratch = self._scratch(table)
        scratch.write_text(json.dumps(content, indent=1))
        try:
            self._move(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    def _scratch(self, table: str) -> Path:
        """A file that nobody reads: beside its later place on a file system (where a rename is atomic), else in the run's folder."""
        folder = Path(self._folder(table)) if self._local else self._layout.segments / table
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f".{uuid.uuid4().hex}.tmp"

    def _move(self, scratch: Path, path: str) -> None:
        if not self._local:
            self.filesystem.put_file(str(scratch), path)
            return
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
        sync_folder(Path(path).parent)


def write_parquet(table: str, rows: pa.Table, path: Path, compression_level: int = 1) -> None:
    """Write one sealed file: requests sorted by execution, so that one execution lies in few row groups."""
    options: dict[str, Any] = {}
    if table == "requests":
        rows = rows.combine_chunks().sort_by([("execution_id", "ascending"), ("sequence", "ascending")])
        options = _REQUEST_OPTIONS
    pq.write_table(rows, path, row_group_size=ROWS_PER_GROUP, compression="zstd", compression_level=compression_level, **options)


def sealed_stems(segments: Iterable[SealedSegment]) -> set[str]:
    """Stems of the segments whose rows these hold: their own, and those that compacted ones replace."""
    return {name.removesuffix(SUFFIX) for segment in segments for name in (segment.file, *segment.replaces)}


def upgrade(table: str, rows: pa.Table) -> pa.Table:
    """Rows of an older file in today's schema. Raises InputError for rows of a newer version."""
    schema = SCHEMAS[table]
    if schema_version(rows.schema) > SCHEMA_VERSION:
        raise InputError(f"{table}: written by schema version {schema_version(rows.schema)}; this program knows {SCHEMA_VERSION}")
    if rows.schema.equals(schema):
        return rows
    columns = [
        rows.column(column.name).cast(column.type) if column.name in rows.schema.names else pa.nulls(rows.num_rows, column.type)
        for column in schema
    ]
    return pa.table(columns, schema=schema)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
