"""Write the shipped tasks in Harbor layout: data/tasks/train (72) and data/tasks/heldout (24).

    python data/make/make_tasks.py [FOLDER]        (default data/tasks; a second, byte for byte the same every time)

Held-out tasks use (kind, noun) pairs and files that no training task and no warm-start transcript uses.
"""

import random
import shutil
import sys
from pathlib import Path

from lookup_tasks import ANSWER_FILE, LookupTask, draw_task, heldout_pairs, training_pairs

TASK_TOML = """version = "1.0"

[metadata]
category = "lookup"
kind = "{kind}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
docker_image = "debian:bookworm-slim"
workdir = "/app"
"""

DOCKERFILE = """FROM debian:bookworm-slim
WORKDIR /app
COPY files /app
"""

TEST_SH = f"""#!/bin/bash
# Reward 1 when /app/{ANSWER_FILE} is a regular file whose only line is the expected one, else 0.
reward=0
expected=(); answer=()
mapfile -t expected < /tests/expected.txt
if [[ -f /app/{ANSWER_FILE} && ! -L /app/{ANSWER_FILE} ]]; then
  mapfile -t answer < /app/{ANSWER_FILE}
  if [[ ${{#answer[@]}} -eq 1 && "${{answer[0]}}" == "${{expected[0]}}" ]]; then
    reward=1
  fi
fi
echo "$reward" > /logs/verifier/reward.txt
"""

SOLVE_SH = f"""#!/bin/bash
cd /app && {{command}} > {ANSWER_FILE}
"""


def write_task(folder: Path, task: LookupTask) -> None:
    for part in ("environment/files", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(TASK_TOML.format(kind=task.kind))
    (folder / "instruction.md").write_text(task.instruction + "\n")
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (folder / "environment" / "files" / task.file).write_text(task.content)
    (folder / "tests" / "expected.txt").write_text(task.answer + "\n")
    (folder / "tests" / "test.sh").write_text(TEST_SH)
    (folder / "solution" / "solve.sh").write_text(SOLVE_SH.format(command=task.command()))


def make_tasks(folder: Path, seed: int = 7) -> None:
    """Replaces the train and heldout folders under `folder`."""
    draw = random.Random(seed)
    for split, pairs in (("train", training_pairs() * 2), ("heldout", sorted(heldout_pairs()) * 2)):
        shutil.rmtree(folder / split, ignore_errors=True)
        # Two tasks of each pair, in an order that mixes the kinds: a batch takes neighbours.
        draw.shuffle(pairs)
        for number, (kind, noun) in enumerate(pairs):
            write_task(folder / split / f"{number:03d}-{kind}-{noun}", draw_task(draw, kind, noun))
        print(f"{folder / split}: {len(pairs)} tasks")


if __name__ == "__main__":
    make_tasks(Path(sys.argv[1] if len(sys.argv) > 1 else "data/tasks"))
