"""The rows that the coordinator writes: one method per fact, columns as in `trajectories.schemas`."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig
from gyre_lib.coordination.routing_table import Engine
from gyre_lib.coordination.trajectory_buffer import Execution, Group, TrajectoryBuffer
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.segments import SegmentWriter

WRITER = "coordinator"


class Tables:
    """Every table but `requests` (the proxies write that one)."""

    def __init__(self, layout: RunLayout, config: RunConfig) -> None:
        self._layout = layout
        self._config = config
        segment_bytes = config.storage.segment_mib << 20
        self._writers = {
            table: SegmentWriter(layout, table, WRITER, segment_bytes=segment_bytes) for table in SCHEMAS if table != "requests"
        }

    def append(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        """Durable on return."""
        now = time.time()
        stamped = [{"run_id": self._layout.run_id, "recorded_s": now, **row} for row in rows]
        if stamped:
            self._writers[table].append(stamped)

    def execution(self, execution: Execution) -> None:
        row = {
            "execution_id": execution.execution_id,
            "group_id": execution.group_id,
            "task_id": execution.task_id,
            "dispatch_version": execution.dispatch_version,
            "outcome": execution.outcome,
            "outcome_detail": execution.outcome_detail,
            "score": execution.score,
            "validity": execution.validity,
            "artifact_ref": execution.artifact_ref,
            "launched_s": execution.launched_s,
            "ended_s": execution.ended_s,
            "settled_s": execution.settled_s,
            "requests": execution.requests,
            "output_tokens": execution.output_tokens,
            "harness": self._config.rollout.harness,
            "train": execution.train,
            "worker": execution.worker_id,
        }
        self.append("executions", [row])

    def group(self, group: Group, buffer: TrajectoryBuffer, consumed_s: float | None = None) -> None:
        valid = buffer.valid_executions(group.group_id)
        rewards = [e.score for e in sorted(valid, key=lambda e: e.execution_id) if e.score is not None]
        consumed = group.status == "consumed" and group.step is not None
        row = {
            "group_id": group.group_id,
            "task_id": group.task_id,
            "status": "running" if group.status == "rolling" else group.status,
            "dispatch_version": group.dispatch_version,
            "consumed_step": group.step if consumed else None,
            "consumed_version": group.step if consumed else None,
            "staleness": group.step - group.dispatch_version if consumed and group.step is not None else None,
            "executions": len(group.executions),
            "valid_executions": len(valid),
            "rewards": rewards,
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
            "dispatched_s": group.dispatched_s,
            "ready_s": group.ready_s or None,
            "consumed_s": consumed_s,
        }
        self.append("groups", [row])

    def artifact(self, execution: Execution, digest: str) -> None:
        folder = self._layout.artifacts / execution.artifact_ref
        files = [path for path in folder.rglob("*") if path.is_file()]
        row = {
            "artifact_ref": execution.artifact_ref,
            "execution_id": execution.execution_id,
            "kind": "final",
            "digest": digest,
            "path": str(folder.relative_to(self._layout.root)),
            "bytes": sum(path.stat().st_size for path in files),
            "files": len(files),
            "created_s": execution.ended_s,
        }
        self.append("artifacts", [row])

    def assessment(self, execution: Execution, assessment: dict[str, Any], designated: bool = True) -> None:
        row = {
            "assessment_id": f"{execution.execution_id}-{execution.evaluation_attempts}",
            "execution_id": execution.execution_id,
            "artifact_ref": execution.artifact_ref,
            "artifact_digest": assessment.get("assessed_digest", ""),
            "attempt": execution.evaluation_attempts,
            "designated": designated and assessment["validity"] == "valid",
            "evaluator": assessment.get("evaluator", "tests"),
            **{name: assessment.get(name) for name in ("score", "validity", "detail", "started_s", "ended_s")},
        }
        self.append("assessments", [row])

    def engines(self, engines: list[Engine], state: str, moved: int) -> None:
        """`state` is a state of the table, or the reason why the engine was lost."""
        known = state if state in ("serving", "training", "draining", "started", "stopped") else "lost"
        at_s = time.time()
        rows = [
            {
                "engine_id": engine.engine_id,
                "at_s": at_s,
                "state": known,
                "cell": engine.cell,
                "weight_version": engine.weight_version,
                "capacity": engine.capacity,
                "url": engine.url,
                "device": self._config.cells.device,
                "detail": f"{moved} executions moved" if known == state else state,
            }
            for engine in engines
        ]
        self.append("engines", rows)

    def seal_journal(self, closed: Path) -> None:
        """Keep a finished burst's journal beside the other sealed segments, as Parquet."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from gyre_lib.coordination.journal import read_entries

        entries = [entry for entry in read_entries(closed) if "event" in entry]
        table = pa.table(
            {
                "seq": [entry["seq"] for entry in entries],
                "now": [entry["now"] for entry in entries],
                "event": [entry["event"]["kind"] for entry in entries],
                "actions": [[action["kind"] for action in entry["actions"]] for entry in entries],
            }
        )
        target = closed.with_suffix(".parquet")
        partial = target.with_suffix(".partial")
        pq.write_table(table, partial, compression="zstd")
        partial.rename(target)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
