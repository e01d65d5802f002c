"""Names and layouts: megatron-core parameters of one rank ↔ the tensors of a Hugging Face Qwen3 folder.

The map is linear and elementwise, so it carries anything shaped like the weights: the optimizer's moments as well. A parameter is
made of *pieces*, one per Hugging Face tensor: query, key and value are interleaved per query group in `linear_qkv`, gate and up are
stacked in `linear_fc1`, experts are stacked along a first dimension; under tensor parallelism each rank holds its share of every piece,
or under expert parallelism some pieces whole.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from gyre_lib.config.errors import InputError
from gyre_lib.models.policy_model import PolicyModel
from gyre_lib.models.policy_shape import PolicyShape

_PLAIN = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


@dataclass(frozen=True)
class ParameterMap:
    """How one megatron-core parameter is made of Hugging Face tensors."""

    hf_names: tuple[str, ...]
    split_dim: int | None
    """The parameter's dimension that is shared out over the tensor ranks; None when every rank holds it whole."""
    piece_dim: int | None
    """The same dimension of a piece; None when ranks hold pieces whole."""
    layout: str
    """plain, qkv, gate_up, experts_gate_up or experts."""
    exported: bool = True
    """False for the second copy of a tied embedding: it is loaded, but written only once."""

    def names_on(self, rank: int, ranks: int) -> tuple[str, ...]:
        """The pieces that one tensor rank has a share of."""
        if self.split_dim is None or self.piece_dim is not None:
            return self.hf_names
        each = len(self.hf_names) // ranks
        return self.hf_names[rank * each : (rank + 1) * each]


def parameter_map(name: str, shape: PolicyShape, first_layer: int, expert_parallel: int = 1) -> ParameterMap:
    """The map of parameter `name`, whose layer numbers are local to a stage that begins at `first_layer`."""
    if name == "output_layer.weight":
        return ParameterMap(("model.embed_tokens.weight" if shape.tied else "lm_head.weight",), 0, 0, "plain", exported=not shape.tied)
    if name in _TOP:
        split = 0 if name.startswith("embedding") else None
        return ParameterMap((_TOP[name],), split, split, "plain")
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(f"no Hugging Face name for {name}")
    prefix, part = f"model.layers.{int(match[1]) + first_layer}.", match[2]
    if part == "self_attention.linear_qkv.weight":
        return ParameterMap(tuple(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"), 0, 0, "qkv")
    if part == "mlp.linear_fc1.weight":
        return ParameterMap((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), 0, 0, "gate_up")
    if part in ("mlp.fc1", "mlp.fc2"):
        names, dim = (("gate_proj", "up_proj"), 0) if part == "mlp.fc1" else (("down_proj",), 1)
        pieces = tuple(f"{prefix}mlp.experts.{expert}.{name}.weight" for expert in range(shape.experts) for name in names)
        split, piece = (2, dim) if expert_parallel == 1 else (0, None)
        return ParameterMap(pieces, split, piece, "experts_gate_up" if len(names) == 2 else "experts")
    hf_name, split_dim = _PLAIN[part]
    return ParameterMap((prefix + hf_name,), split_dim, split_dim, "plain")


def merge_pieces(pieces: list[Tensor], layout: str, shape: PolicyShape) -> Tensor:
    """Hugging Face pieces (whole, or one rank's share of each) → the megatron-core parameter (whole, or that share)."""
    if layout == "qkv":
        d = shape.head_dim
        grouped = [piece.view(pieces[1].shape[0] // d, -1, piece.shape[-1]) for piece in pieces]
        return torch.cat(grouped, dim=1).reshape(-1, pieces[0].shape[-1])
    if layout.startswith("experts"):
        stacked = torch.stack(pieces)
        return stacked.unflatten(0, (-1, 2)) if layout == "experts_gate_up" else stacked
    return torch.cat(pieces, dim=0) if len(pieces) > 1 else pieces[0]


def split_pieces(parameter: Tensor, layout: str, shape: PolicyShape) -> list[Tensor]:
    """The inverse of merge_pieces."""
    if layout == "qkv":
        d, per_group = shape.head_dim, shape.heads // shape.kv_heads
        groups = parameter.view(-1, (per_group + 2) * d, parameter.shape[-1])
        return [piece.reshape(-1, parameter.shape[-1]) for piece in groups.split([per_group * d, d, d], dim=1)]
    if layout.startswith("experts"):
        return list((parameter.flatten(0, 1) if layout == "experts_gate_up" else parameter).unbind(0))
    return list(parameter.chunk(2, dim=0)) if layout == "gate_up" else [parameter]


class HFFolder:
    """Read access to the safetensors of a Hugging Face folder, tensor by tensor. Raises InputError naming what is missing."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.exists():
            self._file_of = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), single.name)
        else:
            raise InputError(f"{self.folder}: neither model.safetensors nor model.safetensors.index.json")
        self._open: dict[str, safe_open] = {}

    def share(self, name: str, dim: int | None, rank: int, ranks: int, padded: int | None = None) -> Tensor:
        """The `rank`-th of `ranks` equal shares of tensor `name` along `dim` (whole when dim is None), zero rows up to `padded`."""
        if name not in self._file_of:
            raise InputError(f"{self.folder}: tensor {name} is missing")
        file_name = self._file_of[name]
        if file_name not in self._open:
            self._open[file_name] = safe_open(self.folder / file_name, framework="pt").__enter__()
        slices = self._open[file_name].get_slice(name)
        if dim is None:
            return slices[:]
        size = slices.get_shape()[dim]
        each = (padded or size) // ranks
        start, end = min(rank * each, size), min((rank + 1) * each, size)
        part = slices[start:end] if dim == 0 else slices[:, start:end]
        if end - start < each:
            part = torch.cat([part, part.new_zeros(each - (end - start), *part.shape[1:])])
        return part


def load_hf(model: PolicyModel, folder: Path, target: Callable[[str], Tensor] | None = None) -> None:
    """Fill this rank's parameters (or the tensors `target(name)` gives for them) from a Hugging Face folder.

    Raises InputError naming a tensor that is missing or has another shape than config.json says.
    """
    source, tp = HFFolder(folder), model.pg_collection.tp
    for name, parameter in model.named_parameters():
        entry = parameter_map(name, model.shape, first_layer(model), model.expert_parallel)
        padded = model.padded_vocab if entry.hf_names[0] in _VOCABULARY else None
        names = entry.names_on(tp.rank(), tp.size())
        pieces = [source.share(hf_name, entry.piece_dim, tp.rank(), tp.size(), padded) for hf_name in names]
        value = merge_pieces(pieces, entry.layout, model.shape)
        if value.shape != parameter.shape:
            raise InputError(f"{folder}: {entry.hf_names[0]} gives {tuple(value.shape)} for {name}, expected {tuple(parameter.shape)}")
        with torch.no_grad():
            (parameter if target is None else target(name)).copy_(value)


def export_hf(model: PolicyModel, value: Callable[[str], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) one by one, gathered over the cell's tensor and pipeline ranks.

    Collective over one data-parallel copy of the cell: every rank of it must exhaust the iterator; only the rank that is first in
    both groups is given tensors. `value(name)` replaces the parameters by tensors of the same shapes (optimizer moments).
    """
    tp, pp = model.pg_collection.tp, model.pg_collection.pp
    mine = {name: parameter.detach() if value is None else value(name) for name, parameter in model.named_parameters()}
    for stage, name, part_shape in _all_parameters(model, pp):
        entry = parameter_map(name, model.shape, stage * model.shape.layers // pp.size(), model.expert_parallel)
        if not entry.exported:
            continue
        if stage == pp.rank():
            whole = _gather(mine[name], entry, model.shape, tp)
            if stage != 0 and tp.rank() == 0:
                dist.send(whole.contiguous(), dist.get_global_rank(pp, 0), group=pp)
        if tp.rank() != 0 or pp.rank() != 0:
            continue
        if stage != 0:
            sample = next(iter(mine.values()))
            whole = torch.empty(_whole_shape(part_shape, entry, tp.size()), dtype=sample.dtype, device=sample.device)
            dist.recv(whole, dist.get_global_rank(pp, stage), group=pp)
        for hf_name, piece in zip(entry.hf_names, split_pieces(whole, entry.layout, model.shape), strict=True):
            yield hf_name, piece[: model.shape.vocab] if hf_name in _VOCABULARY else piece


def first_layer(model: PolicyModel) -> int:
    """The global index of this stage's first layer."""
    pp = model.pg_collection.pp
    return pp.rank() * model.shape.layers // pp.size()


def _all_parameters(model: PolicyModel, pp: dist.ProcessGroup) -> list[tuple[int, str, tuple[int, ...]]]:
    """(stage, parameter name, its shape on one rank) of every stage, in pipeline order, the same on all ranks."""
    mine = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    stages: list = [mine]
    if pp.size() > 1:
        stages = [None] * pp.size()
        dist.all_gather_object(stages, mine, group=pp)
    return [(stage, name, shape) for stage, names in enumerate(stages) for name, shape in names]


def _gather(part: Tensor, entry: ParameterMap, shape: PolicyShape, tp: dist.ProcessGroup) -> Tensor:
    if tp.size() == 1 or entry.split_dim is None:
        return part
    parts = [torch.empty_like(part) for _ in range(tp.size())]
    dist.all_gather(parts, part.contiguous(), group=tp)
    if entry.layout not in ("qkv", "gate_up"):
        return torch.cat(parts, dim=entry.split_dim)
    by_piece = zip(*(split_pieces(part, entry.layout, shape) for part in parts), strict=True)
    return merge_pieces([torch.cat(pieces, dim=0) for pieces in by_piece], entry.layout, shape)


def _whole_shape(part_shape: tuple[int, ...], entry: ParameterMap, ranks: int) -> tuple[int, ...]:
    return tuple(size * ranks if dim == entry.split_dim else size for dim, size in enumerate(part_shape))
