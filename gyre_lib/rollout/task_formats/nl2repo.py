"""NL2RepoBench tasks: a specification (`start.md`), from which a whole repository is to be written; the score is the share of tests passed.

A task folder holds start.md, test_commands.json (shell commands, the last one runs pytest), test_files.json (tests that replace the
candidate's own), test_case_count.txt, and optionally tests/ with those files; without it they come from the task's container image.
"""

import json
import shlex
from pathlib import Path

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.tasks import Task, read_text

IMAGE = "ghcr.io/multimodal-art-projection/nl2repobench/{name}:1.0"
INSTRUCTION = "Write the complete repository described below into {workdir}.\n\n{specification}"
WORKDIR = "/workspace"
TIMEOUT_S = 3600.0

# The image's own copy of the tests lies in its work folder, which the candidate's repository is mounted over; a fixture brings tests/.
SCRIPT = """cd {workdir}
for name in {files}; do
  if [ -e "/tests/$name" ]; then rm -rf "./$name"; mkdir -p "$(dirname "./$name")"; cp -r "/tests/$name" "./$name"; fi
done
{setup}
{{ {last}; }} > /logs/verifier/tests.log 2>&1
passed=$(grep -oE '[0-9]+ passed' /logs/verifier/tests.log | tail -n 1 | cut -d' ' -f1)
awk -v p="${{passed:-0}}" 'BEGIN {{ r = p / {count}; print (r > 1 ? 1 : r) }}' > /logs/verifier/reward.txt
"""


def load_nl2repo(folder: Path) -> Task:
    """Raises InputError naming the file at fault."""
    specification = read_text(folder / "start.md").strip()
    commands = _strings(folder / "test_commands.json")
    files = _strings(folder / "test_files.json")
    if not specification:
        raise InputError(f"{folder / 'start.md'}: empty")
    if not commands:
        raise InputError(f"{folder / 'test_commands.json'}: holds no command")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise InputError(f"{folder / 'test_files.json'}: paths must stay inside the repository")
    script = SCRIPT.format(
        workdir=WORKDIR,
        files=" ".join(shlex.quote(name) for name in files),
        setup="\n".join(f"{command} > /dev/null 2>&1" for command in commands[:-1]),
        last=commands[-1],
        count=_count(folder / "test_case_count.txt"),
    )
    tests = folder / "tests"
    environment = folder / "environment"
    return Task(
        task_id=folder.name,
        folder=folder,
        instruction=INSTRUCTION.format(workdir=WORKDIR, specification=specification),
        environment=environment if environment.is_dir() else None,
        tests=tests if tests.is_dir() else folder,
        test_command=("/bin/bash", "-c", script),
        workdir=WORKDIR,
        image=IMAGE.format(name=folder.name.lower()),
        agent_timeout_s=TIMEOUT_S,
        verifier_timeout_s=TIMEOUT_S,
        metadata={"category": "repository"},
    )


def _strings(path: Path) -> list[str]:
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{path}: must be a list of texts")
    return value


def _count(path: Path) -> int:
    text = read_text(path).strip()
    if not text.isdecimal() or int(text) == 0:
        raise InputError(f"{path}: must be a positive number, got {text[:40]!r}")
    return int(text)
