"""A fresh workspace from a task's environment folder, without containers.

A folder with a Dockerfile is understood as far as FROM, WORKDIR and COPY into the work folder go; anything else needs the docker sandbox.
"""

import shlex
from pathlib import Path, PurePosixPath

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.artifacts import copy_tree
from gyre_lib.rollout.tasks import Task, read_text


def prepare_workspace(task: Task, workspace: Path) -> None:
    """Create `workspace` (must not exist) with the task's files. Raises InputError for an environment that needs a container, OSError."""
    dockerfile = task.environment / "Dockerfile"
    if not dockerfile.is_file():
        copy_tree(task.environment, workspace)
        return
    workspace.mkdir(parents=True)
    workdir = PurePosixPath("/")
    for line in _instructions(dockerfile):
        word, *arguments = shlex.split(line)
        match word.upper(), arguments:
            case "FROM", _:
                pass
            case "WORKDIR", [path]:
                workdir = workdir / path
            case "COPY", [source, target] if not source.startswith("-"):
                _copy(task, dockerfile, source, str(workdir / target), workspace)
            case _:
                raise InputError(
                    f"{dockerfile}: `{line}` needs sandbox docker; without containers only FROM, WORKDIR and COPY are understood"
                )


def _copy(task: Task, dockerfile: Path, source: str, target: str, workspace: Path) -> None:
    origin = (task.environment / source).resolve()
    inside = PurePosixPath(target).is_relative_to(task.workdir)
    if not inside or not origin.is_relative_to(task.environment.resolve()):
        raise InputError(f"{dockerfile}: COPY {source} {target}: only files of environment/ into {task.workdir} can be copied")
    if ".." in PurePosixPath(target).parts:
        raise InputError(f"{dockerfile}: COPY {source} {target}: the target must not contain `..`")
    destination = workspace / PurePosixPath(target).relative_to(task.workdir)
    if origin.is_dir():
        _copy_into(origin, destination)
    elif origin.is_file():
        if target.endswith("/") or destination.is_dir():
            destination = destination / origin.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_bytes(origin.read_bytes())
        destination.chmod(origin.stat().st_mode & 0o777)
    else:
        raise InputError(f"{dockerfile}: COPY {source}: no such file in {task.environment}")


def _copy_into(origin: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for entry in sorted(origin.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            _copy_into(entry, destination / entry.name)
        else:
            target = destination / entry.name
            target.write_bytes(entry.read_bytes())
            target.chmod(entry.stat().st_mode & 0o777)


def _instructions(dockerfile: Path) -> list[str]:
    text = read_text(dockerfile).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
