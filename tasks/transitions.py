"""Role changes of cells: one task run per transition."""

from typing import Any

from prefect import get_run_logger, task

from tasks.connection import coordinator_of


@task(task_run_name="cell {cell} to training", retries=20, retry_delay_seconds=3)
def switch_to_training(run: str, entry_id: str, cell: int) -> dict[str, Any]:
    """Move the cell's executions to other engines, free its engine's memory, pull the core's weights, join the batch."""
    return _switch(run, entry_id)


@task(task_run_name="cell {cell} back to rollout", retries=20, retry_delay_seconds=3)
def return_to_rollout(run: str, entry_id: str, cell: int) -> dict[str, Any]:
    """Restore the cell's engine; it serves again once it holds the published weights."""
    return _switch(run, entry_id)


def _switch(run: str, entry_id: str) -> dict[str, Any]:
    result = coordinator_of(run).perform(entry_id)
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["phases"].items())
    get_run_logger().info(
        "%s in %.2f s (%s); %d executions and %d requests in flight rerouted",
        result["outcome"], result["seconds"], phases, result["rerouted_executions"], result["rerouted_requests"],
    )  # fmt: skip
    return result
