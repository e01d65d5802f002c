"""Start and stop SGLang engines as processes.

On CPU an engine runs SGLang's own code over the import stand-ins of `shim/`, either from scratch (about 14 CPU seconds) or as a fork of a
process that has already imported SGLang (`fork_server.py`: 1-3 seconds each, and the engines share its pages). On CUDA it is plain
`sglang.launch_server`. An engine holds nothing durable, so stopping one is killing its session.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from gyre_lib.config.errors import InputError
from gyre_lib.engines.control import EngineControl
from gyre_lib.engines.fork_server import ForkServerError, answers, request_engine

SHIM = Path(__file__).parent / "shim"
POLL_S = 0.1
LOG_TAIL_BYTES = 2000

log = logging.getLogger("gyre.engines")


class EngineDied(RuntimeError):
    """The engine's process ended, or never became ready; the message carries the end of its log."""


@dataclass
class EngineProcess:
    """One SGLang server on 127.0.0.1. `start` returns at once; `wait_ready` returns when the engine has proved that it generates."""

    engine_id: str
    model_dir: Path
    port: int
    log_path: Path
    capacity: int
    """Most requests running at once; more wait in the engine."""
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    max_context_tokens: int = 4096
    """Prompt and output of one request; the KV cache holds twice `capacity` of these."""
    weight_version: int = 0
    """What the weights in `model_dir` are; every response reports it."""
    threads: int = 1
    tensor_parallel: int = 1
    fork_socket: Path | None = None
    """Socket of the fork server; without it, or when it does not answer, the engine starts from scratch."""
    extra_arguments: Sequence[str] = field(default_factory=tuple)
    pid: int | None = None
    _process: psutil.Process | None = None
    _child: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> int:
        """Start the server; returns its process id, which also leads its session. Raises InputError for a folder without a model."""
        if not (self.model_dir / "config.json").is_file():
            raise InputError(f"{self.model_dir}: not a Hugging Face model folder (no config.json)")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        forked = self._forked()
        self.pid = forked if forked is not None else self._from_scratch()
        try:
            self._process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            raise EngineDied(f"{self.engine_id}: ended at once\n{self._log_tail()}") from None
        return self.pid

    def _forked(self) -> int | None:
        if self.fork_socket is None:
            return None
        try:
            return request_engine(self.fork_socket, self.arguments(), self.log_path)
        except ForkServerError as error:
            log.warning("%s starts from scratch, which takes longer: %s", self.engine_id, error)
            return None

    def _from_scratch(self) -> int:
        program = "gyre_lib.engines.cpu_server" if self.device == "cpu" else "sglang.launch_server"
        with self.log_path.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", program, *self.arguments()],
                env=engine_environment(self.device, self.threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self._child.pid

    def arguments(self) -> list[str]:
        """SGLang's command line for this engine."""
        arguments: dict[str, object] = {
            "model-path": self.model_dir,
            "device": self.device,
            "dtype": self.dtype,
            "host": "127.0.0.1",
            "port": self.port,
            "nccl-port": free_port(),
            "tp-size": self.tensor_parallel,
            "weight-version": self.weight_version,
            "random-seed": int.from_bytes(os.urandom(3)),  # engines must not sample alike
            "max-running-requests": self.capacity,
            "max-total-tokens": 2 * self.capacity * self.max_context_tokens,
            "log-level": "warning",
        }
        flags = ["--sleep-on-idle"]  # without it an idle scheduler takes a whole core
        if self.device == "cpu":
            arguments |= {"attention-backend": "torch_native", "mem-fraction-static": 0.2}
        else:
            flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]  # a cell's weights come back as they were
        return [text for name, value in arguments.items() for text in (f"--{name}", str(value))] + flags + list(self.extra_arguments)

    def alive(self) -> bool:
        """Whether the server's main process runs (a later process with the same id does not count)."""
        if self._child is not None and self._child.poll() is not None:
            return False
        try:
            return self._process is not None and self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Return once the engine takes requests, after the generation with which SGLang warms up. Raises EngineDied with the log's end."""
        deadline = time.monotonic() + timeout_s
        with EngineControl(self.url, timeout_s=10.0) as control:
            while not control.ready():
                if not self.alive():
                    raise EngineDied(f"{self.engine_id}: ended before it was ready\n{self._log_tail()}")
                if time.monotonic() > deadline:
                    raise EngineDied(f"{self.engine_id}: not ready after {timeout_s:g} s\n{self._log_tail()}")
                time.sleep(POLL_S)

    def stop(self, grace_s: float = 0.0) -> None:
        """End the server and its children; waits until they are gone. With `grace_s`, first ask it to drain for at most that long."""
        if not self.alive():
            return
        assert self.pid is not None
        if grace_s > 0:
            os.kill(self.pid, signal.SIGTERM)
            self._wait_gone(grace_s)
        if self.alive():
            os.killpg(self.pid, signal.SIGKILL)
            self._wait_gone(10.0)
        if self._child is not None:
            self._child.wait()

    def _wait_gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return "(no log)"


def start_fork_server(socket_path: Path, log_path: Path, threads: int = 1) -> "subprocess.Popen[bytes]":
    """Start the process that engines of this machine are forked from; ready when `fork_server_ready` says so (about 9 CPU seconds)."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gyre_lib.engines.fork_server", "--socket", str(socket_path)],
            env=engine_environment("cpu", threads),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_fork_server(socket_path: Path, process: "subprocess.Popen[bytes]", timeout_s: float = 240.0) -> None:
    """Return once the fork server listens. Raises EngineDied when it ends or does not come up in time."""
    deadline = time.monotonic() + timeout_s
    while not answers(socket_path):
        if process.poll() is not None:
            raise EngineDied(f"the engine fork server ended with code {process.returncode}; its log says why")
        if time.monotonic() > deadline:
            raise EngineDied(f"the engine fork server was not up after {timeout_s:g} s")
        time.sleep(POLL_S)


def engine_environment(device: str, threads: int) -> dict[str, str]:
    """Environment of an engine process: this one's, without what belongs to a training rank, and on CPU with the stand-ins."""
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}}
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        inherited = os.environ.get("PYTHONPATH")
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "models_to_register",
            "PYTHONPATH": os.pathsep.join([str(SHIM), *([inherited] if inherited else [])]),
        }
    return environment


def free_port() -> int:
    """A TCP port that nothing on 127.0.0.1 holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
