"""The Megatron policy against transformers, and its weights to and from Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import ModelConfig, TrainingConfig
from gyre_lib.models.hf_weights import export_hf, load_hf
from gyre_lib.models.policy_model import build_policy, check_layout
from gyre_lib.models.policy_shape import read_shape
from gyre_lib.models.tiny_model import EXPERTS, write_tiny_model
from gyre_lib.training.cell_trainer import CellTrainer
from gyre_lib.training.local_ranks import LocalRanks, RankDied
from gyre_lib.training.prefix_groups import build_groups
from gyre_lib.training.rank_layout import RankLayout


def logits_of(rank: int, folder: Path, rows: list[np.ndarray], sizes: dict[str, int]) -> Any:
    """Logits of packed rows on the last stage (this rank's vocabulary share), and the exported weights."""
    layout = RankLayout(0, 1, rank, **sizes)
    groups = build_groups(layout, 30.0)
    model = build_policy(read_shape(folder), groups.model, torch.float32, torch.device("cpu"), layout.ep)
    load_hf(model, folder)
    exported = {name: tensor.clone().numpy() for name, tensor in export_hf(model)}
    if layout.pp > 1:
        return None, exported
    ids = torch.as_tensor(np.concatenate(rows))
    bounds = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int32)
    with torch.no_grad():
        hidden = model.run(ids, bounds, max(map(len, rows)), None)
        return model.logits(hidden).numpy(), exported


def transformers_logits(rank: int, folder: Path, rows: list[np.ndarray]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        return np.concatenate([model(torch.as_tensor(row)[None]).logits[0].numpy() for row in rows])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers_packed_and_not(tmp_path: Path, tied: bool) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=tied)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 211, length) for length in (150, 7, 64)]
    (expected,) = LocalRanks(1, transformers_logits, tmp_path, rows).results()
    ((packed, _),) = LocalRanks(1, logits_of, tmp_path, rows, {}).results()
    assert np.abs(packed - expected).max() <= 2e-5
    ((single, _),) = LocalRanks(1, logits_of, tmp_path, rows[:1], {}).results()
    assert np.abs(single - expected[:150]).max() <= 2e-6
    shares = LocalRanks(2, logits_of, tmp_path, rows, {"tp": 2}).results()
    split = np.concatenate([logits for logits, _ in shares], axis=1)
    assert np.abs(split[:, :211] - expected).max() <= 2e-5
    assert (split[:, 211:] == np.float32(-1e30)).all(), "the place that pads the vocabulary to 212 is never chosen"


@pytest.mark.parametrize("normalised", [True, False])
def test_experts_equal_transformers(tmp_path: Path, normalised: bool) -> None:
    write_tiny_model(tmp_path, **(EXPERTS | {"norm_topk_prob": normalised}))
    rows = [np.random.default_rng(1).integers(0, 211, length) for length in (40, 9)]
    (expected,) = LocalRanks(1, transformers_logits, tmp_path, rows).results()
    stored = load_file(tmp_path / "model.safetensors")
    for sizes in ({}, {"tp": 2}, {"tp": 2, "ep": 2}):
        shares = LocalRanks(sizes.get("tp", 1), logits_of, tmp_path, rows, sizes).results()
        logits = np.concatenate([logits for logits, _ in shares], axis=1)[:, :211]
        assert np.abs(logits - expected).max() <= 2e-5
        exported = shares[0][1]
        assert set(exported) == set(stored) and all(np.array_equal(exported[name], stored[name].numpy()) for name in stored)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_export_is_what_was_loaded(tmp_path: Path, tied: bool, sizes: dict[str, int]) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=tied)
    world = sizes.get("tp", 1) * sizes.get("pp", 1)
    results = LocalRanks(world, logits_of, tmp_path, [np.arange(5)], sizes).results()
    exported, stored = results[0][1], load_file(tmp_path / "model.safetensors")
    assert set(exported) == set(stored)
    assert all(np.array_equal(exported[name], stored[name].numpy()) for name in stored)
    assert all(not other for _, other in results[1:]), "only the first rank is given tensors"


def _slab(rank: int, folder: Path) -> Any:
    trainer = CellTrainer(folder, ModelConfig(), TrainingConfig(), RankLayout(0, 1, 0))
    slab = trainer.weight_slab
    before = {name: tensor.clone() for name, tensor in trainer.hf_weights()}
    assert slab.dtype == torch.float32 and slab.is_contiguous() and slab.dim() == 1
    slab.mul_(2.0)
    trainer.begin_batch(0)
    after = dict(trainer.hf_weights())
    parameters = dict(trainer.model.named_parameters())
    shared = all(p.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr() for p in parameters.values())
    return shared and all(torch.equal(after[name], 2.0 * before[name]) for name in before)


def test_the_slab_is_the_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    assert LocalRanks(1, _slab, tmp_path).results() == [True]


def _bfloat16(rank: int, folder: Path) -> Any:
    trainer = CellTrainer(folder, ModelConfig(dtype="bfloat16"), TrainingConfig(), RankLayout(0, 1, 0))
    trainer.weight_slab.mul_(2.0)
    trainer.begin_batch(0)
    parameter = dict(trainer.model.named_parameters())["decoder.final_layernorm.weight"]
    weights = dict(trainer.hf_weights())["model.norm.weight"]
    ids, bounds = torch.arange(6), torch.tensor([0, 6], dtype=torch.int32)
    trainer.model.run(ids, bounds, 6, None).float().sum().backward()
    return parameter.dtype == torch.bfloat16, torch.equal(parameter, weights.bfloat16()), float(trainer.gradient_slab.abs().sum()) > 0


def test_bfloat16_computes_from_float32_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    assert LocalRanks(1, _bfloat16, tmp_path).results() == [(True, True, True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "config.json: model_type 'llama' cannot be trained; supported: qwen3, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn' is not supported"),
        ({"model_type": "qwen3_moe"}, "field 'num_experts' is missing"),
        ({**EXPERTS, "mlp_only_layers": [1]}, "only models whose every layer is of experts are supported"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=message):
        read_shape(tmp_path)


def test_folders_that_are_not_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json: no such file"):
        read_shape(tmp_path)
    write_tiny_model(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    del shape["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(InputError, match="field 'rms_norm_eps' is missing"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_shape(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(RankDied, match=r"gate_proj.weight gives"):
        LocalRanks(1, logits_of, tmp_path, [np.arange(5)], {}).results()


def test_layouts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path)
    with pytest.raises(InputError, match=r"cells.tensor_parallel: 4 attention heads do not divide by 3"):
        check_layout(shape, 3, 1)
    with pytest.raises(InputError, match=r"cells.tensor_parallel: 2 key-value heads do not divide by 4"):
        check_layout(shape, 4, 1)
    with pytest.raises(InputError, match=r"cells.pipeline_parallel: 4 layers do not divide by 3"):
        check_layout(shape, 1, 3)
    with pytest.raises(InputError, match=r"cells.expert_parallel: must be 1 for a model without experts, got 2"):
        check_layout(shape, 2, 1, 2)
    experts = write_tiny_model(tmp_path / "experts", **EXPERTS)
    check_layout(experts, 2, 1, 2)
    with pytest.raises(InputError, match=r"cells.expert_parallel: must be 1 or tensor_parallel \(1\), got 2"):
        check_layout(experts, 1, 1, 2)
