"""Tasks in their native format: a Harbor / Terminal-Bench 2 folder (task.toml, instruction.md, environment/, tests/, solution/).

Other benchmarks are read into the same `Task` by the adapters in `task_formats/`.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError

DEFAULT_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Task:
    """One query: what the policy is asked, where it works, and how its work is scored."""

    task_id: str
    folder: Path
    instruction: str
    environment: Path | None
    """Folder whose content (or whose Dockerfile) makes the workspace; None: an empty one, or what the image brings."""
    tests: Path
    """Folder that the evaluator sees as /tests; never visible to the harness."""
    test_command: tuple[str, ...] = ("/bin/bash", "/tests/test.sh")
    """Run in the workspace copy; the reward is what it writes to /logs/verifier/reward.txt (or reward.json), else its exit code."""
    solution: Path | None = None
    workdir: str = "/app"
    image: str = ""
    """Container image, for sandboxes that use one."""
    agent_timeout_s: float = DEFAULT_TIMEOUT_S
    verifier_timeout_s: float = DEFAULT_TIMEOUT_S
    metadata: dict[str, Any] = field(default_factory=dict)


def load_task(folder: Path, task_format: str = "harbor") -> Task:
    """Read one task folder; raises InputError naming the file at fault."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such task folder")
    if task_format == "harbor":
        return _load_harbor(folder)
    if task_format == "nl2repo":
        from gyre_lib.rollout.task_formats.nl2repo import load_nl2repo

        return load_nl2repo(folder)
    if task_format == "deepswe":
        from gyre_lib.rollout.task_formats.deepswe import load_deepswe

        return load_deepswe(folder)
    raise InputError(f"task_format: unknown format {task_format!r} (harbor, nl2repo, deepswe)")


def find_tasks(folder: Path, task_format: str = "harbor") -> list[Task]:
    """All tasks directly under `folder`, in name order; raises InputError when there is none, or naming a broken one."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such tasks folder")
    tasks = [load_task(entry, task_format) for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    if not tasks:
        raise InputError(f"{folder}: holds no task folders")
    return tasks


def read_text(path: Path) -> str:
    """A file that a task must have, as text; raises InputError naming it."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _load_harbor(folder: Path) -> Task:
    toml = folder / "task.toml"
    try:
        config = tomllib.loads(read_text(toml))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{toml}: not TOML: {error}") from error
    instruction = read_text(folder / "instruction.md").strip()
    if not instruction:
        raise InputError(f"{folder / 'instruction.md'}: empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise InputError(f"{folder / 'tests' / 'test.sh'}: missing")
    if not (folder / "environment").is_dir():
        raise InputError(f"{folder / 'environment'}: missing")
    environment = _section(config, "environment", toml)
    solution = folder / "solution"
    return Task(
        task_id=folder.name,
        folder=folder,
        instruction=instruction,
        environment=folder / "environment",
        tests=folder / "tests",
        solution=solution if (solution / "solve.sh").is_file() else None,
        workdir=str(environment.get("workdir", "/app")),
        image=str(environment.get("docker_image", "")),
        agent_timeout_s=_timeout_s(config, "agent", toml),
        verifier_timeout_s=_timeout_s(config, "verifier", toml),
        metadata=_section(config, "metadata", toml),
    )


def _section(config: dict[str, Any], name: str, toml: Path) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise InputError(f"{toml}: {name} must be a section")
    return section


def _timeout_s(config: dict[str, Any], section: str, toml: Path) -> float:
    value = _section(config, section, toml).get("timeout_sec", DEFAULT_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InputError(f"{toml}: {section}.timeout_sec must be a positive number of seconds, got {value!r}")
    return float(value)
