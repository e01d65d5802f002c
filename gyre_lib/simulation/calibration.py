"""A workload file from a live run's tables, so that the simulator answers for the machine and the tasks that were really run.

Durations are kept as recorded queries (harness seconds, evaluation seconds of each execution), so no law is assumed. Engine speed under
load cannot be told from one run's durations: `load_share` is taken from the shipped workload unless the run is compared at several loads.
"""

from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig, load_config
from gyre_lib.simulation.experiments import finding
from gyre_lib.simulation.workload import Workload, load_workload, save_workload

_EXECUTIONS = """
    SELECT group_id, ended_s - launched_s AS harness_s, greatest(0, settled_s - ended_s) AS evaluation_s, outcome
    FROM executions WHERE train AND launched_s IS NOT NULL AND ended_s IS NOT NULL AND settled_s IS NOT NULL ORDER BY execution_id
"""
_STEPS = """
    SELECT (SELECT sum(forward_backward_s) FROM micro_steps WHERE status = 'done'), count(*),
           avg(updated_s - trained_s), avg(groups), avg(micro_steps)
    FROM train_steps WHERE updated_s IS NOT NULL
"""
_PUBLICATION = """
    SELECT avg(last - first) FROM (SELECT max(ended_s) AS last, min(started_s) AS first FROM publications GROUP BY version)
"""


def calibrate(layout: RunLayout, output: Path) -> list[dict[str, Any]]:
    """Write the workload file and return what went into it. Raises InputError where the run has nothing to learn from."""
    from gyre_lib.trajectories.store import connect

    config = load_config(layout.config)
    base = load_workload("nl2repo-122b").model_dump(mode="json")
    with connect(layout.root) as tables:
        executions = tables.execute(_EXECUTIONS).fetchall()
        ((busy_s, steps, update_s, groups, micro_steps),) = tables.execute(_STEPS).fetchall()
        moves = dict(
            tables.execute("SELECT direction, avg(duration_s) FROM transitions WHERE outcome = 'done' GROUP BY direction").fetchall()
        )
        publication = tables.execute(_PUBLICATION).fetchall()[0][0]
    if len(executions) < 2 or not steps or not busy_s:
        raise InputError(f"run {layout.run_id}: no finished executions and training steps to calibrate from")
    base["name"] = layout.run_id
    base["reading"] = f"Made from the tables of run {layout.run_id}: {len(executions)} executions, {steps} training steps."
    base["cluster"] = _cluster(config, moves, publication)
    base["execution"] |= _executions(config, executions)
    base["engine"]["reroute_s"] = 0.0
    base["training"] |= {
        "node_seconds_per_step": busy_s / steps,
        "update_s": max(0.0, update_s or 0.0),
        "micro_steps_per_group": max(1, round((micro_steps or groups) / groups)),
        "drain_s": 0.0,
    }
    base["batch"] = {
        "groups_per_batch": config.scheduling.groups_per_batch,
        "executions_per_group": config.scheduling.executions_per_group,
        "supply_fraction": config.scheduling.supply_fraction,
        "supply_hold_s": config.scheduling.supply_hold_s,
    }
    workload = Workload.model_validate(base)
    save_workload(workload, output)
    load_workload(output)
    return [
        finding("executions", len(executions)),
        finding("queries", len(workload.execution.recorded)),
        finding("training steps", steps),
        finding("cell seconds of training per step", workload.training.node_seconds_per_step),
        finding("mean to_training, s", workload.cluster.to_training_s),
        finding("mean to_rollout, s", workload.cluster.to_rollout_s),
        finding("file", str(output)),
    ]


def _cluster(config: RunConfig, moves: dict[str, float], publication_s: float | None) -> dict[str, Any]:
    """One cell counts as one node."""
    return {
        "nodes": config.cells.count,
        "nodes_per_cell": 1,
        "nodes_per_rank": 1,
        "concurrency_per_node": config.cells.capacity,
        "to_training_s": moves.get("to_training", 0.0),
        "to_rollout_s": moves.get("to_rollout", 0.0),
        "publication_s": publication_s or 0.0,
    }


def _executions(config: RunConfig, rows: list[tuple[str, float, float, str]]) -> dict[str, Any]:
    recorded: dict[str, list[tuple[float, float]]] = {}
    for group, harness_s, evaluation_s, outcome in rows:
        if outcome in ("Completed", "HarnessTimeout", "OverallTimeout"):
            recorded.setdefault(group, []).append((max(0.001, harness_s), evaluation_s))
    if not recorded:
        raise InputError("executions: none completed or timed out, so there are no durations to record")
    failed = sum(outcome == "InfrastructureFailed" for *_, outcome in rows)
    return {
        "harness_limit_s": config.rollout.harness_budget_s,
        "overall_limit_s": config.rollout.overall_budget_s,
        "stuck_rate": 0.0,
        "infrastructure_failure_rate": failed / len(rows),
        "recorded": [tuple(executions) for executions in recorded.values()],
    }
