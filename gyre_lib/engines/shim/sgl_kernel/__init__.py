"""SGLang's compiled kernels on a machine that has none of them.

The CPU engine runs torch's own operators as long as `torch.ops.sgl_kernel` stays empty (that is how SGLang detects AMX kernels), so nothing
is registered here. One kernel is called without such a check and is written out in torch; every other name exists, and says what is
missing when it is called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the newly allocated cache slots into each request's row of the slot table.

    `out_cache_loc` holds the new slots of all requests one after another; request i, whose row is `req_pool_indices[i]`, takes
    `end_offset[i] - start_offset[i]` of them into columns [start_offset[i], end_offset[i]). `pool_len` (the row length) is not needed.
    """
    lengths = (end_offset - start_offset).tolist()
    pieces = torch.split(out_cache_loc[: sum(lengths)].to(req_to_token.dtype), lengths)
    for row, start, slots in zip(req_pool_indices.tolist(), start_offset.tolist(), pieces, strict=True):
        req_to_token[row, start : start + slots.numel()] = slots


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name}: this kernel is compiled code that the CPU engine does not have")

    return missing
