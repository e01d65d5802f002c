"""Evaluation without training: benchmark a published policy on held-out tasks, or score preserved work again."""

import math
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.futures import wait
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from gyre_lib.config.run_config import load_config
from gyre_lib.rollout.tasks import find_tasks
from gyre_lib.trajectories.store import connect
from tasks.connection import coordinator_of, layout_of
from tasks.evaluation import evaluate_execution, reassess_execution

POLL_S = 0.5


def _policy_name() -> str:
    return f"{flow_run.parameters['run']} held-out"


@flow(name="evaluate-policy", flow_run_name=_policy_name, task_runner=ThreadPoolTaskRunner(max_workers=8))
def evaluate_policy(
    run: Annotated[str, Field(title="Run", description="Name of a run whose services are up.")],
    samples: Annotated[int | None, Field(ge=1, title="Samples", description="Executions per held-out task; empty: as configured.")] = None,
    label: Annotated[
        str, Field(title="Label", description="Names this evaluation; the same label on the same version is not run twice.")
    ] = "heldout",
) -> dict[str, Any]:
    """Score the published policy on the held-out tasks. Its executions never enter training.

    Returns version, mean score, its standard error over executions, number of executions.
    """
    client, config = coordinator_of(run), load_config(layout_of(run).config)
    tasks = find_tasks(Path(config.rollout.heldout_tasks), config.rollout.task_format)
    version = client.state()["published_version"]
    started_s = time.time()
    paths = [str(task.folder) for task in tasks]
    executions = client.benchmark(f"{label}-v{version}", paths, samples or config.evaluation.heldout_samples)["executions"]
    futures, waiting = [], set(executions)
    while waiting:
        for execution_id in sorted(waiting):
            stage = client.execution(execution_id)["stage"]
            if stage in ("ended", "settled"):
                waiting.discard(execution_id)
                futures.append(evaluate_execution.submit(run, execution_id))
        time.sleep(POLL_S)
    wait(futures)
    results = [client.execution(execution_id) for execution_id in executions]
    scores = [result["score"] for result in results if result["validity"] == "valid"]
    if not scores:
        raise RuntimeError(f"evaluate-policy {label}: none of {len(executions)} executions has a valid score")
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    summary = {
        "version": version,
        "mean_score": statistics.mean(scores),
        "standard_error": error,
        "executions": len(scores),
        "unresolved": len(executions) - len(scores),
        "seconds": time.time() - started_s,
    }
    rows = [{"task": r["task_id"], "execution": r["execution_id"], "outcome": r["outcome"], "score": r["score"]} for r in results]
    create_table_artifact(rows, key=f"{run}-{label}-v{version}", description=f"Held-out scores of version {version}: {summary}")
    line = f"held-out score of version {version}: {summary['mean_score']:.3f} ± {error:.3f} over {len(scores)} executions"
    get_run_logger().info(line)
    print(line, f"({summary['seconds']:.0f} s)", flush=True)
    return summary


def _again_name() -> str:
    return f"{flow_run.parameters['run']} re-evaluate"


@flow(name="re-evaluate", flow_run_name=_again_name, task_runner=ThreadPoolTaskRunner(max_workers=4))
def re_evaluate(
    run: Annotated[str, Field(title="Run", description="Name of a run; its services need not be up.")],
    sql: Annotated[
        str, Field(title="Which executions", description="SQL over the run's tables that returns a column execution_id.")
    ] = "SELECT execution_id FROM executions WHERE validity = 'unresolved'",
) -> dict[str, Any]:
    """Run the evaluator again over preserved artifacts chosen by SQL. Rewards already used in training do not change."""
    with connect(layout_of(run).root) as database:
        chosen = [row[0] for row in database.execute(f"SELECT execution_id FROM ({sql.rstrip().rstrip(';')})").fetchall()]
    futures = [reassess_execution.submit(run, execution_id) for execution_id in chosen]
    wait(futures)
    rows = [future.result() for future in futures if future.state.is_completed()]
    create_table_artifact(rows, key=f"{run}-re-evaluate", description=f"{len(rows)} of {len(chosen)} artifacts assessed again")
    return {"chosen": len(chosen), "assessed": len(rows)}
