"""One pipeline stage of the policy at work on micro-steps: embedding to activation, or activation to loss and scores."""

import torch
from torch import Tensor

from gyre_lib.models.policy_model import PolicyModel
from gyre_lib.training.execution_ratio import log_ratio_sums, sum_over_data_ranks
from gyre_lib.training.log_probs import target_log_probs
from gyre_lib.training.micro_steps import MicroStep
from gyre_lib.training.objective import Bounds, check_finite, unnormalised_loss
from gyre_lib.training.packed_batch import PackedBatch, pack, token_count
from gyre_lib.training.prefix_groups import Groups
from gyre_lib.training.rank_layout import RankLayout
from gyre_lib.training.step_metrics import StepMetrics


class PolicyStage:
    """Implements pipeline.Stage for a PolicyModel."""

    def __init__(self, model: PolicyModel, groups: Groups, layout: RankLayout, bounds: Bounds, device: torch.device):
        self.model, self.groups, self.layout, self.bounds, self.device = model, groups, layout, bounds, device
        self.metrics = StepMetrics(device)
        self._scores: dict[str, tuple[float, int]] | None = None

    def activation_shape(self, micro_step: MicroStep) -> tuple[int, ...]:
        return (token_count(micro_step, self.layout.data_rank), 1, self.model.shape.hidden)

    def forward(self, micro_step: MicroStep, activation: Tensor | None) -> Tensor | None:
        batch = pack(micro_step, self.layout.data_rank, self.device)
        output = None if batch is None else self.model.run(batch.token_ids, batch.bounds, batch.longest, activation)
        self._scores = None
        if not self.layout.is_last_stage:
            return output
        if micro_step.kind == "score":
            self._score(batch, output)
            return None
        return self._loss(micro_step, batch, output)

    def scores(self) -> dict[str, tuple[float, int]] | None:
        return self._scores

    def log_probs(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies float32[n] of the batch's targets. Raises NonFiniteLogProb."""
        before = hidden.index_select(0, batch.positions - 1)
        targets = batch.token_ids[batch.positions]
        log_probs, entropy = target_log_probs(self.model, before, targets, batch.temperature)
        check_finite(log_probs, batch)
        return log_probs, entropy

    def _loss(self, micro_step: MicroStep, batch: PackedBatch | None, hidden: Tensor | None) -> Tensor | None:
        shared, data = micro_step.shared_executions, self.groups.data
        if batch is None or hidden is None:
            sum_over_data_ranks(torch.zeros(0, device=self.device), (), shared, data, self.device)
            return None
        log_probs, entropy = self.log_probs(batch, hidden)
        sums = log_ratio_sums(log_probs.detach() - batch.logprobs, batch)
        sums = sum_over_data_ranks(sums, batch.execution_ids, shared, data, self.device)
        return unnormalised_loss(log_probs, entropy, sums, batch, self.bounds, micro_step.step, self.metrics)

    def _score(self, batch: PackedBatch | None, hidden: Tensor | None) -> None:
        self._scores = {}
        if batch is None or hidden is None:
            return
        log_probs, _ = self.log_probs(batch, hidden)
        sums = log_ratio_sums(log_probs - batch.logprobs, batch).tolist()
        counts = torch.bincount(batch.execution, minlength=len(sums)).tolist()
        self._scores = {name: (sums[place], counts[place]) for place, name in enumerate(batch.execution_ids)}
        self.metrics.add("scored_tokens", len(batch.token_ids))
