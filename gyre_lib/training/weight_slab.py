"""All of a rank's parameters in one flat buffer, and their gradients in another.

One buffer is what Mooncake exposes and pulls into, what gloo or NCCL reduces and broadcasts, and what Adam updates: no copies between.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

ALIGNMENT = 32
"""Elements; each parameter starts at a multiple of 128 bytes, as vectorised kernels want."""


class WeightSlab:
    """`weights` and `grads`: flat contiguous float32, the same layout; in float32 every parameter and its .grad are views into them.

    With another compute type the parameters are views into `compute`, which `refresh` rounds from `weights`, and gradients are added
    to `grads` in float32 as backward produces them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        parameters = list(model.named_parameters())
        self.ranges: dict[str, tuple[int, tuple[int, ...]]] = {}
        size = 0
        for name, parameter in parameters:
            self.ranges[name] = (size, tuple(parameter.shape))
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        device = parameters[0][1].device
        self.weights = torch.zeros(size, device=device)
        self.grads = torch.zeros(size, device=device)
        self.compute = self.weights if dtype == torch.float32 else torch.zeros(size, dtype=dtype, device=device)
        for name, parameter in parameters:
            self.view(self.weights, name).copy_(parameter.detach())
            parameter.data = self.view(self.compute, name)
            if self.compute is self.weights:
                parameter.grad = self.view(self.grads, name)
            else:
                parameter.register_post_accumulate_grad_hook(self._accumulate(self.view(self.grads, name)))
        self.refresh()

    @staticmethod
    def _accumulate(total: Tensor):
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = None

        return add

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat buffer of this layout that belongs to parameter `name`, in its shape."""
        start, shape = self.ranges[name]
        return flat[start : start + math.prod(shape)].view(shape)

    def refresh(self) -> None:
        """Bring the parameters up to the weights, after these were written from outside."""
        if self.compute is not self.weights:
            self.compute.copy_(self.weights)

    def names(self) -> Iterator[str]:
        return iter(self.ranges)
