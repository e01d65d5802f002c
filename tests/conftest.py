"""Fixtures that several folders share: free ports, and one real SGLang engine for the whole session."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No time limit per example: these tests say what is right, not how fast it is, and machines are shared.
settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port nobody holds at the moment."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def tiny_random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random Qwen3 of two layers (float32, vocabulary 512) with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-random-qwen3")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=0,
        pad_token_id=0,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine_fork_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a running engine fork server: every further engine of the session starts in seconds."""
    from gyre_lib.engines.launcher import start_fork_server, wait_fork_server

    folder = tmp_path_factory.mktemp("engine-forks")
    process = start_fork_server(folder / "engines.sock", folder / "engine-forks.log")
    try:
        wait_fork_server(folder / "engines.sock", process)
        yield folder / "engines.sock"
    finally:
        process.terminate()
        process.wait()


@dataclass
class RunningEngine:
    """A real SGLang engine, float32, weights version 0 at start."""

    url: str
    model_dir: Path
    control: Any
    process: Any


@pytest.fixture(scope="session")
def sglang_engine(
    engine_fork_socket: Path, tiny_random_model: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """The session's SGLang engine (`.url`, `.model_dir`, `.control`). A test that changes its weights puts them back."""
    from gyre_lib.engines.control import EngineControl
    from gyre_lib.engines.launcher import EngineProcess

    engine = EngineProcess(
        engine_id="test-engine",
        model_dir=tiny_random_model,
        port=free_port(),
        log_path=tmp_path_factory.mktemp("engine") / "engine.log",
        capacity=16,
        fork_socket=engine_fork_socket,
    )
    engine.start()
    try:
        engine.wait_ready()
        with EngineControl(engine.url) as control:
            yield RunningEngine(engine.url, engine.model_dir, control, engine)
    finally:
        engine.stop()
