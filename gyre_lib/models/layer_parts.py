"""The one place that chooses between CPU parts and Transformer Engine for a policy's layers.

Everything is megatron-core's local layer; only what the platform forces differs: the attention kernel and where rotary tables live.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class PackedAttention(MegatronModule):
    """Causal attention over packed rows with torch kernels, one call per row; context parallelism and dropout are refused.

    One call per row costs less than a block-diagonal mask and gives bit for bit the unpacked result.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs Transformer Engine")
        self.scale = softmax_scale
        self.tp_group = pg_collection.tp

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None) -> Tensor:
        """query [tokens, heads, d], key and value [tokens, kv_heads, d] → [tokens, heads * d]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        rows = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=self.scale, enable_gqa=grouped)
            for a, b in itertools.pairwise(bounds)
        ]
        out = torch.cat(rows, dim=2)[0].transpose(0, 1)
        return out.reshape(out.shape[0], -1)


class RotaryOnDevice(RotaryEmbedding):
    """Rotary tables that are made where the model is (upstream moves them to the current CUDA device, also when there is none)."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, base: float, cp_group: dist.ProcessGroup, device: torch.device):
        super().__init__(head_dim, 1.0, rotary_base=base, use_cpu_initialization=True, cp_group=cp_group)
        self.inv_freq = self.inv_freq.to(device)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]


def layer_spec(device: torch.device, context_parallel: int, dense: bool) -> ModuleSpec:
    """The layer for this device: Transformer Engine's attention on CUDA where it is installed, torch's kernels elsewhere.

    Not `dense`: the feed-forward part is left out, for an expert layer to be put in its place.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = _attention(device, context_parallel)
    if not dense:
        spec.submodules.mlp = IdentityOp
    return spec


def _attention(device: torch.device, context_parallel: int) -> type:
    if device.type != "cuda":
        return PackedAttention
    try:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
    except ImportError:
        if context_parallel > 1:
            raise
        return PackedAttention
    return TEDotProductAttention


def packed_params(bounds: Tensor, longest: int) -> PackedSeqParams:
    """Row boundaries `bounds` int32[rows + 1] and the longest row's length, as megatron-core's layers expect them."""
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
