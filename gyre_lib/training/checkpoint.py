"""Checkpoints of the core: weights, Adam moments, step and journal position, written whole or not at all.

Weights and moments are all stored under Hugging Face names (the map is elementwise), so a checkpoint can be resumed on any layout, and
its `weights` folder is a model folder that an engine can load. Layout of a checkpoint:

    weights/model.safetensors (or shards with an index), config.json and tokenizer files of the model folder
    first_moment/, second_moment/   the same tensors of Adam's state
    state.json                      {"step", "updates", "journal_position"}
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gyre_lib.config.errors import InputError

SHARD_BYTES = 4 << 30
PARTS = ("weights", "first_moment", "second_moment")


def write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write named tensors as safetensors shards with an index, holding at most one shard in memory."""
    folder.mkdir(parents=True)
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    size = total = number = 0

    def flush() -> None:
        nonlocal size, number
        if shard:
            number += 1
            name = f"model-{number:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, name))
            shard.clear()
            size = 0

    for name, tensor in tensors:
        shard[name] = tensor.cpu().contiguous().clone()
        size += shard[name].nbytes
        total += shard[name].nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def copy_model_files(model_dir: Path, folder: Path) -> None:
    """Everything of a model folder but its weights: configuration, tokenizer, chat template."""
    for source in sorted(model_dir.iterdir()):
        if source.is_file() and source.suffix != ".safetensors" and not source.name.endswith(".index.json"):
            shutil.copy2(source, folder / source.name)


def remove(folder: Path) -> None:
    """Remove what an interrupted write left."""
    if folder.exists():
        shutil.rmtree(folder)


def commit(temporary: Path, final: Path, state: dict[str, Any]) -> None:
    """Add the state and make the checkpoint visible under its name in one rename, after its bytes are on disk."""
    (temporary / "state.json").write_text(json.dumps(state))
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    remove(final)
    os.rename(temporary, final)
    _sync(final.parent)


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a committed checkpoint. Raises InputError naming what is missing."""
    path = Path(folder) / "state.json"
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; not a checkpoint") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    missing = {"step", "updates", "journal_position"} - set(state)
    if missing:
        raise InputError(f"{path}: {', '.join(sorted(missing))} missing")
    return state


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
