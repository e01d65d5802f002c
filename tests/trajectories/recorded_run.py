"""A small recorded run whose every number can be worked out by hand; written with the real writers, partly left open.

B = 2 groups of N = 2 executions, mu = 1, phi = 1/2: three groups at version 0, then two per publication. Two steps are done.
Times are seconds after T0.
"""

from contextlib import ExitStack
from pathlib import Path

from random_trees import record
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.admission import admission_rows, admit_nodes, nodes_of_records
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan

T0 = 1_700_000_000.0
CONFIG = """
name: tiny
scheduling: {groups_per_batch: 2, executions_per_group: 2, steps_per_burst: 1, extra_dispatch: 0.5, bursts: 2}
cells: {count: 2, capacity: 4}
training: {max_trajectories: 2}
"""


def write_recorded_run(folder: Path, close: bool = True, url: str = "") -> RunLayout:
    """Write it under `folder/tiny`. With `close` everything is sealed, else the last rows of each table stay in open segments."""
    layout = RunLayout(folder / "tiny")
    layout.root.mkdir(parents=True)
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.parent.mkdir()
    Tokenizer(WordLevel({f"word{number}": number for number in range(12)}, unk_token="word0")).save(str(tokenizer))
    layout.config.write_text(CONFIG + f"model: {{path: '{tokenizer.parent}'}}\n" + (f"storage: {{url: '{url}'}}\n" if url else ""))
    with ExitStack() as stack:
        writers = {table: SegmentWriter(layout, table, "proxy-0" if table == "requests" else "coordinator") for table in SCHEMAS}
        for table, rows in _rows().items():
            first = len(rows) // 2
            writers[table].append(rows[:first])
            writers[table].seal()
            writers[table].append(rows[first:])
        if close:
            for writer in writers.values():
                stack.callback(writer.close)
    layout_writers[layout.root] = writers
    return layout


layout_writers: dict[Path, dict[str, SegmentWriter]] = {}
"""Writers of runs that were left open: while they live, so do their open segments."""


def tree_of_g1() -> list[RequestRecord]:
    """Main agent with a tool result, a sub-agent of two calls, a compaction, and the main agent after it; one retry that was given up."""
    e = "g00001-00"
    return [
        record(0, execution=e, n_input=6, n_output=4),
        record(1, 0, execution=e, n_input=2, n_output=3, spans=[VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)], reroutes=1, attempts=2,
               engine_ids=["cell-1", "standalone-0"]),
        record(2, execution=e, n_input=3, n_output=2, role_class="sub_task", agent_id="explore", branch_reason="root"),
        record(3, 2, execution=e, n_input=1, n_output=2, role_class="sub_task", agent_id="explore"),
        record(4, 1, execution=e, n_input=1, n_output=5, role_class="main_summary", branch_reason="compaction"),
        record(5, execution=e, n_input=5, n_output=2, branch_reason="root"),
        record(6, 5, execution=e, n_input=1, n_output=1, branch_reason="retry", trainable=False, untrainable_reason="given up"),
    ]  # fmt: skip


def records_of(execution: str) -> list[RequestRecord]:
    if execution == "g00001-00":
        return tree_of_g1()
    group = int(execution[1:6])
    version = _dispatch_version(group)
    return [
        record(
            place,
            place - 1 if place else None,
            execution=execution,
            n_input=4,
            n_output=2 + place,
            spans=[VersionSpan(version, 0, 2 + place)],
        )
        for place in range(1 + group % 2)
    ]


SETTLED = {
    # outcome, score, validity, launched, ended, settled
    "g00001-00": ("Completed", 1.0, "valid", 0, 20, 22),
    "g00001-01": ("Completed", 0.0, "valid", 0, 10, 11),
    "g00002-00": ("Completed", 0.5, "valid", 1, 12, 14),
    "g00002-01": ("HarnessTimeout", 0.5, "valid", 1, 31, 33),
    "g00003-00": ("OverallTimeout", None, "unresolved", 2, 30, 50),
    "g00003-01": ("Completed", 1.0, "valid", 2, 20, 21),
    "g00004-00": ("InfrastructureFailed", None, "unresolved", 60, 61, 61),
    "g00004-01": ("Completed", 1.0, "valid", 60, 70, 72),
}
CONSUMED = {1: 0, 2: 0, 3: 1, 4: 1}


def _dispatch_version(group: int) -> int:
    return 0 if group <= 3 else (group - 2) // 2


def _group_row(group: int, status: str, at: float) -> dict:
    scores = [score for name, (_, score, validity, *_) in SETTLED.items() if name.startswith(f"g{group:05d}") and validity == "valid"]
    settled = [row[5] for name, row in SETTLED.items() if name.startswith(f"g{group:05d}")]
    step = CONSUMED.get(group) if status == "consumed" else None
    return {
        "recorded_s": T0 + at,
        "group_id": f"g{group:05d}",
        "task_id": f"task-{(group - 1) % 3}",
        "status": status,
        "dispatch_version": _dispatch_version(group),
        "consumed_step": step,
        "consumed_version": step,
        "staleness": None if step is None else step - _dispatch_version(group),
        "executions": 2,
        "valid_executions": len(scores) if step is not None else 0,
        "rewards": scores if step is not None else [],
        "mean_reward": sum(scores) / len(scores) if step is not None else None,
        "dispatched_s": T0 + 40 * _dispatch_version(group),
        "ready_s": T0 + max(settled) if settled else None,
        "consumed_s": None if step is None else T0 + 40 * (step + 1),
    }


def _rows() -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {table: [] for table in SCHEMAS}
    for group in range(1, 8):
        rows["groups"].append(_group_row(group, "queued", 40 * _dispatch_version(group)))
    rows["groups"] += [_group_row(group, "consumed", 40 * (step + 1)) for group, step in CONSUMED.items()]
    rows["groups"].append(_group_row(5, "running", 70))
    for name, (outcome, score, validity, launched, ended, settled) in SETTLED.items():
        group = int(name[1:6])
        common = {
            "execution_id": name,
            "group_id": name[:6],
            "task_id": f"task-{(group - 1) % 3}",
            "dispatch_version": _dispatch_version(group),
            "launched_s": T0 + launched,
            "harness": "builtin",
            "train": True,
            "worker": "worker-0",
        }
        rows["executions"].append(common | {"recorded_s": T0 + launched})
        records = records_of(name) if outcome != "InfrastructureFailed" else []
        rows["requests"] += [
            record_to_row(item)
            | {
                "recorded_s": T0 + launched + 1 + item.sequence,
                "started_s": T0 + launched + item.sequence,
                "ended_s": T0 + launched + item.sequence + 0.5,
            }
            for item in records
        ]
        artifact = "" if outcome == "InfrastructureFailed" else f"artifact-{name}"
        rows["executions"].append(
            common
            | {
                "recorded_s": T0 + settled,
                "outcome": outcome,
                "outcome_detail": "image pull failed" if outcome == "InfrastructureFailed" else None,
                "score": score,
                "validity": validity,
                "artifact_ref": artifact,
                "ended_s": T0 + ended,
                "settled_s": T0 + settled,
                "requests": len(records),
                "output_tokens": sum(len(item.output_ids) for item in records),
            }
        )
        if artifact:
            rows["artifacts"].append(
                {"recorded_s": T0 + ended, "artifact_ref": artifact, "execution_id": name, "kind": "final", "path": f"artifacts/{name}",
                 "digest": f"digest-{name}", "bytes": 100, "files": 2, "created_s": T0 + ended}
            )  # fmt: skip
            tries = 3 if validity == "unresolved" else 2 if name == "g00002-00" else 1
            for attempt in range(1, tries + 1):
                final = attempt == tries and validity == "valid"
                rows["assessments"].append(
                    {"recorded_s": T0 + ended + attempt, "assessment_id": f"{name}-{attempt}", "execution_id": name, "artifact_ref": artifact,
                     "artifact_digest": f"digest-{name}", "attempt": attempt, "designated": final, "evaluator": "tests",
                     "score": score if final else None, "validity": "valid" if final else "unresolved",
                     "detail": "tests passed" if final else "evaluator crashed", "started_s": T0 + ended + attempt - 1,
                     "ended_s": T0 + ended + attempt}
                )  # fmt: skip
        if validity == "valid":
            version = _dispatch_version(group)
            admission = admit_nodes(nodes_of_records(records), run_id="tiny", execution_id=name, version=version, max_trajectories=2)
            rows["admissions"] += [
                row | {"recorded_s": T0 + settled}
                for row in admission_rows(admission, execution_id=name, version=version, max_trajectories=2)
            ]
    for step in (0, 1):
        start = T0 + 34 + 40 * step
        rows["micro_steps"] += [
            {"recorded_s": start + 2 + cell, "micro_step_id": f"{step}-m{cell}", "step": step, "status": "done", "cell": cell, "claims": 1, "rows": 1,
             "trajectories": 2, "tokens": 30, "target_tokens": 12, "padding_tokens": 10, "queued_s": start, "claimed_s": start + 1,
             "done_s": start + 2 + cell, "forward_backward_s": 1.0 + cell}
            for cell in (0, 1)
        ]  # fmt: skip
        rows["train_steps"].append(
            {"recorded_s": start + 6, "step": step, "burst": step, "final": True, "cells": 2 - step, "groups": 2, "executions": 4 - 2 * step,
             "trajectories": 5 - 2 * step, "micro_steps": 2, "tokens": 60, "target_tokens": 24, "padding_tokens": 20, "max_trajectories": 2,
             "mean_reward": 0.5 + step / 2, "loss": -0.25, "grad_norm": 0.5 + step, "learning_rate": 1e-6, "gate_fraction_executions": 0.25 * step,
             "gate_fraction_tokens": 0.125 * step, "kl": 0.001, "logprob_mismatch_mean": 1e-5, "logprob_mismatch_max": 1e-4, "entropy": 1.5,
             "ratio_mean": 1.0, "staleness_mean": 0.5 * step, "opened_s": start, "trained_s": start + 4, "updated_s": start + 6, "duration_s": 6.0,
             "seconds": {"forward_backward": 4.0, "reduce": 0.5, "optimizer": 1.5}}
        )  # fmt: skip
        for cell in (0, 1):
            for direction, begin, length in (("to_training", start + cell, 1.0), ("to_rollout", start + 6, 0.5)):
                late = step == 1 and cell == 1 and direction == "to_training"
                phases = {"drain": 0.25 * length, "load": 0.75 * length}
                rows["transitions"].append(
                    {"recorded_s": begin + length, "transition_id": f"b{step}-c{cell}-{direction}", "cell": cell, "direction": direction, "burst": step,
                     "step": step, "outcome": "failed" if late else "done", "detail": "pull timed out" if late else "", "started_s": begin,
                     "ended_s": begin + length, "duration_s": length, "rerouted_executions": 1 - cell, "rerouted_requests": 1 - cell,
                     "weight_version": step, "weight_bytes": 1000, "water_level": 4 - cell, "phases": phases}
                )  # fmt: skip
            rows["publications"].append(
                {"recorded_s": start + 6.5, "version": step + 1, "engine_id": f"cell-{cell}", "burst": step, "ok": True, "detail": "", "bytes": 2_000_000,
                 "started_s": start + 6, "ended_s": start + 6.5, "duration_s": 0.5, "phases": {"update": 0.5}}
            )  # fmt: skip
    rows["engines"] = [
        {"recorded_s": T0 - 5, "engine_id": f"cell-{cell}", "at_s": T0 - 5.0, "state": "serving", "cell": cell, "weight_version": 0, "capacity": 4,
         "url": f"http://127.0.0.1:{9000 + cell}", "pid": 100 + cell, "device": "cpu", "detail": ""}
        for cell in (0, 1)
    ] + [
        {"recorded_s": T0 + 81, "engine_id": f"cell-{cell}", "at_s": T0 + 81, "state": "serving", "cell": cell, "weight_version": 2, "capacity": 4,
         "url": f"http://127.0.0.1:{9000 + cell}", "pid": 100 + cell, "device": "cpu", "detail": ""}
        for cell in (0, 1)
    ]  # fmt: skip
    return rows
