"""Micro-steps: one microbatch of packed rows for each data-parallel rank of a cell, and their form on the wire.

A micro-step either trains (forward and backward) or scores (forward only: it yields the log-ratio sums of executions too long for one
micro-step, see `packing`). Imports no torch: the coordinator makes micro-steps, ranks consume them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from gyre_lib.trajectories.materialisation import TrajectoryRow

Kind = Literal["train", "score"]


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A trajectory row with what the objective needs of its execution."""

    row: TrajectoryRow
    advantage: float
    execution_targets: int
    """T_i: targets of the execution over all its admitted trajectories."""
    log_ratio_sum: float = math.nan
    """Sum of log-ratios over those targets where a scoring pass has found it; NaN: all of them are in this micro-step."""


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One unit of claimed work. `microbatches` has one tuple of rows per data-parallel rank; some may be empty."""

    micro_step_id: str
    step: int
    """The training step, which is also the policy version that is trained from."""
    kind: Kind
    microbatches: tuple[tuple[PlacedRow, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(len(placed.row.token_ids) for rows in self.microbatches for placed in rows)

    def sizes(self) -> dict[str, Any]:
        """What the table micro_steps says about it; `rows` are packed rows, that is microbatches that hold something."""
        placed = [item for rows in self.microbatches for item in rows]
        return {
            "rows": sum(bool(rows) for rows in self.microbatches),
            "trajectories": len(placed),
            "execution_ids": sorted({item.row.execution_id for item in placed}),
            "tokens": self.tokens,
            "target_tokens": sum(int(item.row.targets.sum()) for item in placed),
        }

    @property
    def shared_executions(self) -> list[str]:
        """Executions whose ratio needs a sum over data-parallel ranks, in an order that is the same on all of them."""
        seen: dict[str, set[int]] = {}
        for rank, rows in enumerate(self.microbatches):
            for placed in rows:
                if self.kind == "train" and math.isnan(placed.log_ratio_sum):
                    seen.setdefault(placed.row.execution_id, set()).add(rank)
        return sorted(execution for execution, ranks in seen.items() if len(ranks) > 1)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to claim now; ask again after this many seconds."""

    after_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Closed:
    """No new work will come unless another cell dies.

    A cell with unfinished micro-steps finishes them (the pipeline drains) and asks again; a cell without any is done with the batch.
    """

    executions: int
    """E: executions with a valid reward in the batch, the objective's normaliser."""


class MicroStepSource(Protocol):
    """What a cell's first rank claims from. Over HTTP: 200 with Arrow bytes, 204 with x-gyre-wait-s, 410 with {"executions": E}."""

    def claim(self) -> MicroStep | Wait | Closed: ...

    def done(self, micro_step: MicroStep, stats: Mapping[str, Any]) -> None:
        """Gradients of it are accumulated on the cell. `stats` is JSON-ready; of a scoring micro-step `stats["scores"]` is the result."""


_SCHEMA = pa.schema(
    [
        ("data_rank", pa.int32()),
        ("execution_id", pa.string()),
        ("group_id", pa.string()),
        ("trajectory", pa.int32()),
        ("role_class", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("targets", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
        ("advantage", pa.float64()),
        ("execution_targets", pa.int64()),
        ("log_ratio_sum", pa.float64()),
    ]
)


def to_arrow(micro_step: MicroStep) -> bytes:
    """The micro-step as an Arrow IPC stream of one record batch, a record per row."""
    placed = [(rank, item) for rank, rows in enumerate(micro_step.microbatches) for item in rows]
    rows = [item.row for _, item in placed]
    lengths = [len(row.token_ids) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def lists(name: str, dtype: type) -> pa.Array:
        values = np.concatenate([getattr(row, name) for row in rows]) if rows else np.empty(0)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))

    columns = [
        pa.array([rank for rank, _ in placed], pa.int32()),
        pa.array([row.execution_id for row in rows], pa.string()),
        pa.array([row.group_id for row in rows], pa.string()),
        pa.array([row.trajectory for row in rows], pa.int32()),
        pa.array([row.role_class for row in rows], pa.string()),
        lists("token_ids", np.int32),
        lists("targets", np.bool_),
        lists("logprobs", np.float32),
        lists("versions", np.int32),
        pa.array([row.temperature for row in rows], pa.float64()),
        pa.array([item.advantage for _, item in placed], pa.float64()),
        pa.array([item.execution_targets for _, item in placed], pa.int64()),
        pa.array([item.log_ratio_sum for _, item in placed], pa.float64(), from_pandas=False),
    ]
    about = {
        "micro_step_id": micro_step.micro_step_id,
        "step": str(micro_step.step),
        "kind": micro_step.kind,
        "data_ranks": str(len(micro_step.microbatches)),
    }
    schema = _SCHEMA.with_metadata(about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def from_arrow(data: bytes) -> MicroStep:
    """The inverse of to_arrow. Raises pyarrow.ArrowInvalid for bytes that are not one."""
    with pa.ipc.open_stream(data) as reader:
        about = {key.decode(): value.decode() for key, value in reader.schema.metadata.items()}
        batch = reader.read_next_batch()
    microbatches: list[list[PlacedRow]] = [[] for _ in range(int(about["data_ranks"]))]
    offsets = batch.column("token_ids").offsets.to_numpy()
    flat = {name: batch.column(name).values.to_numpy(zero_copy_only=False) for name in ("token_ids", "targets", "logprobs", "versions")}
    scalars = batch.select([name for name in batch.schema.names if name not in flat]).to_pylist()
    for number, record in enumerate(scalars):
        part = {name: values[offsets[number] : offsets[number + 1]] for name, values in flat.items()}
        row = TrajectoryRow(
            execution_id=record["execution_id"],
            group_id=record["group_id"],
            trajectory=record["trajectory"],
            role_class=record["role_class"],
            temperature=record["temperature"],
            **part,
        )
        placed = PlacedRow(row, record["advantage"], record["execution_targets"], record["log_ratio_sum"])
        microbatches[record["data_rank"]].append(placed)
    return MicroStep(about["micro_step_id"], int(about["step"]), about["kind"], tuple(map(tuple, microbatches)))
