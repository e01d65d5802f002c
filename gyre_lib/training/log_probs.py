"""Log-probabilities and entropy of target tokens from logits that are split over the vocabulary."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gyre_lib.models.policy_model import PolicyModel

CHUNK = 4096
"""Targets whose logits exist at once; beyond it they are computed again in the backward pass."""


class _VocabularyLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        split = group.size() > 1
        top = logits.max(dim=-1).values
        if split:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        weights = shifted.exp()
        local = targets - first
        here = (local >= 0) & (local < logits.shape[1])
        local = local.clamp(0, logits.shape[1] - 1)
        chosen = shifted.gather(1, local[:, None]).squeeze(1) * here
        sums = torch.stack([weights.sum(-1), torch.einsum("nv,nv->n", weights, shifted), chosen])
        if split:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        ctx.save_for_backward(weights.div_(total[:, None]), local, here)
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here = ctx.saved_tensors
        out = probabilities * -grad[:, None]
        out.scatter_add_(1, local[:, None], (grad * here)[:, None])
        return out, None, None, None


def target_log_probs(model: PolicyModel, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies in nats, float32[n], of the distribution softmax(logits / temperature).

    hidden [n, 1, h]: the state before each target; targets int64[n]; temperature float32[n]. Collective over the tensor group.
    """
    group = model.pg_collection.tp

    def part(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(hidden) / temperature[:, None]
        return _VocabularyLogProb.apply(logits, targets, model.first_vocab, group)

    if len(targets) <= CHUNK:
        return part(hidden, targets, temperature)
    chunks = [
        checkpoint(part, hidden[a : a + CHUNK], targets[a : a + CHUNK], temperature[a : a + CHUNK], use_reentrant=False)
        for a in range(0, len(targets), CHUNK)
    ]
    log_probs, entropies = zip(*chunks, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)
