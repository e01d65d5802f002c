"""Publication and engine memory against a real SGLang engine."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from gyre_lib.cells.engine_memory import EngineMemory
from gyre_lib.cells.phases import Phases
from gyre_lib.cells.publication import export_weights, publish

pytestmark = pytest.mark.engine

IDS = list(range(60, 90))


def generate(url: str, ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **fields}
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def prompt_logprobs(url: str) -> list[float]:
    return [entry[0] for entry in generate(url, IDS, 0, logprob_start_len=0)["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture
def engine(sglang_engine: Any) -> Iterator[Any]:
    yield sglang_engine
    sglang_engine.control.load_folder(sglang_engine.model_dir, 0)


@pytest.fixture
def published(sglang_engine: Any, tmp_path: Path) -> Path:
    """Version 2: other weights than the engine started with."""
    generator = torch.Generator().manual_seed(3)
    start = load_file(sglang_engine.model_dir / "model.safetensors")
    weights = ((name, tensor + 0.02 * torch.randn(tensor.shape, generator=generator)) for name, tensor in start.items())
    export_weights(weights, sglang_engine.model_dir, tmp_path / "2", 2)
    return tmp_path / "2"


def test_an_engine_serves_what_was_published_and_a_restarted_one_would_load_the_same(engine: Any, published: Path) -> None:
    before = prompt_logprobs(engine.url)
    report = publish(published, 2, [{"engine_id": "cell-0", "url": engine.url}], Phases())
    assert report == {"versions": {"cell-0": 2}, "failed": {}}
    pushed = prompt_logprobs(engine.url)
    assert max(abs(a - b) for a, b in zip(pushed, before, strict=True)) > 1e-3
    engine.control.load_folder(engine.model_dir, 0)
    assert prompt_logprobs(engine.url) == pytest.approx(before, abs=1e-5)
    engine.control.load_folder(published, 2)
    assert prompt_logprobs(engine.url) == pytest.approx(pushed, abs=1e-5)
    assert engine.control.weight_version() == 2


def test_requests_in_flight_go_on_under_the_new_version(engine: Any, published: Path) -> None:
    answers: list[dict[str, Any]] = []
    requests = [threading.Thread(target=lambda n=n: answers.append(generate(engine.url, [n, 8, 7], 80))) for n in range(3, 7)]
    httpx.post(f"{engine.url}/slow_down", json={"forward_sleep_time": 0.02}).raise_for_status()
    try:
        for request in requests:
            request.start()
        while engine.control.load()["running"] < len(requests):
            time.sleep(0.02)
        time.sleep(0.2)  # a few tokens under the old version
        publish(published, 2, [{"engine_id": "cell-0", "url": engine.url}], Phases())
        for request in requests:
            request.join()
    finally:
        httpx.post(f"{engine.url}/slow_down", json={"forward_sleep_time": None}).raise_for_status()
    for answer in answers:
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "2"] and spans[1]["end"] == len(answer["output_ids"]) == 80


def test_memory_is_resumed_once_and_only_by_the_life_that_released_it(engine: Any) -> None:
    memory = EngineMemory()
    memory.release([engine.url])
    memory.release([engine.url])
    memory.resume([engine.url])
    memory.resume([engine.url])  # SGLang's scheduler would die of this
    memory._released[engine.url] = "an earlier life"
    memory.resume([engine.url])
    engine.control.prove_health()
