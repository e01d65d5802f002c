"""Dispatching groups and watching them roll out: one task run per dispatch and per group."""

import time
from typing import Any

from prefect import get_run_logger, task
from prefect.states import Completed, State

from tasks.connection import coordinator_of

POLL_S = 1.0


@task(task_run_name="dispatch {count} groups at version {version}", retries=20, retry_delay_seconds=3)
def dispatch(run: str, entry_id: str, count: int, version: int) -> dict[str, Any]:
    """Enter groups into the queue; their executions launch as capacity allows."""
    result = coordinator_of(run).perform(entry_id)
    for group_id, query in zip(result["groups"], result["queries"], strict=True):
        get_run_logger().info("%s: query %s", group_id, query)
    return result


@task(task_run_name="roll out group {group_id}", retries=20, retry_delay_seconds=3)
def roll_out_group(run: str, group_id: str, burst: int) -> State[Any]:
    """Follow one group until its rewards are settled, or until the burst ends and the next one carries it on."""
    client = coordinator_of(run)
    while True:
        group = client.group(group_id)
        if group["status"] != "rolling":
            scores = ", ".join(f"{score:g}" for score in group["scores"])
            return Completed(name=group["status"].capitalize(), message=f"{len(group['scores'])} valid rewards: {scores}")
        if client.state()["burst"] > burst:
            message = f"{group['settled']} of {len(group['executions'])} settled; the next burst goes on"
            return Completed(name="CarriedOver", message=message)
        time.sleep(POLL_S)
