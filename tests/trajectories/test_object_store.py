"""Sealed segments in an S3-like store, against a local server."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from random_trees import record
from recorded_run import write_recorded_run

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.compaction import compact
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import connect, read_execution, record_to_row
from gyre_lib.trajectories.views import ask, open_connection, shipped_views


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (settings | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").makedirs("segments", exist_ok=True)
    yield f"s3://segments/{tmp_path.name}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_segments_in_an_object_store_are_written_read_and_compacted(tmp_path, bucket):
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    layout.config.write_text(f"storage: {{url: '{bucket}'}}\n")
    for number in range(3):
        with SegmentWriter(layout, "requests", "proxy-0") as writer:
            writer.append([record_to_row(record(number, number - 1 if number else None))])
    with SegmentWriter(layout, "requests", "proxy-1") as open_writer:
        open_writer.append([record_to_row(record(3, 2))])
        assert [item.sequence for item in read_execution(layout, "g00001-00")] == [0, 1, 2, 3]
        assert not list(layout.segments.rglob("*.parquet"))
        assert compact(layout, "requests").merged == 3
        assert connect(layout.root).sql("SELECT count(*), sum(n_output)::INTEGER FROM requests").fetchall() == [(4, 8)]


def test_every_view_answers_over_an_object_store(tmp_path, bucket):
    here = ask(open_connection(write_recorded_run(tmp_path / "here")), "SELECT * FROM score_by_version")
    there = RunLayout(tmp_path / "there" / "tiny")
    write_recorded_run(tmp_path / "there", url=bucket)
    assert not list(there.segments.rglob("*.parquet"))
    connection = open_connection(there)
    assert ask(connection, "SELECT * FROM score_by_version").equals(here)
    for view in shipped_views().values():
        if not view.parameters:
            ask(connection, *view.call([]))
