"""Task folders: what is read, and what is refused with the file's name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.evaluation.evaluators import evaluate
from gyre_lib.rollout.artifacts import preserve
from gyre_lib.rollout.environments import prepare_workspace
from gyre_lib.rollout.tasks import Task, find_tasks, load_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = find_tasks(Path("data/tasks/train"))[0].folder
    return Path(shutil.copytree(source, tmp_path / "task"))


def test_a_harbor_folder_is_read(folder: Path):
    task = load_task(folder)
    assert (task.task_id, task.workdir, task.agent_timeout_s, task.verifier_timeout_s) == ("task", "/app", 120.0, 30.0)
    assert task.instruction.endswith("answer.txt.")
    assert task.solution == folder / "solution"


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment"])
def test_a_missing_part_is_named(folder: Path, name: str):
    part = folder / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    with pytest.raises(InputError, match=name):
        load_task(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not toml [", "not TOML"),
        ("agent = 3", "agent must be a section"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("[verifier]\ntimeout_sec = true", "verifier.timeout_sec"),
    ],
)
def test_a_bad_task_toml_is_refused(folder: Path, text: str, words: str):
    (folder / "task.toml").write_text(text)
    with pytest.raises(InputError, match=words):
        load_task(folder)


def test_other_refusals(folder: Path, tmp_path: Path):
    with pytest.raises(InputError, match="no such tasks folder"):
        find_tasks(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no task"):
        find_tasks(tmp_path / "none")
    with pytest.raises(InputError, match="task_format"):
        load_task(folder, "other")
    (folder / "instruction.md").write_text("\n")
    with pytest.raises(InputError, match=r"instruction\.md: empty"):
        load_task(folder)


def test_the_workspace_is_what_the_dockerfile_copies(folder: Path, tmp_path: Path):
    task = load_task(folder)
    prepare_workspace(task, tmp_path / "w")
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == sorted(p.name for p in (folder / "environment" / "files").iterdir())


def test_without_a_dockerfile_the_folder_is_the_workspace(folder: Path, tmp_path: Path):
    (folder / "environment" / "Dockerfile").unlink()
    prepare_workspace(load_task(folder), tmp_path / "w")
    assert (tmp_path / "w" / "files").is_dir()


@pytest.mark.parametrize(
    "line", ["RUN apt-get install -y jq", "COPY files /opt", "COPY ../secret /app", "COPY files /app/../etc", "COPY none /app"]
)
def test_a_dockerfile_that_needs_a_container_is_refused(folder: Path, tmp_path: Path, line: str):
    (folder / "environment" / "Dockerfile").write_text(f"FROM debian\nWORKDIR /app\n{line}\n")
    with pytest.raises(InputError, match="Dockerfile"):
        prepare_workspace(load_task(folder), tmp_path / "w")


def assess(task: Task, tmp_path: Path, files: dict[str, str]) -> float | None:
    work = tmp_path / "candidate"
    shutil.rmtree(work, ignore_errors=True)
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    work.mkdir(exist_ok=True)
    preserve(work, tmp_path / "artifact")
    assessment = evaluate(task, tmp_path / "artifact", tmp_path / "eval", 60.0)
    assert assessment.validity == "valid", assessment.detail
    return assessment.score


RUNNER = "import sys, mod; ok = [mod.double(2) == 4, mod.double(3) == 6]; print(f'{sum(ok)} passed'); sys.exit(0 if all(ok) else 1)"


@pytest.fixture
def nl2repo(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-repo"
    (folder / "tests").mkdir(parents=True)
    (folder / "start.md").write_text("# A module `mod` with `double(x)`\n")
    (folder / "test_commands.json").write_text(json.dumps(["true", "/usr/bin/python3 test_mod.py"]))
    (folder / "test_files.json").write_text(json.dumps(["test_mod.py"]))
    (folder / "test_case_count.txt").write_text("2\n")
    (folder / "tests" / "test_mod.py").write_text(RUNNER)
    return folder


needs_python = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the host has no /usr/bin/python3 to show the sandbox")


@needs_python
def test_nl2repo_scores_the_share_of_tests_passed(nl2repo: Path, tmp_path: Path):
    task = load_task(nl2repo, "nl2repo")
    assert "double(x)" in task.instruction
    assert task.image.endswith("/tiny-repo:1.0")
    assert assess(task, tmp_path, {"mod.py": "def double(x): return 2 * x"}) == 1.0
    assert assess(task, tmp_path, {"mod.py": "def double(x): return 4"}) == 0.5
    assert assess(task, tmp_path, {}) == 0.0
    assert assess(task, tmp_path, {"test_mod.py": "print('2 passed')"}) == 0.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("test_commands.json", "[]"),
        ("test_commands.json", "{"),
        ("test_files.json", '["../x"]'),
        ("test_case_count.txt", "0"),
        ("start.md", ""),
    ],
)
def test_a_bad_nl2repo_folder_is_refused(nl2repo: Path, name: str, text: str):
    (nl2repo / name).write_text(text)
    with pytest.raises(InputError, match=name):
        load_task(nl2repo, "nl2repo")


@pytest.fixture
def deepswe(tmp_path: Path) -> Path:
    folder = tmp_path / "issue-1"
    (folder / "repository").mkdir(parents=True)
    (folder / "repository" / "mod.py").write_text("def double(x): return x\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "check.py").write_text(RUNNER)
    instance = {
        "instance_id": "owner__mod-1",
        "problem_statement": "double(2) gives 2",
        "FAIL_TO_PASS": json.dumps(["check.py"]),
        "PASS_TO_PASS": [],
        "test_command": "/usr/bin/python3",
    }
    (folder / "instance.json").write_text(json.dumps(instance))
    return folder


@needs_python
def test_deepswe_asks_for_all_tests(deepswe: Path, tmp_path: Path):
    task = load_task(deepswe, "deepswe")
    assert (task.task_id, task.workdir) == ("owner__mod-1", "/testbed")
    prepare_workspace(task, tmp_path / "w")
    assert (tmp_path / "w" / "mod.py").is_file()
    assert assess(task, tmp_path, {"mod.py": "def double(x): return 2 * x"}) == 1.0
    assert assess(task, tmp_path, {"mod.py": "def double(x): return 4"}) == 0.0


@pytest.mark.parametrize(
    ("field", "value"), [("instance_id", None), ("problem_statement", ""), ("FAIL_TO_PASS", "["), ("FAIL_TO_PASS", []), ("workdir", 3)]
)
def test_a_bad_deepswe_instance_is_refused(deepswe: Path, field: str, value: object):
    instance = json.loads((deepswe / "instance.json").read_text())
    (deepswe / "instance.json").write_text(json.dumps({**instance, field: value}))
    with pytest.raises(InputError, match=field):
        load_task(deepswe, "deepswe")


SHIPPED = [*find_tasks(Path("data/tasks/train")), *find_tasks(Path("data/tasks/heldout"))]


def solution_and_nothing(task: Task, tmp_path: Path) -> tuple[float | None, float | None]:
    """(score of the solution, score of the untouched workspace), each through a preserved artifact and a fresh sandbox."""
    prepare_workspace(task, tmp_path / "w")
    preserve(tmp_path / "w", tmp_path / "untouched")
    nothing = evaluate(task, tmp_path / "untouched", tmp_path / "eval", 30.0).score
    together = tmp_path / "together"
    shutil.copytree(task.tests, together)
    shutil.copytree(task.solution, together / "solution")
    solving = replace(task, tests=together, test_command=("/bin/bash", "-c", "bash /tests/solution/solve.sh && bash /tests/test.sh"))
    return evaluate(solving, tmp_path / "untouched", tmp_path / "eval", 30.0).score, nothing


@pytest.mark.parametrize("task", SHIPPED[::13], ids=lambda task: task.task_id)
def test_the_solution_scores_one_and_nothing_scores_zero(task: Task, tmp_path: Path):
    assert solution_and_nothing(task, tmp_path) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("task", SHIPPED, ids=lambda task: f"{task.folder.parent.name}-{task.task_id}")
def test_every_solution_scores_one_and_nothing_scores_zero(task: Task, tmp_path: Path):
    assert solution_and_nothing(task, tmp_path) == (1.0, 0.0)
