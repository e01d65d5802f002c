"""Evaluation: a valid zero is a reward, a broken evaluation is not; nothing but the artifact and the task's rule decides."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_lib.evaluation.assessments import Assessment
from gyre_lib.evaluation.evaluators import evaluate
from gyre_lib.evaluation.rewards import NoReward, read_reward
from gyre_lib.rollout.artifacts import preserve
from gyre_lib.rollout.tasks import Task, find_tasks


@pytest.fixture
def task() -> Task:
    return find_tasks(Path("data/tasks/train"))[0]


@pytest.fixture
def artifact(tmp_path: Path, task: Task) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "answer.txt").write_text((task.tests / "expected.txt").read_text())
    preserve(work, tmp_path / "artifact")
    return tmp_path / "artifact"


def with_test(task: Task, script: str) -> Task:
    return replace(task, test_command=("/bin/bash", "-c", script))


def score(task: Task, artifact: Path, tmp_path: Path, **options: object) -> Assessment:
    return evaluate(task, artifact, tmp_path / "eval", options.pop("timeout_s", 30.0), **options)


def test_the_right_answer_scores_one_however_often(task: Task, artifact: Path, tmp_path: Path):
    first, second = score(task, artifact, tmp_path), score(task, artifact, tmp_path)
    assert (first.score, first.validity, first.assessed_digest) == (1.0, "valid", second.assessed_digest)
    assert second.score == 1.0


@pytest.mark.parametrize("answer", ["", "x\n", "12\n13\n"])
def test_a_wrong_answer_is_a_valid_zero(task: Task, tmp_path: Path, answer: str):
    work = tmp_path / "work"
    work.mkdir()
    (work / "answer.txt").write_text(answer)
    preserve(work, tmp_path / "artifact")
    assert (score(task, tmp_path / "artifact", tmp_path).score, score(task, tmp_path / "artifact", tmp_path).validity) == (0.0, "valid")


def test_a_link_to_the_expected_answer_earns_nothing(task: Task, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "answer.txt").symlink_to("/tests/expected.txt")
    preserve(work, tmp_path / "artifact")
    assert score(task, tmp_path / "artifact", tmp_path).score == 0.0


def test_graded_rewards_pass_through(task: Task, artifact: Path, tmp_path: Path):
    assert score(with_test(task, "echo 0.25 > /logs/verifier/reward.txt"), artifact, tmp_path).score == 0.25
    assert score(with_test(task, "echo '{\"reward\": 0.5}' > /logs/verifier/reward.json"), artifact, tmp_path).score == 0.5


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo nan > /logs/verifier/reward.txt", "between 0 and 1"),
        ("echo 2 > /logs/verifier/reward.txt", "between 0 and 1"),
        ("echo lots > /logs/verifier/reward.txt", "not a number"),
        ("exit 127", "exit code 127"),
        ("kill -9 $$", "exit code 137"),
        ("sleep 30", "stopped"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt; exit 3", "exit code 3"),
    ],
)
def test_c25_a_broken_verifier_is_unresolved_not_zero(task: Task, artifact: Path, tmp_path: Path, script: str, words: str):
    assessment = score(with_test(task, script), artifact, tmp_path, timeout_s=2.0)
    assert (assessment.score, assessment.validity) == (None, "unresolved")
    assert words in assessment.detail


def test_a_changed_or_missing_artifact_is_unresolved(task: Task, artifact: Path, tmp_path: Path):
    (artifact / "workspace" / "answer.txt").write_text("other\n")
    assert "changed" in score(task, artifact, tmp_path).detail
    assert score(task, tmp_path / "nothing", tmp_path).validity == "unresolved"


def test_the_verifier_cannot_change_the_artifact(task: Task, artifact: Path, tmp_path: Path):
    assert score(with_test(task, "echo x > /app/answer.txt; rm -rf /tests/* 2> /dev/null; exit 0"), artifact, tmp_path).score == 1.0
    assert (task.tests / "test.sh").is_file()
    assert score(task, artifact, tmp_path).score == 1.0


def test_cancelling_leaves_it_unresolved(task: Task, artifact: Path, tmp_path: Path):
    cancelled = threading.Event()
    cancelled.set()
    assert score(with_test(task, "sleep 30"), artifact, tmp_path, cancelled=cancelled).validity == "unresolved"


def test_the_exit_code_decides_without_a_reward_file(task: Task, artifact: Path, tmp_path: Path):
    assert score(with_test(task, "exit 0"), artifact, tmp_path).score == 1.0
    assert score(with_test(task, "exit 1"), artifact, tmp_path).score == 0.0


@given(st.one_of(st.floats(), st.text(max_size=20), st.integers(-5, 5)), st.integers(0, 255))
def test_any_reward_text_is_a_number_from_0_to_1_or_refused(tmp_path_factory: pytest.TempPathFactory, value: object, code: int):
    folder = tmp_path_factory.mktemp("logs")
    (folder / "reward.txt").write_text(str(value), encoding="utf-8", errors="replace")
    with contextlib.suppress(NoReward):
        assert 0.0 <= read_reward(folder, code) <= 1.0


def test_assessments_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="valid exactly"):
        Assessment(None, "valid", "", "", 0.0, 0.0)
    with pytest.raises(ValueError, match="valid exactly"):
        Assessment(0.0, "unresolved", "", "", 0.0, 0.0)
    with pytest.raises(ValueError, match="between"):
        Assessment(1.5, "valid", "", "", 0.0, 0.0)
