"""A real SGLang engine through our launcher and control client."""

import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre_lib.config.errors import InputError
from gyre_lib.engines.control import EngineControl, EngineError
from gyre_lib.engines.fork_server import ForkServerError, request_engine
from gyre_lib.engines.launcher import EngineDied, EngineProcess

pytestmark = pytest.mark.engine


def generate(url: str, ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **fields}
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def prompt_logprobs(url: str, ids: list[int]) -> list[float]:
    answer = generate(url, ids, 0, logprob_start_len=0)
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture
def other_weights(sglang_engine: Any, tmp_path: Path) -> Path:
    """A model folder of the same shape with other weights."""
    shutil.copytree(sglang_engine.model_dir, tmp_path / "other")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(sglang_engine.model_dir / "model.safetensors")
    changed = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    save_file(changed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "other"


def reference_logprobs(model_dir: Path, ids: list[int]) -> list[float]:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    return [logprobs[i, token].item() for i, token in enumerate(ids[1:])]


@pytest.fixture
def restored_weights(sglang_engine: Any):
    """Puts the session engine's weights and version back after a test that publishes to it."""
    yield
    sglang_engine.control.load_folder(sglang_engine.model_dir, 0)


def test_a_fresh_engine_is_healthy_and_agrees_with_transformers(sglang_engine: Any) -> None:
    ids = list(range(40, 80))
    assert sglang_engine.control.ready()
    sglang_engine.control.prove_health()
    assert sglang_engine.control.weight_version() == 0
    expected = reference_logprobs(sglang_engine.model_dir, ids)
    assert prompt_logprobs(sglang_engine.url, ids) == pytest.approx(expected, abs=1e-4)


def test_published_weights_are_served_and_their_version_reported(sglang_engine: Any, other_weights: Path, restored_weights: None) -> None:
    ids = list(range(100, 130))
    control: EngineControl = sglang_engine.control
    generate(sglang_engine.url, ids, 4)  # the prefix is cached under the old weights
    control.pause("retract")
    control.load_folder(other_weights, 7)
    control.resume()
    assert control.weight_version() == 7
    expected = reference_logprobs(other_weights, ids)
    assert prompt_logprobs(sglang_engine.url, ids) == pytest.approx(expected, abs=1e-4)
    answer = generate(sglang_engine.url, ids, 3)
    assert answer["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]


def test_a_request_in_flight_keeps_its_tokens_and_tells_both_versions(
    sglang_engine: Any, other_weights: Path, restored_weights: None
) -> None:
    control: EngineControl = sglang_engine.control
    answers: list[dict[str, Any]] = []
    httpx.post(f"{sglang_engine.url}/slow_down", json={"forward_sleep_time": 0.02}).raise_for_status()
    try:
        request = threading.Thread(target=lambda: answers.append(generate(sglang_engine.url, [9, 8, 7], 60)))
        request.start()
        while control.load()["running"] == 0:
            time.sleep(0.01)
        time.sleep(0.3)
        control.pause("retract")
        control.load_folder(other_weights, 1)
        control.resume()
        request.join()
    finally:
        httpx.post(f"{sglang_engine.url}/slow_down", json={"forward_sleep_time": None}).raise_for_status()
    spans = answers[0]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 60
    assert len(answers[0]["output_ids"]) == 60


def test_a_folder_that_cannot_be_loaded_changes_nothing(sglang_engine: Any, tmp_path: Path) -> None:
    before = prompt_logprobs(sglang_engine.url, [1, 2, 3])
    with pytest.raises(EngineError, match="update_weights_from_disk: answered 400"):
        sglang_engine.control.load_folder(tmp_path / "nothing", 9)
    assert prompt_logprobs(sglang_engine.url, [1, 2, 3]) == pytest.approx(before, abs=1e-5)
    assert sglang_engine.control.weight_version() == 0


def test_memory_can_be_released_and_resumed(sglang_engine: Any) -> None:
    sglang_engine.control.release_memory()
    sglang_engine.control.resume_memory()
    sglang_engine.control.prove_health()


def test_an_aborted_request_keeps_what_it_had(sglang_engine: Any) -> None:
    answers: list[dict[str, Any]] = []
    rid = "0" * 31 + "1"
    request = threading.Thread(target=lambda: answers.append(generate(sglang_engine.url, [5, 6], 3000, rid=rid)))
    request.start()
    while sglang_engine.control.load()["running"] == 0:
        time.sleep(0.01)
    sglang_engine.control.abort(rid)
    request.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0]["output_ids"]) == len(answers[0]["meta_info"]["output_token_logprobs"])


def test_an_engine_starts_at_a_given_version_and_stops_without_a_trace(
    engine_fork_socket: Path, tiny_random_model: Path, free_port: Callable[[], int], tmp_path: Path
) -> None:
    import psutil

    engine = EngineProcess(
        "cell-0", tiny_random_model, free_port(), tmp_path / "engine.log", capacity=2, weight_version=4, fork_socket=engine_fork_socket
    )
    engine.start()
    engine.wait_ready()
    with EngineControl(engine.url) as control:
        assert control.weight_version() == 4
    family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    assert len(family) == 3
    engine.stop()
    assert not engine.alive()
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left


def test_a_bad_request_does_not_end_the_fork_server(engine_fork_socket: Path, tmp_path: Path) -> None:
    for line in (b"not json\n", b"{}\n", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(engine_fork_socket))
            connection.sendall(line)
    with pytest.raises(ForkServerError, match="log cannot be opened"):
        request_engine(engine_fork_socket, [], tmp_path / "no" / "folder" / "log")


@pytest.mark.slow
def test_without_its_fork_server_an_engine_starts_from_scratch(
    tiny_random_model: Path, free_port: Callable[[], int], tmp_path: Path
) -> None:
    engine = EngineProcess(
        "cell-0", tiny_random_model, free_port(), tmp_path / "engine.log", capacity=2, fork_socket=tmp_path / "nobody.sock"
    )
    engine.start()
    try:
        engine.wait_ready()
        with EngineControl(engine.url) as control:
            control.prove_health()
    finally:
        engine.stop()
    assert not engine.alive()


def test_an_engine_that_cannot_load_its_model_says_so(engine_fork_socket: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = EngineProcess("cell-0", tmp_path, free_port(), tmp_path / "engine.log", capacity=2, fork_socket=engine_fork_socket)
    engine.start()
    with pytest.raises(EngineDied, match="Traceback"):
        engine.wait_ready(60)


def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        EngineProcess("cell-0", tmp_path, 1, tmp_path / "engine.log", capacity=2).start()
