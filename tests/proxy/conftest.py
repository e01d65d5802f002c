from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted import Harness, ProxyProcess, harness

from gyre_lib.benchmarks.proxy_rig.small_tokenizer import write_small_model
from proxy_app.rendering import Rendering


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def qwen3(small_model: Path) -> Rendering:
    return Rendering(small_model, "qwen3")


@pytest.fixture(scope="session")
def proxy(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """One proxy for all tests that do not stop it; each test has its own executions and engines."""
    running = ProxyProcess(tmp_path_factory.mktemp("run"), small_model, "qwen3")
    yield running
    running.stop()


@pytest.fixture
def start(proxy: ProxyProcess, small_model: Path, qwen3: Rendering) -> Iterator[Callable[..., Harness]]:
    """start(script, …, **limits) -> Harness"""
    with ExitStack() as stack:

        def begin(*scripts: Any, **limits: Any) -> Harness:
            return stack.enter_context(harness(proxy, small_model, qwen3, *scripts, **limits))

        yield begin
