"""The execution ratio s_i and its gate (§12): over all targets of an execution, wherever its rows lie."""

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_lib.training.packed_batch import PackedBatch


def log_ratio_sums(log_ratio: Tensor, batch: PackedBatch) -> Tensor:
    """Sum of log-ratios float32[n] by execution of this microbatch: float64[E]."""
    return torch.zeros_like(batch.log_ratio_sum).index_add_(0, batch.execution, log_ratio.double())


def sum_over_data_ranks(
    sums: Tensor, execution_ids: tuple[str, ...], shared: list[str], data: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Complete the sums float64[E] of executions whose rows lie on several data-parallel ranks of this micro-step.

    Collective over `data` when `shared` is not empty: a rank whose microbatch is empty takes part with no sums.
    """
    if not shared:
        return sums
    parts = torch.zeros(len(shared), dtype=torch.float64, device=device)
    here = [(place, execution_ids.index(execution)) for place, execution in enumerate(shared) if execution in execution_ids]
    for place, number in here:
        parts[place] = sums[number]
    dist.all_reduce(parts, group=data)
    complete = sums.clone()
    for place, number in here:
        complete[number] = parts[place]
    return complete


def execution_ratio(sums: Tensor, batch: PackedBatch) -> Tensor:
    """s_i = exp(mean log-ratio) float64[E]; a scored execution's sum came with the micro-step."""
    known = torch.where(batch.log_ratio_sum.isnan(), sums, batch.log_ratio_sum)
    return (known / batch.execution_targets).exp()


def gate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """1 where the execution trains, 0 where its ratio has left the bound on the side its advantage pushes to: bool[E]."""
    return ~(((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low)))
