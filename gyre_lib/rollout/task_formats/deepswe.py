"""DeepSWE-style tasks: an issue in an existing repository; reward 1 when the tests that must pass do, else 0.

A task folder holds instance.json with the fields of SWE-style data sets (instance_id, problem_statement, FAIL_TO_PASS, PASS_TO_PASS,
optionally docker_image, workdir, test_command, test_patch), and optionally repository/ (the files at the base commit) and tests/ (test
files that replace the candidate's own).
"""

import json
import shlex
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.tasks import Task, read_text

WORKDIR = "/testbed"
TIMEOUT_S = 3600.0
INSTRUCTION = "Solve this issue in the repository {workdir}.\n\n{problem}"
TEST_COMMAND = "python3 -m pytest -q"

SCRIPT = """cd {workdir}
cp -r /tests/. . 2> /dev/null
{patch}
if {command} {tests} > /logs/verifier/tests.log 2>&1; then echo 1; else
  code=$?
  [ "$code" -gt 5 ] && exit "$code"
  echo 0
fi > /logs/verifier/reward.txt
"""


def load_deepswe(folder: Path) -> Task:
    """Raises InputError naming the file or the field at fault."""
    path = folder / "instance.json"
    try:
        instance = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(instance, dict):
        raise InputError(f"{path}: must be an object")
    workdir = _text(instance, "workdir", path, WORKDIR)
    names = _names(instance, "FAIL_TO_PASS", path) + _names(instance, "PASS_TO_PASS", path)
    if not names:
        raise InputError(f"{path}: FAIL_TO_PASS: names no test")
    patch = _text(instance, "test_patch", path, "")
    script = SCRIPT.format(
        workdir=shlex.quote(workdir),
        patch=f"git apply -v - <<'GYRE_TEST_PATCH' || exit 9\n{patch}\nGYRE_TEST_PATCH" if patch else "",
        command=_text(instance, "test_command", path, TEST_COMMAND),
        tests=" ".join(shlex.quote(name) for name in names),
    )
    repository, tests = folder / "repository", folder / "tests"
    return Task(
        task_id=_text(instance, "instance_id", path),
        folder=folder,
        instruction=INSTRUCTION.format(workdir=workdir, problem=_text(instance, "problem_statement", path)),
        environment=repository if repository.is_dir() else None,
        tests=tests if tests.is_dir() else folder,
        test_command=("/bin/bash", "-c", script),
        workdir=workdir,
        image=_text(instance, "docker_image", path, ""),
        agent_timeout_s=TIMEOUT_S,
        verifier_timeout_s=TIMEOUT_S,
        metadata={"category": "issue", "repo": instance.get("repo", ""), "base_commit": instance.get("base_commit", "")},
    )


def _text(instance: dict[str, Any], name: str, path: Path, default: str | None = None) -> str:
    value = instance.get(name, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise InputError(f"{path}: {name}: must be a text, got {value!r}")
    return value


def _names(instance: dict[str, Any], name: str, path: Path) -> list[str]:
    """Test names; data sets write them as a list or as its JSON text."""
    value = instance.get(name, [])
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{path}: {name}: not a list: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{path}: {name}: must be a list of test names")
    return value
