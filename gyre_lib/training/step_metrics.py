"""What a training step reports, gathered as sums so that cells and ranks can simply be added."""

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_lib.training.packed_batch import PackedBatch

ROLES = ("main_task", "main_summary", "sub_task", "sub_summary", "other")
_SUMS = (
    "loss",
    "executions",
    "gated_executions",
    "ratio",
    "trajectories",
    "targets",
    "gated_targets",
    "context_tokens",
    "kl_k1",
    "kl_k3",
    "weight_raw",
    "weight",
    "capped_targets",
    "entropy",
    "mismatch",
    "current_targets",
    "micro_steps",
    "scored_tokens",
    *(f"targets_{role}" for role in ROLES),
    *(f"executions_{role}" for role in ROLES),
)
_PLACE = {name: place for place, name in enumerate(_SUMS)}
_LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here in reported means only, so that one broken token does not turn them infinite."""


class StepMetrics:
    """Sums and maxima of one batch on one rank."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.largest_mismatch = torch.zeros(1, dtype=torch.float64, device=device)

    def copy(self, counts: bool) -> "StepMetrics":
        """A copy to be reduced; empty unless it `counts` (tensor ranks all hold the same sums, one of them counts)."""
        other = StepMetrics(self.sums.device)
        if counts:
            other.sums.copy_(self.sums)
            other.largest_mismatch.copy_(self.largest_mismatch)
        return other

    def reset(self) -> None:
        self.sums.zero_()
        self.largest_mismatch.zero_()

    def add(self, name: str, value: Tensor | float) -> None:
        self.sums[_PLACE[name]] += value

    def add_microbatch(
        self, batch: PackedBatch, loss: Tensor, log_ratio: Tensor, ratio: Tensor, entropy: Tensor, is_open: Tensor, cap: float, step: int
    ) -> None:
        """Add one trained microbatch. An execution spread over several counts by its share of targets in each: its parts add up to 1."""
        cut = log_ratio.double().clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        raw = cut.exp()
        share = 1.0 / batch.execution_targets[batch.execution]
        closed = ~is_open[batch.execution]
        self.add("loss", loss.detach().double())
        self.add("executions", share.sum())
        self.add("gated_executions", (share * closed).sum())
        self.add("ratio", (share * ratio[batch.execution]).sum())
        self.add("trajectories", len(batch.bounds) - 1)
        self.add("targets", len(log_ratio))
        self.add("gated_targets", closed.sum())
        self.add("context_tokens", len(batch.token_ids) - len(log_ratio))
        self.add("kl_k1", -cut.sum())
        self.add("kl_k3", (raw - 1.0 - cut).sum())
        self.add("weight_raw", raw.sum())
        self.add("weight", raw.clamp(max=cap).sum())
        self.add("capped_targets", (raw > cap).sum())
        self.add("entropy", entropy.detach().double().sum())
        self.add("micro_steps", 1)
        current = batch.versions == step
        if current.any():
            mismatch = log_ratio[current].double().abs()
            self.add("mismatch", mismatch.sum())
            self.add("current_targets", current.sum())
            self.largest_mismatch.copy_(torch.maximum(self.largest_mismatch, mismatch.max()))
        for number, role in enumerate(batch.roles):
            of_role = batch.role == number
            name = role if role in ROLES else "other"
            self.add(f"targets_{name}", of_role.sum())
            self.add(f"executions_{name}", (share * of_role).sum())

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.sums, group=group)
        dist.all_reduce(self.largest_mismatch, dist.ReduceOp.MAX, group=group)

    def report(self, executions: int) -> dict[str, float | None]:
        """Means over trained executions and targets, and counts, named as the columns of the table train_steps where it has them.

        `executions` is E. `kl` is the estimate that is never negative (k3), of behaviour against current policy; `kl_k1` the plain one.
        The mismatch is |trainer - engine| over targets sampled at the version trained from, None when there are none.
        """
        total = {name: float(self.sums[place]) for name, place in _PLACE.items()}
        targets, trained = max(total["targets"], 1.0), max(total["executions"], 1.0)
        means = {
            "loss": total["loss"] / max(executions, 1),
            "gate_fraction_executions": total["gated_executions"] / trained,
            "gate_fraction_tokens": total["gated_targets"] / targets,
            "ratio_mean": total["ratio"] / trained,
            "kl": total["kl_k3"] / targets,
            "kl_k1": total["kl_k1"] / targets,
            "token_weight_raw": total["weight_raw"] / targets,
            "token_weight": total["weight"] / targets,
            "capped_token_fraction": total["capped_targets"] / targets,
            "entropy": total["entropy"] / targets,
            "logprob_mismatch_mean": total["mismatch"] / total["current_targets"] if total["current_targets"] else None,
            "logprob_mismatch_max": float(self.largest_mismatch) if total["current_targets"] else None,
        }
        counts = {
            "trained_executions": total["executions"],
            "target_tokens": total["targets"],
            "context_tokens": total["context_tokens"],
            "tokens": total["targets"] + total["context_tokens"],
            "current_target_tokens": total["current_targets"],
            "microbatches": total["micro_steps"],
            "trajectories": total["trajectories"],
            "scored_tokens": total["scored_tokens"],
            **{f"targets_{role}": total[f"targets_{role}"] for role in ROLES},
        }
        shares = {f"executions_{role}": round(total[f"executions_{role}"], 6) for role in ROLES}
        return means | {name: round(value) for name, value in counts.items()} | shares
