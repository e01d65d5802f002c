"""Scoring preserved work: one task run per evaluation, retried on the same artifact within the execution's overall budget."""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from prefect import task

from gyre_lib.config.run_config import RunConfig, load_config
from gyre_lib.evaluation.evaluators import Assessment, evaluate
from gyre_lib.rollout.tasks import load_task
from gyre_lib.trajectories.store import connect
from tasks.connection import coordinator_of, layout_of

AT_ONCE = 8
_RUNNING = threading.BoundedSemaphore(AT_ONCE)
"""Evaluations that one flow process runs at the same time; the others wait with their artifact."""


class Unresolved(RuntimeError):
    """The evaluator gave no valid assessment; the artifact is still there, so it can be tried again."""


@task(task_run_name="evaluate {execution_id}", retries=2, retry_delay_seconds=1.0)
def evaluate_execution(run: str, execution_id: str) -> dict[str, Any]:
    """Score the execution's artifact in a fresh sandbox and report the assessment. Raises Unresolved when there is no valid one."""
    client, layout = coordinator_of(run), layout_of(run)
    execution = client.execution(execution_id)
    if execution["stage"] == "settled":
        return {"score": execution["score"], "validity": execution["validity"]}
    config = load_config(layout.config)
    budget_s = min(config.evaluation.timeout_s, execution["deadline_s"] - time.time())
    if budget_s <= 0:
        return {"score": None, "validity": "unresolved"}
    assessment = _assess(config, execution["task_path"], layout.artifacts / execution["artifact_ref"], budget_s)
    names = ("score", "validity", "detail", "assessed_digest", "started_s", "ended_s")
    client.assessed(execution_id, {name: getattr(assessment, name) for name in names})
    if assessment.validity != "valid":
        raise Unresolved(assessment.detail)
    return {"score": assessment.score, "validity": assessment.validity}


@task(task_run_name="assess {execution_id} again", retries=1, retry_delay_seconds=1.0)
def reassess_execution(run: str, execution_id: str) -> dict[str, Any]:
    """Score a preserved artifact once more. What the run has recorded stays as it is."""
    layout = layout_of(run)
    config = load_config(layout.config)
    with connect(layout.root) as database:
        found = database.execute("SELECT task_id, artifact_ref, score FROM executions WHERE execution_id = ?", [execution_id]).fetchone()
    if found is None or not found[1]:
        raise LookupError(f"execution {execution_id}: no preserved artifact")
    task_id, artifact_ref, recorded = found
    folders = (Path(config.rollout.tasks), Path(config.rollout.heldout_tasks))
    task_path = next((folder / task_id for folder in folders if (folder / task_id).is_dir()), None)
    if task_path is None:
        raise LookupError(f"execution {execution_id}: task {task_id} is in none of the configured folders")
    assessment = _assess(config, str(task_path), layout.artifacts / artifact_ref, config.evaluation.timeout_s)
    return {"execution": execution_id, "task": task_id, "recorded": recorded, "score": assessment.score, "validity": assessment.validity}


def _assess(config: RunConfig, task_path: str, artifact_dir: Path, budget_s: float) -> Assessment:
    task_folder = load_task(Path(task_path), config.rollout.task_format)
    with _RUNNING, tempfile.TemporaryDirectory(prefix="gyre-evaluation-") as work_dir:
        return evaluate(task_folder, artifact_dir, Path(work_dir), budget_s, sandbox=config.rollout.sandbox)
