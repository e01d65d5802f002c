"""One training step as a task run, with a progress artifact."""

import time
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.connection import coordinator_of

POLL_S = 0.3
PROGRESS_S = 2.0


@task(task_run_name="train step {step}", retries=20, retry_delay_seconds=3)
def train_step(run: str, entry_id: str, step: int) -> dict[str, Any]:
    """Open the batch, follow it while cells stream it, take the optimizer step; done when every cell of the prefix has the new weights."""
    client = coordinator_of(run)
    logger = get_run_logger()
    artifact = create_progress_artifact(0.0, key=f"{run}-step-{step}", description=f"groups of step {step} trained")
    shown_s = time.monotonic()
    client.begin(entry_id)
    while not (progress := client.step(step))["updated"]:
        if progress["update"]:
            result = client.perform(progress["update"])
            if result.get("superseded"):
                continue
            logger.info(
                "step %d on %d cells: loss %s, gradient norm %s", step, result["cells"], result.get("loss"), result.get("grad_norm")
            )
        elif time.monotonic() - shown_s > PROGRESS_S:
            # Each update costs the server tens of milliseconds, so it is shown seldom.
            update_progress_artifact(artifact, progress=min(95.0, 95.0 * progress["assigned"] / progress["groups"]))
            shown_s = time.monotonic()
        time.sleep(POLL_S)
    client.perform(entry_id)
    update_progress_artifact(artifact, progress=100.0)
    return {"step": step}
