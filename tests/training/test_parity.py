"""Log-probs of the trainer and of a real SGLang engine that serves the exported weights."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from training_cases import SETTINGS

from gyre_lib.training.local_cells import LocalCells, train_batch
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyExecution, ReadyGroup
from gyre_lib.training.random_batches import random_groups
from gyre_lib.trajectories.materialisation import TrajectoryRow

pytestmark = pytest.mark.engine


@pytest.fixture
def restored_weights(sglang_engine: Any):
    """Puts the session engine's weights and version back."""
    yield
    sglang_engine.control.load_folder(sglang_engine.model_dir, 0)


def sampled(url: str, execution: str, prompt: list[int], tokens: int, temperature: float, version: int) -> TrajectoryRow:
    """One model call as a row: the prompt is context, what the engine sampled is the target."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": temperature}
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
    answer = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = np.array(prompt + [pair[1] for pair in pairs], np.int32)
    targets = np.arange(len(ids)) >= len(prompt)
    logprobs = np.concatenate([np.zeros(len(prompt)), [pair[0] for pair in pairs]]).astype(np.float32)
    return TrajectoryRow(execution, execution[:2], 0, "main_task", ids, targets, logprobs, np.where(targets, version, -1), temperature)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}], ids=str)
def test_trainer_and_engine_agree_after_an_update(
    sglang_engine: Any, restored_weights: None, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Update, publication, sampling at several temperatures, twice: the next step's mismatch, packed and not, is below 1e-4 nats."""
    settings = SETTINGS.model_copy(update={"learning_rate": 1e-3})
    rng = np.random.default_rng(0)
    with LocalCells(sglang_engine.model_dir, PackingBuffer(PackingSettings(row_tokens=512)), settings, **sizes) as cells:
        train_batch(cells, 0, random_groups(0, 2, 4, 512, lambda rng: 60))
        for version, row_tokens in ((1, 512), (2, 1)):
            folder = tmp_path / str(version)
            cells.call(0, "export", str(folder))
            sglang_engine.control.load_folder(folder, version)
            members = []
            for number, temperature in enumerate((1.0, 0.7, 1.0, 1.3)):
                prompt = rng.integers(3, 512, int(rng.integers(5, 90))).tolist()
                row = sampled(sglang_engine.url, f"g0-{number}", prompt, 40, temperature, version)
                members.append(ReadyExecution(f"g0-{number}", float(number), [row]))
            cells.buffer = PackingBuffer(PackingSettings(row_tokens=row_tokens, row_limit_tokens=512))
            report, _ = train_batch(cells, version, [ReadyGroup("g0", version, members)])
            assert report.metrics["current_target_tokens"] == 160
            assert report.metrics["microbatches"] == (1 if row_tokens == 512 else 4)
            assert report.metrics["logprob_mismatch_max"] <= 1e-4
            assert report.metrics["gate_fraction_executions"] == 0.0
            assert report.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
