"""Segments: what is acknowledged is there, what is torn is cut, and readers see sealed and open rows once each."""

import asyncio
import dataclasses
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_trees import record

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.compaction import GRACE_S, compact
from gyre_lib.trajectories.open_segments import read_open_segment
from gyre_lib.trajectories.request_follower import RequestFollower
from gyre_lib.trajectories.schemas import KEYS, SCHEMA_VERSION, SCHEMAS, column_meanings
from gyre_lib.trajectories.segments import GroupCommit, SegmentWriter
from gyre_lib.trajectories.store import (
    connect,
    read_execution,
    read_execution_rows,
    read_table,
    record_to_row,
    row_to_record,
)
from gyre_lib.trajectories.tito_record import BadRecord, RequestRecord


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


def engine_row(number: int) -> dict:
    return {"engine_id": f"cell-{number % 3}", "at_s": float(number), "state": "serving"}


def as_stored(item: RequestRecord) -> RequestRecord:
    """Log-probs are stored as float32."""
    return dataclasses.replace(item, output_logprobs=[float(np.float32(value)) for value in item.output_logprobs])


def test_every_table_has_documented_columns_and_keys():
    assert set(KEYS) == set(SCHEMAS)
    for table, schema in SCHEMAS.items():
        assert schema.names[:2] == ["run_id", "recorded_s"]
        assert set(KEYS[table]) <= set(schema.names)
        assert all(row["meaning"] for row in column_meanings(table))


def test_records_come_back_as_they_were_open_and_sealed(layout):
    records = [record(place, place - 1 if place else None, metadata='{"top_p": 1.0}') for place in range(5)]
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([record_to_row(item) for item in records[:3]])
        writer.append([record_to_row(item) for item in reversed(records[3:])])
        assert read_execution(layout, "g00001-00") == [as_stored(item) for item in records]
    assert read_execution(layout, "g00001-00") == [as_stored(item) for item in records]
    assert read_execution(layout, "nobody") == []
    (segment,) = (layout.segments / "requests").glob("*.parquet")
    assert int(pq.read_schema(segment).metadata[b"gyre.schema_version"]) == SCHEMA_VERSION


def test_c14_log_probs_that_do_not_match_ids_are_refused():
    with pytest.raises(BadRecord, match="2 output ids but 1 log-probs"):
        record(0, output_logprobs=[-0.5])
    row = record_to_row(record(0)) | {"output_logprobs": [-0.5, -0.5, -0.5]}
    with pytest.raises(BadRecord, match="2 output ids but 3 log-probs"):
        row_to_record(row)


def test_rows_that_do_not_fit_are_refused_and_leave_nothing(layout):
    with SegmentWriter(layout, "engines", "coordinator") as writer:
        with pytest.raises(InputError, match="table engines: unknown column engineid"):
            writer.append([engine_row(0), {"engineid": "x", "at_s": 0.0}])
        with pytest.raises(InputError, match="table engines: column engine_id is missing"):
            writer.append([{"at_s": 0.0}])
        with pytest.raises(InputError, match="table engines: column pid"):
            writer.append([engine_row(0) | {"pid": "many"}])
        assert read_table(layout, "engines").num_rows == 0
        writer.append([engine_row(0)])
    assert read_table(layout, "engines").num_rows == 1


def test_names_are_checked(layout):
    with pytest.raises(InputError, match="table engine: no such table"):
        SegmentWriter(layout, "engine", "coordinator")
    for name in ("", "../x", "compacted", "Proxy"):
        with pytest.raises(InputError, match="writer"):
            SegmentWriter(layout, "engines", name)


def test_a_name_has_one_live_writer(layout):
    writer = SegmentWriter(layout, "engines", "coordinator")
    with pytest.raises(InputError, match="already has a live writer"):
        SegmentWriter(layout, "engines", "coordinator")
    SegmentWriter(layout, "engines", "other").close()
    writer.close()
    SegmentWriter(layout, "engines", "coordinator").close()


def test_a_name_is_free_again_when_its_writer_could_not_start(layout):
    """What stands in the way is named; once it is gone the same process may try again."""
    manifest = layout.segments / "engines" / "coordinator.manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schema_version": 99, "segments": []}')
    with pytest.raises(InputError, match="schema version 99; this program knows"):
        SegmentWriter(layout, "engines", "coordinator")
    manifest.unlink()
    SegmentWriter(layout, "engines", "coordinator").close()


def test_full_segments_are_sealed_and_each_row_is_seen_once(layout):
    with SegmentWriter(layout, "engines", "coordinator", segment_bytes=8000) as writer:
        for number in range(60):
            writer.append([engine_row(number)])
            assert read_table(layout, "engines").num_rows == number + 1
    files = sorted(path.name for path in (layout.segments / "engines").iterdir() if path.suffix in (".arrow", ".parquet"))
    assert len(files) > 3
    assert all(name.endswith(".parquet") for name in files)
    assert sorted(read_table(layout, "engines").column("at_s").to_pylist()) == list(map(float, range(60)))


def test_a_file_cut_at_any_byte_keeps_its_whole_batches(layout):
    writer = SegmentWriter(layout, "engines", "coordinator")
    ends = []
    for number in range(3):
        writer.append([engine_row(number)])
        (path,) = (layout.segments / "engines").glob("*.arrow")
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    copy = layout.root / "copy.arrow"
    for length in [*range(0, len(whole), 7), *range(ends[0] - 9, ends[0] + 9), *range(ends[1] - 9, ends[1] + 9), len(whole)]:
        copy.write_bytes(whole[:length])
        segment = read_open_segment(copy)
        assert segment.rows == sum(end <= length for end in ends)
        assert segment.good_bytes + segment.torn_bytes == length
    for tail in (
        b"\0" * 64,
        b"\xff\xff\xff\xff\x10\x00\x00\x00garbage",
        whole[ends[0] : ends[0] + 300] + b"\0" * (ends[1] - ends[0] - 300),
    ):
        copy.write_bytes(whole[: ends[1]] + tail)
        assert read_open_segment(copy).rows == 2
        assert read_open_segment(copy).good_bytes == ends[1]


def test_a_writer_that_comes_back_cuts_the_torn_tail_and_goes_on(layout):
    script = """if True:
        import os, sys
        from pathlib import Path
        from gyre_lib.config.layout import RunLayout
        from gyre_lib.trajectories.segments import SegmentWriter
        writer = SegmentWriter(RunLayout(Path(sys.argv[1])), "engines", "coordinator")
        writer.append([{"engine_id": "cell-0", "at_s": 1.0}])
        os.write(writer._descriptor, b"\\xff\\xff\\xff\\xff\\x00\\x02\\x00\\x00torn")
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", script, str(layout.root)], check=False).returncode == -signal.SIGKILL
    assert read_table(layout, "engines").num_rows == 1
    writer = SegmentWriter(layout, "engines", "coordinator")
    (torn,) = writer.torn_tails
    assert (torn.rows_kept, torn.bytes_cut) == (1, 12)
    writer.append([{"engine_id": "cell-0", "at_s": 2.0}])
    assert len(list((layout.segments / "engines").glob("*.arrow"))) == 1
    assert read_table(layout, "engines").column("at_s").to_pylist() == [1.0, 2.0]
    writer.close()
    assert read_table(layout, "engines").column("at_s").to_pylist() == [1.0, 2.0]


def test_a_full_disk_refuses_loudly_and_keeps_what_was_durable(layout):
    """The limit on file sizes stands for the full disk: writes end in the middle of a batch."""
    writer = SegmentWriter(layout, "engines", "coordinator")
    writer.append([engine_row(0)])
    (path,) = (layout.segments / "engines").glob("*.arrow")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
        for _ in range(3):
            with pytest.raises(OSError):
                writer.append([engine_row(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert read_open_segment(path).torn_bytes == 0
    writer.append([engine_row(2)])
    writer.close()
    assert read_table(layout, "engines").column("at_s").to_pylist() == [0.0, 2.0]


def test_threads_share_a_commit_and_errors_stay_with_their_row(layout):
    writer = SegmentWriter(layout, "engines", "coordinator")
    failures = []

    def append(number: int) -> None:
        for place in range(10):
            try:
                writer.append([engine_row(number * 10 + place) if place != 5 else {"engine_id": "x"}])
            except InputError:
                failures.append((number, place))

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert sorted(failures) == [(number, 5) for number in range(8)]
    expected = [float(number * 10 + place) for number in range(8) for place in range(10) if place != 5]
    assert sorted(read_table(layout, "engines").column("at_s").to_pylist()) == expected


def test_rows_awaited_together_share_one_batch(layout):
    async def run() -> tuple[list, int]:
        commit = GroupCommit(SegmentWriter(layout, "engines", "coordinator"))
        rows = [engine_row(number) for number in range(50)] + [{"nope": 1}]
        results = await asyncio.gather(*(commit.append(row) for row in rows), return_exceptions=True)
        assert read_table(layout, "engines").num_rows == 50
        (path,) = (layout.segments / "engines").glob("*.arrow")
        batches = len(read_open_segment(path).batches)
        await commit.append(engine_row(50))
        await commit.close()
        return results, batches

    results, batches = asyncio.run(run())
    assert results[:-1] == [None] * 50
    assert isinstance(results[-1], InputError)
    assert batches <= 50
    assert read_table(layout, "engines").num_rows == 51


def test_an_older_file_is_read_and_a_newer_one_refused(layout):
    with SegmentWriter(layout, "engines", "coordinator") as writer:
        writer.append([engine_row(0)])
    (path,) = (layout.segments / "engines").glob("*.parquet")
    rows = pq.read_table(path)
    pq.write_table(rows.drop_columns(["device", "detail"]), path)
    assert read_table(layout, "engines").to_pylist()[0] | {"state": ""} == rows.to_pylist()[0] | {"state": ""}
    assert connect(layout.root).sql("SELECT device FROM engines").fetchall() == [(None,)]
    newer = SCHEMAS["engines"].with_metadata({b"gyre.schema_version": b"99"})
    with pa.OSFile(str(layout.segments / "engines" / "other-000000.arrow"), "wb") as file, pa.ipc.new_stream(file, newer) as stream:
        stream.write_table(rows.cast(newer))
    with pytest.raises(InputError, match="schema version 99"):
        read_table(layout, "engines")


def test_an_execution_is_followed_at_the_cost_of_what_is_new(layout, monkeypatch):
    """Also over a sealing, and after a restart that finds sealed rows only."""
    writer = SegmentWriter(layout, "requests", "proxy-0")
    follower = RequestFollower(layout)
    starts = []
    monkeypatch.setattr(
        "gyre_lib.trajectories.request_follower.read_open_segment",
        lambda path, start, schema: starts.append(start) or read_open_segment(path, start, schema),
    )
    for place in range(6):
        writer.append([record_to_row(record(place, execution=name)) for name in ("g00001-00", "g00001-01")])
        if place == 3:
            writer.seal()
        assert follower.execution("g00001-01", place + 1).column("sequence").to_pylist() == list(range(place + 1))
        assert follower.execution("g00001-01", place + 1).equals(read_execution_rows(layout, "g00001-01"))
    assert max(starts) > 0
    assert RequestFollower(layout).execution("g00001-00", 6).equals(read_execution_rows(layout, "g00001-00"))
    writer.close()


def test_compaction_merges_small_segments_and_keeps_every_row(layout):
    for number in range(5):
        with SegmentWriter(layout, "requests", "proxy-0") as writer:
            writer.append([record_to_row(record(number))])
    before = read_table(layout, "requests").sort_by("sequence")
    done = compact(layout, "requests", clock=lambda: 1000.0)
    assert (done.merged, done.rows, done.removed_files) == (5, 5, 0)
    assert read_table(layout, "requests").sort_by("sequence").equals(before)
    assert read_execution(layout, "g00001-00") == [as_stored(record(number)) for number in range(5)]
    again = compact(layout, "requests", clock=lambda: 1001.0 + GRACE_S)
    assert (again.merged, again.removed_files) == (0, 5)
    assert [path.name for path in (layout.segments / "requests").glob("*.parquet")] == ["compacted-000000.parquet"]
    assert read_table(layout, "requests").sort_by("sequence").equals(before)
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([record_to_row(record(5))])
    assert compact(layout, "requests", clock=lambda: 9000.0).merged == 2
    assert read_table(layout, "requests").num_rows == 6


def test_readers_see_every_row_once_while_segments_are_sealed_and_compacted(layout):
    """A reader that lists files at any moment between appending, sealing and compacting finds a gapless beginning of the rows."""
    writer = SegmentWriter(layout, "engines", "coordinator", segment_bytes=3000)
    acknowledged = [0]
    stop = threading.Event()

    def write() -> None:
        for number in range(150):
            writer.append([engine_row(number)])
            acknowledged[0] = number + 1
        stop.set()

    def merge() -> None:
        while not stop.is_set():
            compact(layout, "engines")

    threads = [threading.Thread(target=write), threading.Thread(target=merge)]
    for thread in threads:
        thread.start()
    while not stop.is_set():
        at_least = acknowledged[0]
        seen = sorted(read_table(layout, "engines").column("at_s").to_pylist())
        assert seen == list(map(float, range(len(seen))))
        assert len(seen) >= at_least
    for thread in threads:
        thread.join()
    writer.close()


@pytest.mark.parametrize("url", ["memory://segments-test", "file://{folder}/elsewhere"])
def test_sealed_segments_go_to_the_storage_url(layout, url):
    url = url.format(folder=layout.root.parent)
    layout.root.mkdir(parents=True)
    layout.config.write_text(f"storage: {{url: '{url}'}}\n")
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([record_to_row(record(0))])
        assert len(read_execution(layout, "g00001-00")) == 1
    with SegmentWriter(layout, "requests", "proxy-0") as writer:
        writer.append([record_to_row(record(1, 0))])
    assert not list(layout.segments.rglob("*.parquet"))
    assert len(read_execution(layout, "g00001-00")) == 2
    assert compact(layout, "requests").merged == 2
    assert connect(layout.root).sql("SELECT count(*), sum(n_output) FROM requests").fetchall() == [(2, 4)]


def test_a_store_that_fails_is_tried_again_and_its_rows_stay_readable(layout):
    place = layout.root.parent / "store"
    layout.root.mkdir()
    layout.config.write_text(f"storage: {{url: 'file://{place}'}}\n")
    writer = SegmentWriter(layout, "engines", "coordinator", segment_bytes=3000)
    place.write_text("a file stands where the folder should be")
    for number in range(8):
        writer.append([engine_row(number)])
    with pytest.raises(OSError):
        writer.seal()
    place.unlink()
    assert read_table(layout, "engines").num_rows == 8
    writer.append([engine_row(8)])
    writer.close()
    assert not list(layout.segments.rglob("*.arrow"))
    assert read_table(layout, "engines").num_rows == 9


def test_a_wrong_storage_url_is_refused(layout):
    with pytest.raises(InputError, match=r"storage\.url: nowhere://x"):
        SegmentWriter(layout, "requests", "proxy-0", url="nowhere://x")
