"""The policy as a megatron-core GPTModel: one rank's share of it, built from explicit process groups."""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gyre_lib.config.errors import InputError
from gyre_lib.models.expert_layer import ExpertLayer
from gyre_lib.models.layer_parts import RotaryOnDevice, layer_spec, packed_params
from gyre_lib.models.policy_shape import PolicyShape


class PolicyModel(GPTModel):
    """One pipeline stage of the policy.

    The last stage returns hidden states, not logits: logits are computed only at the positions that need them (`logits`),
    which for agent trajectories is a small part of the tokens.
    """

    shape: PolicyShape
    padded_vocab: int
    expert_parallel: int

    def _postprocess(self, hidden_states: Tensor, *unused, **also_unused) -> Tensor:
        return hidden_states

    def run(self, token_ids: Tensor, bounds: Tensor, longest: int, activation: Tensor | None) -> Tensor:
        """Hidden states [tokens, 1, hidden] of packed rows.

        token_ids int64[tokens]; bounds int32[rows + 1]; `activation` is the previous stage's output, None on the first stage.
        """
        if activation is not None:
            self.set_input_tensor([activation])
        return self(token_ids.unsqueeze(0), None, None, packed_seq_params=packed_params(bounds, longest))

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's vocabulary slice of the logits: hidden [n, 1, hidden] → float32[n, padded_vocab / tp]; padding is -1e30."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.output_layer(hidden, weight=weight)[0].squeeze(1).float()
        if self.padded_vocab != self.shape.vocab:
            padding = self.first_vocab + torch.arange(logits.shape[1], device=logits.device) >= self.shape.vocab
            logits = logits.masked_fill(padding, -1e30)
        return logits

    @property
    def first_vocab(self) -> int:
        """The vocabulary index of this rank's first logit column."""
        tp = self.pg_collection.tp
        return tp.rank() * (self.padded_vocab // tp.size())


def build_policy(
    shape: PolicyShape, groups: ProcessGroupCollection, dtype: torch.dtype, device: torch.device, expert_parallel: int = 1
) -> PolicyModel:
    """This rank's stage and shard, its weights still to be loaded. Raises InputError for a layout the shape does not divide into."""
    tp, pp, cp = groups.tp.size(), groups.pp.size(), groups.cp.size()
    check_layout(shape, tp, pp, expert_parallel)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn or shape.expert_ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",
    )
    padded_vocab = -(-shape.vocab // tp) * tp
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layer_spec(device, cp, dense=not shape.experts),
        vocab_size=padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        pg_collection=groups,
    )
    model.rotary_pos_emb = RotaryOnDevice(shape.head_dim, shape.rope_theta, groups.cp, device)
    if shape.experts:
        for layer in model.decoder.layers:
            layer.mlp = ExpertLayer(shape, expert_parallel, groups.tp, dtype)
    model.shape, model.padded_vocab, model.expert_parallel = shape, padded_vocab, expert_parallel
    return model.to(device)


def check_layout(shape: PolicyShape, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int = 1) -> None:
    """Raises InputError unless every rank gets the same number of heads, feed-forward columns or experts, and layers."""
    if expert_parallel > 1 and not shape.experts:
        raise InputError(f"cells.expert_parallel: must be 1 for a model without experts, got {expert_parallel}")
    if expert_parallel not in (1, tensor_parallel):
        raise InputError(f"cells.expert_parallel: must be 1 or tensor_parallel ({tensor_parallel}), got {expert_parallel}")
    divided = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    if not shape.experts:
        divided["feed-forward columns"] = shape.ffn
    elif expert_parallel == 1:
        divided["feed-forward columns of an expert"] = shape.expert_ffn
    else:
        divided["experts"] = shape.experts
    for name, size in divided.items():
        if size % tensor_parallel:
            raise InputError(f"cells.tensor_parallel: {size} {name} do not divide by {tensor_parallel}")
    if shape.layers % pipeline_parallel:
        raise InputError(f"cells.pipeline_parallel: {shape.layers} layers do not divide by {pipeline_parallel}")
