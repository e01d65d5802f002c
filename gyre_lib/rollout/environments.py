"""A fresh workspace from a task's environment folder, without containers.

A folder with a Dockerfile is understood as far as FROM, WORKDIR and COPY into the work folder go; anything else needs the docker sandbox.
"""

import shlex
from pathlib import Path, PurePosixPath

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.tasks import Task, read_text


def prepare_workspace(task: Task, workspace: Path) -> None:
    """Create `workspace` (must not exist) with the task's files. Raises InputError for an environment that needs a container, OSError."""
    workspace.mkdir(parents=True)
    if task.environment is None:
        return
    if (task.environment / "Dockerfile").is_file():
        apply_dockerfile(task.environment, task.workdir, workspace)
    else:
        copy_into(task.environment, workspace)


def apply_dockerfile(environment: Path, workdir: str, workspace: Path) -> None:
    """Copy what environment/Dockerfile copies into `workdir`; raises InputError for any instruction beyond FROM, WORKDIR and COPY."""
    dockerfile = environment / "Dockerfile"
    folder = PurePosixPath("/")
    for line in _instructions(dockerfile):
        word, *arguments = shlex.split(line)
        match word.upper(), arguments:
            case "FROM", _:
                pass
            case "WORKDIR", [path]:
                folder = folder / path
            case "COPY", [source, target] if not source.startswith("-"):
                origin, destination = _places(environment, workdir, workspace, source, str(folder / target), f"{dockerfile}: `{line}`")
                if origin.is_dir():
                    copy_into(origin, destination)
                else:
                    _copy_file(origin, destination / origin.name if target.endswith("/") or destination.is_dir() else destination)
            case _:
                raise InputError(
                    f"{dockerfile}: `{line}` needs sandbox docker; without containers only FROM, WORKDIR and COPY are understood"
                )


def _places(environment: Path, workdir: str, workspace: Path, source: str, target: str, where: str) -> tuple[Path, Path]:
    origin = (environment / source).resolve()
    if not origin.is_relative_to(environment.resolve()) or not origin.exists():
        raise InputError(f"{where}: no such file in {environment}")
    if not PurePosixPath(target).is_relative_to(workdir) or ".." in PurePosixPath(target).parts:
        raise InputError(f"{where}: without containers only the work folder {workdir} can be copied to")
    return origin, workspace / PurePosixPath(target).relative_to(workdir)


def copy_into(origin: Path, destination: Path) -> None:
    """The files under `origin`, links resolved, into `destination`, which may exist."""
    destination.mkdir(parents=True, exist_ok=True)
    for entry in sorted(origin.iterdir()):
        if entry.is_dir():
            copy_into(entry, destination / entry.name)
        else:
            _copy_file(entry, destination / entry.name)


def _copy_file(origin: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_bytes(origin.read_bytes())
    destination.chmod(origin.stat().st_mode & 0o777)


def _instructions(dockerfile: Path) -> list[str]:
    text = read_text(dockerfile).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
