"""The optimizer update (§7, §12): gradients of a prefix of cells to the core, normalised, clipped, one Adam step, parameters back out."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyre_lib.config.run_config import TrainingConfig
from gyre_lib.models.hf_weights import parameter_map
from gyre_lib.models.policy_model import PolicyModel
from gyre_lib.training.prefix_groups import Groups
from gyre_lib.training.rank_layout import RankLayout
from gyre_lib.training.weight_slab import WeightSlab

BUCKET = 1 << 24
"""Elements per collective: 64 MiB, so that a large model needs no second whole copy in a communication buffer."""


def reduce_to_core(grads: Tensor, group: dist.ProcessGroup, is_core: bool) -> Tensor:
    """Sum of this shard's gradients over the prefix, on the core; the satellites' `grads` come back as they were.

    Works on a copy: if a satellite dies meanwhile, the core still has its own gradients and the batch can be finished without it.
    """
    total = grads.clone()
    root = dist.get_global_rank(group, 0)
    for start in range(0, len(total), BUCKET):
        dist.reduce(total[start : start + BUCKET], root, group=group)
    return total if is_core else grads


def broadcast_from_core(weights: Tensor, group: dist.ProcessGroup) -> None:
    """The core's parameters of this shard to every cell of the prefix."""
    root = dist.get_global_rank(group, 0)
    for start in range(0, len(weights), BUCKET):
        dist.broadcast(weights[start : start + BUCKET], root, group=group)


class NonFiniteGradient(RuntimeError):
    """The step's gradient is broken; taking it would break the weights."""


class CoreOptimizer:
    """Adam over the flat slab of one core rank. Satellites have none.

    Plain Adam with decoupled weight decay on all parameters, norms included (the default decay is 0).
    """

    def __init__(self, model: PolicyModel, slab: WeightSlab, groups: Groups, layout: RankLayout, settings: TrainingConfig):
        self.slab, self.groups, self.layout, self.settings = slab, groups, layout, settings
        self.model = model
        self.flat = nn.Parameter(slab.weights)
        self.adam = torch.optim.AdamW(
            [self.flat],
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.gradient = torch.zeros_like(slab.weights)
        """Of the last update: normalised and clipped."""
        self.flat.grad = self.gradient
        maps = {name: parameter_map(name, model.shape, 0, model.expert_parallel) for name in slab.names()}
        self._whole_on_each = [name for name, entry in maps.items() if entry.split_dim is None]
        self._second_copy = [name for name, entry in maps.items() if not entry.exported and layout.pp > 1]
        partial = ("q_layernorm.weight", "k_layernorm.weight", "router.weight")
        self._partial = [name for name in slab.names() if name.endswith(partial)]
        self._tied = [name for name in slab.names() if name == "embedding.word_embeddings.weight" or name in self._second_copy]

    def step(self, grads: Tensor, executions: int) -> float:
        """Complete the cell's sums, normalise by E, clip, update. Collective over the core cell. Returns the norm before the clip.

        Raises NonFiniteGradient, and changes nothing; not to be called for an empty batch (E = 0).
        """
        self._complete(grads)
        torch.div(grads, executions, out=self.gradient)
        norm = self._global_norm(self.gradient)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm}; no update was taken")
        if norm > self.settings.clip_grad_norm:
            self.gradient.mul_(self.settings.clip_grad_norm / norm)
        self.adam.step()
        return norm

    def _complete(self, grads: Tensor) -> None:
        """Add what this shard's parameters are owed by other ranks of the core: data copies; what tensor ranks see of head norms and
        routers, each through its own heads or experts; a tied embedding."""
        if self.layout.dp > 1:
            dist.all_reduce(grads, group=self.groups.data)
        if self.layout.tp > 1:
            for name in self._partial:
                dist.all_reduce(self.slab.view(grads, name), group=self.groups.model.tp)
        if self.layout.pp > 1 and self.model.shape.tied and self.groups.embedding is not None:
            for name in self._tied:
                dist.all_reduce(self.slab.view(grads, name), group=self.groups.embedding)

    def _global_norm(self, grads: Tensor) -> float:
        """Norm over the whole model, each parameter counted once."""
        skipped = set(self._second_copy)
        if self.layout.tensor_rank > 0:
            skipped |= set(self._whole_on_each)
        square = torch.zeros(1, dtype=torch.float64, device=grads.device)
        for name in self.slab.names():
            if name not in skipped:
                square += self.slab.view(grads, name).double().square().sum()
        if self.layout.tp * self.layout.pp > 1:
            dist.all_reduce(square, group=self.groups.copy)
        return float(square.sqrt())

    def moments(self) -> tuple[Tensor, Tensor, int]:
        """First and second moment, flat, and the number of updates; zeros before the first."""
        state = self.adam.state.get(self.flat)
        if not state:
            return torch.zeros_like(self.slab.weights), torch.zeros_like(self.slab.weights), 0
        return state["exp_avg"], state["exp_avg_sq"], int(state["step"])

    def set_moments(self, first: Tensor, second: Tensor, updates: int) -> None:
        step = torch.tensor(float(updates), device=first.device)
        self.adam.state[self.flat] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
