"""The objective over one microbatch (§12): token weights capped, gate by execution, each execution weighing the same.

The loss is left unnormalised by E, which is known only when the stream has closed; the update divides.
"""

from dataclasses import dataclass

from torch import Tensor

from gyre_lib.training.execution_ratio import execution_ratio, gate
from gyre_lib.training.packed_batch import PackedBatch
from gyre_lib.training.step_metrics import StepMetrics


class NonFiniteLogProb(RuntimeError):
    """The policy gave a log-prob that is not finite: its weights are broken, and the step must not be taken."""


@dataclass(frozen=True)
class Bounds:
    """Gate bounds of the execution ratio and the cap of a token's importance weight."""

    low: float
    high: float
    cap: float


def check_finite(log_probs: Tensor, batch: PackedBatch) -> None:
    """Raises NonFiniteLogProb naming the first execution at fault."""
    finite = log_probs.isfinite()
    if not finite.all():
        first = int((~finite).nonzero()[0])
        execution = batch.execution_ids[int(batch.execution[first])]
        raise NonFiniteLogProb(f"execution {execution}: the trainer's log-prob of target {first} is {float(log_probs[first])}")


def unnormalised_loss(
    log_probs: Tensor, entropy: Tensor, sums: Tensor, batch: PackedBatch, bounds: Bounds, step: int, metrics: StepMetrics
) -> Tensor:
    """-Σ_i g_i A_i (1/T_i) Σ_t ω_t log π(y_t) over this microbatch's targets: a scalar, differentiable in `log_probs` float32[n].

    `sums` float64[E] are the executions' log-ratio sums, complete but for scored executions. Adds to `metrics`.
    """
    log_ratio = log_probs.detach() - batch.logprobs
    ratio = execution_ratio(sums, batch)
    is_open = gate(ratio, batch.advantage, bounds.low, bounds.high)
    weight = log_ratio.exp().clamp(max=bounds.cap)
    scale = is_open * batch.advantage / batch.execution_targets.float()
    loss = -(scale[batch.execution] * weight * log_probs).sum()
    metrics.add_microbatch(batch, loss, log_ratio, ratio, entropy, is_open, bounds.cap, step)
    return loss
