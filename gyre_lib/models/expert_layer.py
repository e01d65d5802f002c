"""A mixture-of-experts feed-forward layer (Qwen3-MoE) on plain tensor operations: the same on CPU and GPU.

megatron-core's own layer needs CUDA streams. Here expert parallelism lies on the tensor-parallel ranks, which hold the same tokens: each
rank runs its share of the experts on all of them and the outputs are summed, so no token is sent anywhere. With expert parallelism 1
every expert is split over those ranks like a dense layer. Either way a rank sees only part of what the router's probabilities do, so the
router's gradient is a sum over ranks (the update adds it up).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from gyre_lib.models.policy_shape import PolicyShape


class Router(nn.Module):
    """Chooses `experts_per_token` experts for each token. Whole on every rank."""

    def __init__(self, shape: PolicyShape, dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.experts, shape.hidden, dtype=dtype))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [n, hidden] → weights [n, k] and expert numbers int64[n, k]; softmax over all experts, in float32."""
        probabilities = F.linear(tokens, self.weight).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.shape.experts_per_token, dim=-1)
        if self.shape.normalise_experts:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(tokens.dtype), chosen


class ExpertLayer(nn.Module):
    """Takes the place of a layer's dense feed-forward part: hidden [tokens, 1, h] → (the same shape, no bias)."""

    def __init__(self, shape: PolicyShape, expert_parallel: int, group: dist.ProcessGroup, dtype: torch.dtype):
        super().__init__()
        self.group = group
        experts, ffn = shape.experts // expert_parallel, shape.expert_ffn
        if expert_parallel == 1:
            ffn //= group.size()
        self.first = group.rank() * experts if expert_parallel > 1 else 0
        self.router = Router(shape, dtype)
        self.fc1 = nn.Parameter(torch.zeros(experts, 2, ffn, shape.hidden, dtype=dtype))
        """Gate and up projection of each expert held here."""
        self.fc2 = nn.Parameter(torch.zeros(experts, shape.hidden, ffn, dtype=dtype))

    def forward(self, hidden: Tensor, **unused) -> tuple[Tensor, None]:
        tokens = copy_to_tensor_model_parallel_region(hidden.reshape(-1, hidden.shape[-1]), group=self.group)
        weights, chosen = self.router(tokens)
        total = torch.zeros_like(tokens)
        for place in range(self.fc1.shape[0]):
            token, slot = (chosen == self.first + place).nonzero(as_tuple=True)
            gate, up = (F.linear(tokens[token], self.fc1[place, part]) for part in (0, 1))
            out = F.linear(F.silu(gate) * up, self.fc2[place]) * weights[token, slot, None]
            total = total.index_add(0, token, out)
        return reduce_from_tensor_model_parallel_region(total, group=self.group).view_as(hidden), None
