"""Executable checks: the task's own tests over a copy of the preserved artifact, in a fresh sandbox without network."""

import shutil
import threading
import time
from pathlib import Path

from gyre_lib.config.errors import InputError
from gyre_lib.evaluation.assessments import Assessment
from gyre_lib.evaluation.rewards import NoReward, read_reward
from gyre_lib.rollout.artifacts import copy_tree, digest_tree, read_manifest
from gyre_lib.rollout.sandboxes.choice import sandbox_named
from gyre_lib.rollout.sandboxes.protocol import Sandbox, SandboxCommand, SandboxUnavailable
from gyre_lib.rollout.tasks import Task

NEVER = threading.Event()


def evaluate(
    task: Task, artifact_dir: Path, work_dir: Path, timeout_s: float, sandbox: str = "bubblewrap", cancelled: threading.Event = NEVER
) -> Assessment:
    """Score one artifact. `work_dir` is scratch space (removed afterwards but for verifier.log).

    Whatever goes wrong with the evaluation itself (sandbox, copy, verifier, time limit) is `unresolved` with the reason, to be tried
    again on the same artifact; nothing about how or how long the execution ran enters the score. Raises InputError for bad names.
    """
    started = time.time()
    box = sandbox_named(sandbox)
    digest = ""
    try:
        digest = read_manifest(artifact_dir).digest
        score = _score(task, artifact_dir, digest, work_dir, min(timeout_s, task.verifier_timeout_s), box, cancelled)
        return Assessment(score, "valid", "", digest, started, time.time())
    except (NoReward, SandboxUnavailable, OSError, InputError) as error:
        return Assessment(None, "unresolved", f"{type(error).__name__}: {error}", digest, started, time.time())
    finally:
        for part in ("workspace", "logs"):
            shutil.rmtree(work_dir / part, ignore_errors=True)


def _score(
    task: Task, artifact_dir: Path, digest: str, work_dir: Path, timeout_s: float, box: Sandbox, cancelled: threading.Event
) -> float:
    workspace, logs = work_dir / "workspace", work_dir / "logs"
    for part in (workspace, logs):
        shutil.rmtree(part, ignore_errors=True)
    copy_tree(artifact_dir / "workspace", workspace)
    found = digest_tree(workspace)[0]
    if found != digest:
        raise NoReward(f"the artifact has changed since it was preserved: {found[:12]} is not {digest[:12]}")
    verifier_logs = logs / "verifier"
    verifier_logs.mkdir(parents=True)
    command = SandboxCommand(
        argv=task.test_command,
        workspace=workspace,
        output=work_dir / "verifier.log",
        workdir=task.workdir,
        read_only={"/tests": task.tests},
        writable={"/logs": logs},
        image=box.image_of(task),
    )
    end = box.run(command, timeout_s, cancelled)
    if end.kind != "exited":
        raise NoReward(f"the verifier was stopped: {end.kind} ({timeout_s:g} s)")
    return read_reward(verifier_logs, end.code)
