"""A tiny model, three batches for it, and what a plain unpacked loop makes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_lib.config.run_config import TrainingConfig
from gyre_lib.models.tiny_model import write_tiny_model
from gyre_lib.training.local_ranks import LocalRanks
from gyre_lib.training.packing import ReadyGroup
from gyre_lib.training.random_batches import random_groups
from gyre_lib.training.reference import PlainTrainer

SETTINGS = TrainingConfig(learning_rate=1e-4, ratio_low=0.6, ratio_high=1.4, stall_limit_s=30.0)
"""Gate bounds around the random log-probs, so that some executions are gated and some are not."""


@dataclass(frozen=True)
class Case:
    """A model, batches, and the reference's result: per step (figures, gradients), and the final weights."""

    model_dir: Path
    settings: TrainingConfig
    batches: list[list[ReadyGroup]]
    steps: list[tuple[dict[str, float], dict[str, Any]]]
    weights: dict[str, Any]


def _plain(rank: int, model_dir: Path, settings: TrainingConfig, batches: list[list[ReadyGroup]]) -> Any:
    trainer = PlainTrainer(model_dir, settings)
    return [(trainer.step(groups), trainer.gradients()) for groups in batches], trainer.weights()


def make_case(folder: Path, **changes: object) -> Case:
    shape = write_tiny_model(folder, **changes)
    batches = [
        random_groups(seed, 3, 4, shape.vocab, lambda rng: int(rng.integers(10, 120)), first_group=10 * seed, version=seed)
        for seed in range(3)
    ]
    ((steps, weights),) = LocalRanks(1, _plain, folder, SETTINGS, batches).results()
    return Case(folder, SETTINGS, batches, steps, weights)
