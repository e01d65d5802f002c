"""Executions with the real built-in harness in a real bubblewrap sandbox; only the model endpoint is scripted."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.evaluation.evaluators import evaluate
from gyre_lib.rollout.execution import LaunchOrder, run_execution
from gyre_lib.rollout.outcomes import Cancelled, Completed, HarnessTimeout, InfrastructureFailed, OverallTimeout
from gyre_lib.rollout.tasks import find_tasks, load_task
from tests.rollout.conftest import DONE, order, shell

TASK = Path("data/tasks/train")
NEVER = threading.Event()


@pytest.fixture(scope="module")
def task():
    return find_tasks(TASK)[0]


def run(tmp_path: Path, launch: LaunchOrder, cancelled: threading.Event = NEVER):
    return run_execution(launch, tmp_path / "work", tmp_path / "artifacts" / "x1", cancelled)


def test_a_right_execution_scores_one(tmp_path, endpoint, task):
    command = (task.solution / "solve.sh").read_text().splitlines()[-1]
    proxy = endpoint([{"type": "thinking", "thinking": "look", "signature": ""}, *shell("ls")], shell(command), DONE)
    result = run(tmp_path, order(proxy, task.folder))
    assert result.outcome == Completed("")
    assert Path(result.artifact_ref) == tmp_path / "artifacts" / "x1"
    assessment = evaluate(task, Path(result.artifact_ref), tmp_path / "eval", 30.0)
    assert (assessment.score, assessment.validity) == (1.0, "valid")
    assert assessment.assessed_digest == result.artifact_digest
    assert len(proxy.requests) == 3
    assert proxy.headers[0]["x-api-key"] == "key-1"
    assert proxy.requests[0]["messages"][0]["content"] == task.instruction
    results = [m["content"][0]["content"] for m in proxy.requests[2]["messages"] if m["role"] == "user" and isinstance(m["content"], list)]
    assert results == ["\n".join(sorted(f.name for f in (task.environment / "files").iterdir())), "(no output)"]
    assert not (tmp_path / "work" / "workspace").exists()


def test_an_idle_execution_is_a_valid_zero(tmp_path, endpoint, task):
    result = run(tmp_path, order(endpoint(DONE), task.folder))
    assessment = evaluate(task, Path(result.artifact_ref), tmp_path / "eval", 30.0)
    assert (assessment.score, assessment.validity) == (0.0, "valid")


def test_the_harness_budget_ends_in_a_scored_timeout(tmp_path, endpoint, task):
    command = (task.solution / "solve.sh").read_text().splitlines()[-1]
    result = run(tmp_path, order(endpoint(shell(command), shell("sleep 60")), task.folder, harness_budget_s=1.5))
    assert isinstance(result.outcome, HarnessTimeout)
    assert evaluate(task, Path(result.artifact_ref), tmp_path / "eval", 30.0).score == 1.0


def test_processes_left_behind_die_with_the_sandbox(tmp_path, endpoint, task):
    mark = f"3{os.getpid()}.25"
    result = run(tmp_path, order(endpoint(shell(f"setsid nohup sleep {mark} > /dev/null 2>&1 & disown; echo ok"), DONE), task.folder))
    assert isinstance(result.outcome, Completed)
    alive = [p for p in Path("/proc").iterdir() if p.name.isdigit() and mark.encode() in (p / "cmdline").read_bytes().split(b"\0")]
    assert alive == []


def test_sigterm_reaches_the_harness_before_the_kill(tmp_path, endpoint, task):
    trap = "exec > /dev/null 2>&1; trap 'echo saved > late.txt; exit' TERM; while true; do sleep 0.05; done"
    result = run(tmp_path, order(endpoint(shell(trap), DONE), task.folder, harness_budget_s=5.0))
    assert isinstance(result.outcome, HarnessTimeout)
    assert (Path(result.artifact_ref) / "workspace" / "late.txt").read_text() == "saved\n"


def test_cancelling_ends_it_and_keeps_nothing(tmp_path, endpoint, task):
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    started = time.monotonic()
    result = run(tmp_path, order(endpoint(shell("sleep 60")), task.folder), cancelled)
    assert isinstance(result.outcome, Cancelled)
    assert result.artifact_ref is None
    assert time.monotonic() - started < 30


def test_c25_a_dead_endpoint_is_no_zero(tmp_path, endpoint, task):
    result = run(tmp_path, order(endpoint(529), task.folder))
    assert isinstance(result.outcome, InfrastructureFailed)
    assert "529" in result.detail
    assert result.artifact_ref is not None


def test_c25_a_missing_proxy_socket_is_no_zero(tmp_path, endpoint, task):
    proxy = endpoint(DONE)
    launch = order(proxy, task.folder, proxy_socket=str(tmp_path / "nowhere.sock"))
    result = run(tmp_path, launch)
    assert isinstance(result.outcome, InfrastructureFailed)
    assert result.artifact_ref is None


def test_c25_a_refusing_sandbox_is_no_zero(tmp_path, endpoint, task, monkeypatch):
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    result = run(tmp_path, order(endpoint(DONE), task.folder))
    assert isinstance(result.outcome, InfrastructureFailed)
    assert "namespace" in result.detail


def test_a_transient_endpoint_error_is_retried(tmp_path, endpoint, task):
    proxy = endpoint(503, 429, DONE)
    assert run(tmp_path, order(proxy, task.folder)).outcome == Completed("")
    assert len(proxy.requests) == 3


def test_a_refused_key_is_not_retried(tmp_path, endpoint, task):
    proxy = endpoint(401)
    assert isinstance(run(tmp_path, order(proxy, task.folder)).outcome, InfrastructureFailed)
    assert len(proxy.requests) == 1


def test_the_turn_limit_ends_it(tmp_path, endpoint, task):
    proxy = endpoint(shell("ls"))
    result = run(tmp_path, order(proxy, task.folder, max_turns=3))
    assert isinstance(result.outcome, Completed)
    assert len(proxy.requests) == 3


def test_the_overall_budget_discards(tmp_path, endpoint, task):
    result = run(tmp_path, order(endpoint(shell("sleep 30")), task.folder, harness_budget_s=20.0, overall_budget_s=0.8))
    assert isinstance(result.outcome, HarnessTimeout | OverallTimeout)
    assert result.ended_s - result.started_s < 15


def test_malformed_tool_calls_are_answered(tmp_path, endpoint, task):
    calls = [
        {"type": "tool_use", "id": "a", "name": "shell", "input": {}},
        {"type": "tool_use", "id": "b", "name": "fly", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "c", "name": "read", "input": {"path": 3}},
        {"type": "tool_use", "id": "d", "name": "write", "input": {"path": "out.txt", "content": "x"}},
        {"type": "tool_use", "id": "e", "name": "read", "input": {"path": "out.txt"}},
        {"type": "tool_use", "id": "f", "name": "read", "input": {"path": "/nowhere"}},
    ]
    proxy = endpoint(calls, DONE)
    assert run(tmp_path, order(proxy, task.folder)).outcome == Completed("")
    results = proxy.requests[1]["messages"][2]["content"]
    assert [r["tool_use_id"] for r in results] == list("abcdef")
    assert [r["is_error"] for r in results] == [True, True, True, False, False, True]
    assert results[4]["content"] == "x"


def test_the_sandbox_sees_no_network_and_no_host_files(tmp_path, endpoint, task):
    probe = (
        "cat /proc/net/dev | grep -c : ; ls /root 2>/dev/null | grep -v pyenv; ls -d /work /home /var /tests /logs 2>/dev/null;"
        " ls /proc | grep -c '^[0-9]'; touch /usr/x 2>&1 | grep -o 'Read-only'"
    )
    proxy = endpoint(shell(probe), DONE)
    run(tmp_path, order(proxy, task.folder))
    interfaces, processes, read_only = proxy.requests[1]["messages"][2]["content"][0]["content"].split("\n")
    assert interfaces == "1"
    assert int(processes) < 10
    assert read_only == "Read-only"


def test_a_missing_task_or_unknown_names_are_input_errors(tmp_path, endpoint, task):
    proxy = endpoint(DONE)
    for changes, words in (
        ({"task_path": str(tmp_path / "no")}, "no such task"),
        ({"harness": "other"}, "rollout.harness"),
        ({"sandbox": "jail"}, "rollout.sandbox"),
        ({"harness": "claude-code"}, "npm install"),
    ):
        with pytest.raises(InputError, match=words):
            if changes.get("harness") == "claude-code":
                os.environ["GYRE_CLAUDE_CODE"] = "no-such-program"
            run(tmp_path, order(proxy, task.folder, **changes))
    with pytest.raises(InputError, match="colour"):
        LaunchOrder.from_json({**order(proxy, task.folder).as_json(), "colour": 1})


def test_orders_survive_json(endpoint, task):
    launch = order(endpoint(DONE), task.folder)
    assert LaunchOrder.from_json(json.loads(json.dumps(launch.as_json()))) == launch


def test_every_shipped_task_loads():
    train, heldout = find_tasks(TASK), find_tasks(Path("data/tasks/heldout"))
    assert len(train) >= 48
    assert len(heldout) >= 16
    assert {t.task_id for t in train}.isdisjoint({t.task_id for t in heldout})
    kinds = {(t.metadata["kind"], t.task_id.split("-")[2]) for t in train}
    assert kinds.isdisjoint({(t.metadata["kind"], t.task_id.split("-")[2]) for t in heldout})
    assert load_task(train[0].folder).image
