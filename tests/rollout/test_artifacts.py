"""Artifacts: whole or absent, links never followed, digest of the content."""

import os
from pathlib import Path

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.artifacts import ArtifactTooLarge, digest_tree, preserve, read_manifest


def make(folder: Path) -> Path:
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "away").symlink_to("/etc/passwd")
    (folder / "loop").symlink_to(".")
    return folder


def test_the_copy_has_the_same_digest_and_keeps_links_as_links(tmp_path: Path):
    work = make(tmp_path / "work")
    manifest = preserve(work, tmp_path / "kept" / "x1")
    assert read_manifest(tmp_path / "kept" / "x1") == manifest
    copy = tmp_path / "kept" / "x1" / "workspace"
    assert digest_tree(copy)[0] == digest_tree(work)[0] == manifest.digest
    assert (copy / "away").is_symlink()
    assert os.readlink(copy / "away") == "/etc/passwd"
    assert os.access(copy / "sub" / "run.sh", os.X_OK)
    assert (manifest.files, manifest.bytes, manifest.left_out) == (2, 14, 0)
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["x1"]


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "folder"])
def test_the_digest_sees_every_change(tmp_path: Path, change: str):
    work = make(tmp_path / "work")
    before = digest_tree(work)[0]
    match change:
        case "content":
            (work / "a.txt").write_text("two\n")
        case "name":
            (work / "a.txt").rename(work / "b.txt")
        case "mode":
            (work / "a.txt").chmod(0o755)
        case "link":
            (work / "away").unlink()
            (work / "away").symlink_to("/etc/group")
        case "folder":
            (work / "sub" / "empty").rmdir()
    assert digest_tree(work)[0] != before


def test_pipes_are_left_out_and_do_not_hang(tmp_path: Path):
    work = make(tmp_path / "work")
    os.mkfifo(work / "pipe")
    assert preserve(work, tmp_path / "x1").left_out == 1
    assert not (tmp_path / "x1" / "workspace" / "pipe").exists()


def test_too_much_is_refused_and_leaves_nothing(tmp_path: Path):
    work = make(tmp_path / "work")
    (work / "big").write_bytes(b"x" * 5000)
    with pytest.raises(ArtifactTooLarge):
        preserve(work, tmp_path / "kept" / "x1", max_bytes=4000)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_new_artifact_replaces_the_old_one(tmp_path: Path):
    work = make(tmp_path / "work")
    preserve(work, tmp_path / "x1")
    (work / "a.txt").unlink()
    preserve(work, tmp_path / "x1")
    assert not (tmp_path / "x1" / "workspace" / "a.txt").exists()


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path):
    with pytest.raises(InputError, match="not an artifact"):
        read_manifest(tmp_path)
