"""A small random Qwen3, dense or of experts, in Hugging Face format, for tests and benchmarks of the trainer."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gyre_lib.models.policy_shape import PolicyShape, read_shape

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 211,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
}

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Changes that make TINY a model of experts."""


def write_tiny_model(folder: Path, seed: int = 0, **changes: object) -> PolicyShape:
    """Write config.json and random float32 weights, norms included, under `folder`; `changes` replace fields of TINY."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    shape = read_shape(folder)
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * size[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    h, d = shape.hidden, shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(shape.vocab, h), "model.norm.weight": norm(h)}
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocab, h)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(h),
            prefix + "self_attn.q_proj.weight": matrix(shape.heads * d, h),
            prefix + "self_attn.k_proj.weight": matrix(shape.kv_heads * d, h),
            prefix + "self_attn.v_proj.weight": matrix(shape.kv_heads * d, h),
            prefix + "self_attn.o_proj.weight": matrix(h, shape.heads * d),
            prefix + "self_attn.q_norm.weight": norm(d),
            prefix + "self_attn.k_norm.weight": norm(d),
            prefix + "post_attention_layernorm.weight": norm(h),
        }
        if shape.experts:
            weights[prefix + "mlp.gate.weight"] = matrix(shape.experts, h)
        experts = [f"{prefix}mlp.experts.{number}." for number in range(shape.experts)] or [prefix + "mlp."]
        ffn = shape.expert_ffn if shape.experts else shape.ffn
        for expert in experts:
            weights[expert + "gate_proj.weight"] = matrix(ffn, h)
            weights[expert + "up_proj.weight"] = matrix(ffn, h)
            weights[expert + "down_proj.weight"] = matrix(h, ffn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return shape
