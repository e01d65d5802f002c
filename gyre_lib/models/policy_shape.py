"""The sizes of a policy, read from a Hugging Face folder's config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError

SUPPORTED = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of a Qwen3 policy, dense or of experts (no biases, RMS norms, norms on query and key heads, rotary positions)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output layer shares the embedding's weight."""
    max_positions: int
    experts: int = 0
    """0: dense; otherwise every layer is of experts, and `ffn` is unused."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalise_experts: bool = True
    """The chosen experts' weights are scaled to sum to 1."""


def read_shape(model_dir: Path) -> PolicyShape:
    """The shape of the policy in `model_dir`. Raises InputError naming the file and the field that cannot be trained."""
    path = Path(model_dir) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; model.path must be a Hugging Face model folder") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise InputError(f"{path}: model_type {kind!r} cannot be trained; supported: {', '.join(SUPPORTED)}")
    for field, allowed in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
        if config.get(field, allowed) != allowed:
            raise InputError(f"{path}: {field}={config[field]!r} is not supported, only {allowed!r}")
    experts = _experts(path, config) if kind == "qwen3_moe" else {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"{path}: rope_type {rope['rope_type']!r} is not supported, only 'default'")
    try:
        return PolicyShape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config.get("intermediate_size", 0) if experts else config["intermediate_size"],
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=config["max_position_embeddings"],
            **experts,
        )
    except KeyError as error:
        raise InputError(f"{path}: field {error} is missing") from error


def _experts(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InputError(f"{path}: mlp_only_layers and decoder_sparse_step: only models whose every layer is of experts are supported")
    try:
        return {
            "experts": config["num_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn": config["moe_intermediate_size"],
            "normalise_experts": bool(config.get("norm_topk_prob", False)),
        }
    except KeyError as error:
        raise InputError(f"{path}: field {error} is missing") from error
