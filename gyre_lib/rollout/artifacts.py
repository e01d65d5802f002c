"""Artifacts: the preserved work of an execution. A folder `workspace/` and a `manifest.json` with its digest, put in place at once.

Only regular files, folders and symbolic links are kept; links are copied as links and never followed, so that what sandboxed code
left behind cannot make the host read or write anything outside. Sockets, pipes and devices are left out and counted.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre_lib.config.errors import InputError

MAX_ARTIFACT_BYTES = 512 * 2**20


class ArtifactTooLarge(OSError):
    """The workspace holds more than the limit; nothing was preserved."""


@dataclass(frozen=True)
class ArtifactManifest:
    """What was preserved. `digest` covers every path, type, permission bit and content."""

    digest: str
    files: int
    bytes: int
    left_out: int
    """Sockets, pipes and devices that were not kept."""


def preserve(workspace: Path, artifact_dir: Path, max_bytes: int = MAX_ARTIFACT_BYTES) -> ArtifactManifest:
    """Copy the workspace; afterwards `artifact_dir` exists whole or not at all. Raises OSError (ArtifactTooLarge past the limit)."""
    partial = artifact_dir.with_name(f".{artifact_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        left_out = copy_tree(workspace, partial / "workspace", max_bytes)
        digest, files, size = digest_tree(partial / "workspace")
        manifest = ArtifactManifest(digest, files, size, left_out)
        (partial / "manifest.json").write_text(json.dumps(asdict(manifest)) + "\n")
        shutil.rmtree(artifact_dir, ignore_errors=True)
        partial.rename(artifact_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def read_manifest(artifact_dir: Path) -> ArtifactManifest:
    """Raises InputError naming the folder when it is not an artifact."""
    try:
        return ArtifactManifest(**json.loads((artifact_dir / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{artifact_dir}: not an artifact: {error}") from error


def copy_tree(source: Path, target: Path, max_bytes: int = MAX_ARTIFACT_BYTES) -> int:
    """Copy files, folders and links (as links); returns how many entries of other types were left out."""
    left_out, copied = 0, 0
    target.mkdir(parents=True)
    for path, mode, size in walk(source):
        destination = target / path
        if stat.S_ISLNK(mode):
            destination.symlink_to(os.readlink(source / path))
        elif stat.S_ISDIR(mode):
            destination.mkdir()
        elif stat.S_ISREG(mode):
            copied += size
            if copied > max_bytes:
                raise ArtifactTooLarge(f"{source}: more than {max_bytes} bytes")
            shutil.copyfile(source / path, destination, follow_symlinks=False)
            destination.chmod(stat.S_IMODE(mode) | stat.S_IRUSR | stat.S_IWUSR)
        else:
            left_out += 1
    return left_out


def digest_tree(root: Path) -> tuple[str, int, int]:
    """(sha256 as hex, regular files, their bytes) of a folder's content."""
    digest, files, total = hashlib.sha256(), 0, 0
    for path, mode, size in walk(root):
        kind = "l" if stat.S_ISLNK(mode) else "d" if stat.S_ISDIR(mode) else "f"
        executable = "x" if kind == "f" and mode & stat.S_IXUSR else "-"
        digest.update(f"{kind}{executable} {os.fspath(path)!r}\0".encode())
        if kind == "l":
            digest.update(os.readlink(root / path).encode("utf-8", "surrogateescape"))
        elif kind == "f":
            files, total = files + 1, total + size
            digest.update(f"{size}\0".encode())
            with (root / path).open("rb") as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
    return digest.hexdigest(), files, total


def walk(root: Path, inner: Path = Path()) -> Iterator[tuple[Path, int, int]]:
    """(relative path, mode, size) of all entries, parents first, in sorted order; links are not followed."""
    with os.scandir(root / inner) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        status = entry.stat(follow_symlinks=False)
        yield inner / entry.name, status.st_mode, status.st_size
        if stat.S_ISDIR(status.st_mode):
            yield from walk(root, inner / entry.name)
