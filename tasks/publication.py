"""Publishing a policy version to every engine."""

from typing import Any

from prefect import get_run_logger, task

from tasks.connection import coordinator_of


@task(task_run_name="publish version {version}", retries=20, retry_delay_seconds=3)
def publish(run: str, entry_id: str, version: int) -> dict[str, Any]:
    """Send the core's weights to all rollout engines; each then serves exactly this version."""
    result = coordinator_of(run).perform(entry_id)
    get_run_logger().info("version %d is served by %s", version, ", ".join(result["engines"]))
    return result
