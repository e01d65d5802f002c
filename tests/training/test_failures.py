"""What dies in mid-batch, what stalls, and what is broken: the update is that of an undisturbed batch, or there is a clear error."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_cases import Case

from gyre_lib.benchmarks.equality import largest_difference
from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import ModelConfig, TrainingConfig
from gyre_lib.training.cell_trainer import CellTrainer
from gyre_lib.training.local_cells import LocalCells, RankFailed, train_batch
from gyre_lib.training.local_ranks import LocalRanks
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyGroup
from gyre_lib.training.random_batches import random_groups
from gyre_lib.training.rank_layout import RankLayout
from gyre_lib.training.update import NonFiniteGradient


def small_buffer(dp: int = 1) -> PackingBuffer:
    return PackingBuffer(PackingSettings(row_tokens=128, data_parallel=dp))


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_a_killed_satellite_changes_nothing(untied: Case, sizes: dict[str, int]) -> None:
    """Its claimed and its finished micro-steps return, the later cell leaves the prefix with it, the core does all of it."""
    with LocalCells(untied.model_dir, small_buffer(), untied.settings, cells=3, **sizes) as cells:
        report, streams = train_batch(cells, 0, untied.batches[0], joins={1: 0, 2: 1}, kills={1: 6}, pauses={2: 3})
        assert report.cells == 1 and list(streams) == [0]
        assert largest_difference(cells.call(0, "gradients"), untied.steps[0][1]) <= 1e-5
        report, _ = train_batch(cells, 1, untied.batches[1])
        assert largest_difference(cells.call(0, "gradients"), untied.steps[1][1]) <= 1e-5


def test_a_satellite_that_dies_before_the_reduction_leaves_the_core_whole(untied: Case) -> None:
    """The collective fails, the core keeps its own gradients, trains what came back, and updates alone."""
    buffer = small_buffer()
    with LocalCells(untied.model_dir, buffer, untied.settings, cells=2) as cells:
        buffer.open_batch(0, 3)
        for cell in (0, 1):
            cells.send(cell, "train", 0)
        for group in untied.batches[0]:
            buffer.add_group(group)
        cells.collect([0, 1])
        assert buffer.finished
        cells.kill(1)
        with pytest.raises(RankFailed, match="rank 0"):
            cells.call(0, "update", 2, True)
        assert not buffer.finished, "what the satellite had trained is back in the queue"
        cells.call(0, "train", 0)
        assert buffer.finished
        report = cells.call(0, "update", 1, True)
        assert report.cells == 1
        assert largest_difference(cells.call(0, "gradients"), untied.steps[0][1]) <= 1e-5


def test_a_killed_core_repeats_the_step_from_its_checkpoint(untied: Case, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-1"
    with LocalCells(untied.model_dir, small_buffer(), untied.settings) as cells:
        train_batch(cells, 0, untied.batches[0])
        cells.call(0, "save", str(checkpoint), {"burst": 0, "offset": 17})
        train_batch(cells, 1, untied.batches[1])
        undisturbed = cells.call(0, "weights")
        cells.kill(0)
    with LocalCells(untied.model_dir, small_buffer(), untied.settings) as cells:
        state = cells.call(0, "load", str(checkpoint))
        assert state == {"step": 1, "updates": 1, "journal_position": {"burst": 0, "offset": 17}}
        train_batch(cells, 1, untied.batches[1])
        assert largest_difference(cells.call(0, "weights"), undisturbed) == 0.0


def test_a_checkpoint_resumes_on_another_layout(tied: Case, tmp_path: Path) -> None:
    """Weights and moments are stored by Hugging Face names: one rank writes, two stages of two tensor ranks go on."""
    with LocalCells(tied.model_dir, small_buffer(), tied.settings) as cells:
        train_batch(cells, 0, tied.batches[0])
        cells.call(0, "save", str(tmp_path / "one"), {})
    with LocalCells(tied.model_dir, small_buffer(), tied.settings, tp=2, pp=2) as cells:
        cells.call(0, "load", str(tmp_path / "one"))
        cells.call(0, "save", str(tmp_path / "four"), {})
        for part in ("weights", "first_moment", "second_moment"):
            a, b = (load_file(next((tmp_path / name / part).glob("*.safetensors"))) for name in ("one", "four"))
            assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
        for step in (1, 2):
            train_batch(cells, step, tied.batches[step])
        assert largest_difference(cells.call(0, "weights"), tied.weights) <= 1e-5


def test_an_unfinished_checkpoint_is_not_one(untied: Case, tmp_path: Path) -> None:
    with LocalCells(untied.model_dir, small_buffer(), untied.settings) as cells:
        (tmp_path / "cut").mkdir()
        with pytest.raises(RankFailed, match=r"InputError: .*cut/state.json: no such file; not a checkpoint"):
            cells.call(0, "load", str(tmp_path / "cut"))


def test_weights_that_are_not_numbers_stop_the_step_by_name(untied: Case, tmp_path: Path) -> None:
    weights = load_file(untied.model_dir / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][0, 0] = float("nan")
    (tmp_path / "config.json").write_text((untied.model_dir / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    buffer = small_buffer()
    with LocalCells(tmp_path, buffer, untied.settings) as cells:
        buffer.open_batch(0, 3)
        for group in untied.batches[0]:
            buffer.add_group(group)
        with pytest.raises(RankFailed, match=r"NonFiniteLogProb: execution g0000\d-\d\d: the trainer's log-prob of target \d+ is nan"):
            cells.call(0, "train", 0)


def _broken_gradient(rank: int, model_dir: Path, settings: TrainingConfig) -> bool:
    trainer = CellTrainer(model_dir, ModelConfig(), settings, RankLayout(0, 1, 0))
    before = trainer.weight_slab.clone()
    trainer.begin_batch(0)
    trainer.gradient_slab[5] = float("inf")
    with pytest.raises(NonFiniteGradient, match="the gradient's norm is inf; no update was taken"):
        trainer.reduce_and_update(1, final=True, executions=4)
    return torch.equal(before, trainer.weight_slab)


def test_a_gradient_that_is_not_finite_is_not_taken(untied: Case) -> None:
    assert LocalRanks(1, _broken_gradient, untied.model_dir, untied.settings).results() == [True]


def test_a_stage_without_its_neighbour_fails_loudly(untied: Case) -> None:
    buffer = small_buffer()
    settings = untied.settings.model_copy(update={"stall_limit_s": 2.0})
    with LocalCells(untied.model_dir, buffer, settings, pp=2) as cells:
        buffer.open_batch(0, 3)
        for group in untied.batches[0]:
            buffer.add_group(group)
        cells.pipes[0].send(("train", (0,)))
        cells.busy.add(0)
        with pytest.raises(RankFailed, match=r"StageStalled: stage 0 of 2: (sending an activation|receiving a gradient) failed after"):
            cells.collect([0])
        cells.pipes[0].send(("train", (0,)))
        cells.busy.add(0)
        with pytest.raises(RankFailed, match="cell 0 must be restarted, its pipeline broke: StageStalled"):
            cells.collect([0])


def test_a_layout_that_cannot_be_says_so_on_every_rank(untied: Case) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 0: InputError: cells.tensor_parallel: 4 attention heads do not divide by 3; rank 1: InputError"
    ):
        LocalCells(untied.model_dir, small_buffer(), untied.settings, tp=3)


def test_a_batch_without_a_valid_reward_changes_nothing(untied: Case) -> None:
    with LocalCells(untied.model_dir, small_buffer(), untied.settings) as cells:
        before = cells.call(0, "read_slab")
        report, _ = train_batch(cells, 0, [ReadyGroup("g0", 0, []), ReadyGroup("g1", 0, [])])
        assert (report.executions, report.grad_norm, report.metrics["loss"]) == (0, 0.0, 0.0)
        assert np.array_equal(before, cells.call(0, "read_slab"))


def test_a_long_row_and_an_execution_too_long_for_a_micro_step_train_like_the_rest(untied: Case) -> None:
    """Row budget 64: rows above it stand alone, executions above it are scored first; still the reference's gradients."""
    buffer = PackingBuffer(PackingSettings(row_tokens=64, row_limit_tokens=200))
    with LocalCells(untied.model_dir, buffer, untied.settings, pp=2) as cells:
        _, streams = train_batch(cells, 0, untied.batches[0], pauses={1: 2})
        assert streams[0][0].scored > 0
        assert largest_difference(cells.call(0, "gradients"), untied.steps[0][1]) <= 1e-5
        too_long = random_groups(5, 1, 2, 50, lambda rng: 201)
        buffer.open_batch(1, 1)
        with pytest.raises(InputError, match="201 tokens, more than the limit of 200"):
            buffer.add_group(too_long[0])
