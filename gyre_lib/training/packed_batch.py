"""One data-parallel rank's microbatch as tensors: rows one after another, no padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre_lib.training.micro_steps import MicroStep


@dataclass(frozen=True)
class PackedBatch:
    """T tokens in R rows, n targets, E executions (those of this microbatch, in `execution_ids`)."""

    token_ids: Tensor
    """int64[T]"""
    bounds: Tensor
    """int32[R + 1]: where rows begin and end."""
    longest: int
    positions: Tensor
    """int64[n]: position of each target; the state at position - 1 predicts it."""
    logprobs: Tensor
    """float32[n]: behaviour log-probs."""
    versions: Tensor
    """int64[n]: policy version that emitted the target."""
    temperature: Tensor
    """float32[n]"""
    execution: Tensor
    """int64[n]: index of the target's execution."""
    role: Tensor
    """int64[n]: index into `roles`."""
    roles: tuple[str, ...]
    execution_ids: tuple[str, ...]
    advantage: Tensor
    """float32[E]"""
    execution_targets: Tensor
    """float64[E]: T_i, over all trajectories of the execution."""
    log_ratio_sum: Tensor
    """float64[E]: from a scoring pass, or NaN."""


def pack(micro_step: MicroStep, data_rank: int, device: torch.device) -> PackedBatch | None:
    """The microbatch of `data_rank`, or None when it has no rows."""
    placed = micro_step.microbatches[data_rank]
    if not placed:
        return None
    rows = [item.row for item in placed]
    lengths = np.array([len(row.token_ids) for row in rows])
    of_row = {item.row.execution_id: item for item in placed}
    execution_ids, roles = tuple(of_row), tuple(dict.fromkeys(row.role_class for row in rows))
    targets = np.concatenate([row.targets for row in rows])
    per_target = np.repeat(np.arange(len(rows)), lengths)[targets]

    def by_row(values: list, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.array(values)[per_target], dtype=dtype, device=device)

    def by_token(name: str, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate([getattr(row, name) for row in rows])[targets], dtype=dtype, device=device)

    return PackedBatch(
        token_ids=torch.as_tensor(np.concatenate([row.token_ids for row in rows]).astype(np.int64), device=device),
        bounds=torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device=device),
        longest=int(lengths.max()),
        positions=torch.as_tensor(np.flatnonzero(targets), device=device),
        logprobs=by_token("logprobs", torch.float32),
        versions=by_token("versions", torch.int64),
        temperature=by_row([row.temperature for row in rows], torch.float32),
        execution=by_row([execution_ids.index(row.execution_id) for row in rows], torch.int64),
        role=by_row([roles.index(row.role_class) for row in rows], torch.int64),
        roles=roles,
        execution_ids=execution_ids,
        advantage=torch.tensor([item.advantage for item in of_row.values()], device=device),
        execution_targets=torch.tensor([item.execution_targets for item in of_row.values()], dtype=torch.float64, device=device),
        log_ratio_sum=torch.tensor([item.log_ratio_sum for item in of_row.values()], dtype=torch.float64, device=device),
    )


def token_count(micro_step: MicroStep, data_rank: int) -> int:
    """Tokens of that microbatch: every pipeline stage derives the shape of what it receives from it."""
    return sum(len(item.row.token_ids) for item in micro_step.microbatches[data_rank])
