"""Two cells of one rank each, as processes: join, train together, update, publish, leave, and what goes wrong on the way.

The tests of this module share the processes and run in order: each takes the run one step further.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gyre_lib.cells.publication import is_exported
from tests.cells.conftest import CellsUnderTest
from tests.cells.doubles import CoordinatorDouble


@pytest.fixture(scope="module")
def cells(start_cells: Callable[..., CellsUnderTest]) -> CellsUnderTest:
    return start_cells(count=2)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def train_together(cells: CellsUnderTest, step: int, count: int = 2) -> list[dict[str, Any]]:
    cells.open_batch(step, seed=step)
    ids = [cells.fresh_id("train") for _ in range(count)]
    for cell, command_id in enumerate(ids):
        cells.coordinator.send(cell, command_id, "train", step=step)
    reports = [cells.coordinator.wait(cell, command_id)[0] for cell, command_id in enumerate(ids)]
    assert all(report["ok"] for report in reports), reports
    return reports


def update_together(cells: CellsUnderTest, step: int, final: bool, count: int = 2) -> dict[str, Any]:
    ids = [cells.fresh_id("update") for _ in range(count)]
    for cell, command_id in enumerate(ids):
        cells.coordinator.send(cell, command_id, "update", step=step, cells=count, final=final)
    reports = [cells.coordinator.wait(cell, command_id)[0] for cell, command_id in enumerate(ids)]
    assert all(report["ok"] for report in reports), reports
    return reports[0]


def test_a_satellite_joins_with_the_cores_weights(cells: CellsUnderTest) -> None:
    cells.engines[1].busy_flushes = 2  # requests still run on the engine for a moment
    core = cells.command(0, "join", step=0, version=0, manifest=None, engines=cells.engine_of(0))
    manifest = cells.command(0, "expose", version=0)["result"]["manifest"]
    satellite = cells.command(1, "join", step=0, version=0, manifest=manifest, engines=cells.engine_of(1))
    assert {"release", "restore"} <= set(core["phases"])
    assert {"release", "pull_read", "pull_verify", "pull_copy"} <= set(satellite["phases"])
    assert satellite["result"]["weight_bytes"] > 0
    assert all(engine.released for engine in cells.engines)
    assert cells.engines[1].calls == ["flush_cache"] * 3 + ["release_memory_occupation"]


def test_two_cells_train_one_batch_and_hold_the_same_new_weights(cells: CellsUnderTest) -> None:
    before = cells.weights_of(0, 0)
    reports = train_together(cells, step=0)
    assert sum(report["result"]["micro_steps"] for report in reports) == len(cells.coordinator.claimed_by)
    assert {"stream", "compute", "idle"} <= set(reports[0]["phases"])
    report = update_together(cells, step=0, final=False)
    assert report["result"]["executions"] == 8 and report["result"]["grad_norm"] > 0
    assert {"reduce", "optimizer", "broadcast"} <= set(report["phases"])
    core, satellite = cells.weights_of(0, 1), cells.weights_of(1, 1)
    assert torch.equal(core, satellite) and not torch.equal(core, before)


def test_a_command_repeated_under_its_id_is_not_executed_again(cells: CellsUnderTest) -> None:
    cells.coordinator.send(0, "checkpoint-once", "checkpoint", step=1, journal_position={"burst": 0, "step": 1})
    first = cells.coordinator.wait(0, "checkpoint-once")[0]
    folder = cells.run.checkpoints / "00000001"
    written = folder.stat().st_mtime_ns
    cells.coordinator.send(0, "checkpoint-once", "checkpoint", step=1, journal_position={"burst": 0, "step": 1})
    cells.command(0, "expose", version=1)  # commands are in order, so the repeated one has been answered by now
    assert "checkpoint-once" in cells.coordinator.resent
    assert cells.coordinator.wait(0, "checkpoint-once")[0] == first
    assert folder.stat().st_mtime_ns == written


def test_what_a_restarted_coordinator_hands_out_again_counts_once(cells: CellsUnderTest) -> None:
    """Gradients of the earlier life would otherwise be in the update twice: compare with the same batch trained in one go."""
    cells.open_batch(1, seed=1)
    claim, given = cells.coordinator._claim, []

    def two_then_nothing(cell: int) -> Any:
        if len(given) == 2:
            return None
        given.append(cell)
        return claim(cell)

    cells.coordinator._claim = two_then_nothing
    cells.coordinator.send(0, "train-of-life-1", "train", step=1)
    while len(given) < 2:
        time.sleep(0.02)
    cells.coordinator.stop()
    time.sleep(0.5)
    later = CoordinatorDouble(cells.coordinator.port, life="2")
    later.packing = cells.coordinator.packing
    cells.coordinator = later
    assert "coordinator restarted" in later.wait(0, "train-of-life-1")[0]["error"]
    train_together(cells, step=1)
    after_restart = update_together(cells, step=1, final=False)
    cells.command(0, "checkpoint", step=2, journal_position={"burst": 0, "step": 2})
    # the same step again from the checkpoint before it, undisturbed
    cells.join_all(step=1, version=1)
    train_together(cells, step=1)
    undisturbed = update_together(cells, step=1, final=False)
    assert after_restart["result"]["grad_norm"] == pytest.approx(undisturbed["result"]["grad_norm"], rel=1e-4)


def test_a_core_that_stands_elsewhere_reads_the_checkpoint_before_it_shows_weights(cells: CellsUnderTest) -> None:
    """As a core process does that was started anew after the update it is asked to show."""
    now = cells.weights_of(0, 2)
    earlier = cells.weights_of(0, 1)
    assert not torch.equal(earlier, now)
    assert torch.allclose(cells.weights_of(0, 2), now, atol=1e-6)


def test_publication_reaches_all_engines_and_names_the_one_that_fails(cells: CellsUnderTest) -> None:
    train_together(cells, step=2)
    update_together(cells, step=2, final=True)
    for engine in cells.engines:
        engine.calls.clear()
    engines = [*cells.engine_of(0), *cells.engine_of(1)]
    cells.engines[1].broken = "/update_weights_from_disk"
    report = cells.command(0, "publish", version=3, engines=engines)
    assert report["result"]["versions"] == {"cell-0": 3}
    assert set(report["result"]["failed"]) == {"cell-1"} and "500" in report["result"]["failed"]["cell-1"]
    assert set(report["phases"]) == {"export", "pause", "load", "resume", "verify"}
    assert cells.engines[0].calls == ["pause_generation", "update_weights_from_disk", "continue_generation"]
    assert "continue_generation" not in cells.engines[1].calls  # nobody knows what it would serve
    cells.engines[1].broken = ""


def test_the_published_folder_is_a_model_with_the_cores_weights(cells: CellsUnderTest) -> None:
    from transformers import Qwen3ForCausalLM

    folder = cells.run.published / "3"
    assert is_exported(folder, 3) and not is_exported(folder, 4)
    published = load_folder(folder)
    start = load_file(cells.model_dir / "model.safetensors")
    assert set(published) == set(start)
    assert any(not torch.equal(published[name], start[name]) for name in start)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in published.items())


def test_leaving_restores_the_engine_and_says_what_it_serves(cells: CellsUnderTest) -> None:
    engine = cells.engines[1]
    engine.calls.clear()
    report = cells.command(1, "leave", version=3, engines=cells.engine_of(1))
    assert engine.calls == ["resume_memory_occupation", "update_weights_from_disk", "generate"]
    assert report["result"]["versions"] == {"cell-1": 3}
    assert {"resume", "load", "health"} == set(report["phases"])
    engine.calls.clear()
    cells.command(1, "leave", version=3, engines=cells.engine_of(1))
    assert engine.calls == ["generate"] and not engine.dead  # never resumed twice


def test_errors_are_reported_and_the_rank_lives_on(cells: CellsUnderTest) -> None:
    for command_id, kind, arguments, message in (
        ("odd", "dance", {}, "no such command"),
        ("unexposed", "join", {"step": 3, "version": 3, "manifest": None, "engines": []}, "exposed no weights"),
        ("unreachable", "leave", {"version": 3, "engines": [{"engine_id": "x", "url": "http://127.0.0.1:9"}]}, "127.0.0.1:9"),
    ):
        cells.coordinator.send(1, command_id, kind, **arguments)
        report = cells.coordinator.wait(1, command_id)[0]
        assert not report["ok"] and message in report["error"]
    cells.command(1, "leave", version=3, engines=[])


def test_the_core_goes_on_without_a_satellite_that_was_killed(cells: CellsUnderTest) -> None:
    cells.join_all(step=3, version=3)
    train_together(cells, step=3)
    cells.processes[1].kill()
    cells.processes[1].wait()
    cells.coordinator.send(0, "update-over-two", "update", step=3, cells=2, final=True)
    assert not cells.coordinator.wait(0, "update-over-two")[0]["ok"]
    lost = cells.coordinator.packing.hand_back(1)
    assert lost
    report = update_together(cells, step=3, final=True, count=1)
    assert report["result"]["grad_norm"] > 0


def test_sigterm_ends_a_rank_that_waits_for_commands(cells: CellsUnderTest) -> None:
    started = time.monotonic()
    cells.processes[0].send_signal(signal.SIGTERM)
    assert cells.processes[0].wait(timeout=15) == 0
    assert time.monotonic() - started < 15


def test_a_cell_of_two_ranks_shares_its_engine_and_exposes_every_shard(start_cells: Callable[..., CellsUnderTest]) -> None:
    cells = start_cells(count=1, data_parallel=2)
    cells.command(0, "join", step=0, version=0, manifest=None, engines=cells.engine_of(0))
    assert cells.engines[0].calls.count("release_memory_occupation") == 1
    assert len(cells.command(0, "expose", version=0)["result"]["manifest"]["shards"]) == 2
    train_together(cells, step=0, count=1)
    update_together(cells, step=0, final=True, count=1)
    assert cells.command(0, "publish", version=1, engines=cells.engine_of(0))["result"]["versions"] == {"cell-0": 1}
    cells.coordinator.send(0, "leave-nothing", "leave", version=1, engines=[{"engine_id": "x", "url": "http://127.0.0.1:9"}])
    reports = cells.coordinator.wait(0, "leave-nothing")
    assert all("127.0.0.1:9" in report["error"] for report in reports)  # every rank learns of it, none hangs
    cells.coordinator.send(0, "stop", "stop")
    cells.coordinator.wait(0, "stop")
    assert [process.wait(timeout=20) for process in cells.processes] == [0, 0]
