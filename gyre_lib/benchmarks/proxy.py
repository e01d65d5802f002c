"""The proxy under load: a real proxy process that renders and records durably, in front of an engine that answers at once.

Every reply is checked by the load generator. The direct line (the same generator on the engine's own /generate) is measured beside each
cell. Where there are two cores, the proxy has one and the generator and the engine share the other.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_lib.benchmarks.proxy_rig.small_tokenizer import write_small_model
from gyre_lib.benchmarks.rows import BenchRow

SECRET = "bench"
KEYS = 4000
STREAM_PEER_RATE = 37.8
"""Requests per second of the better peer (rllm-model-gateway) at 64 sessions, 2k tokens, streams of 128 events; LiteLLM: 9.9."""


@dataclass
class Rig:
    """A running engine and proxies."""

    engine_port: int
    ports: list[int]
    pids: list[int]
    next_key: int = 0

    def load(
        self, history: str, sessions: int, seconds: float, *, direct: bool = False, stream: bool = False, warm: bool = False, proxy: int = 0
    ) -> Any:
        command = [sys.executable, "-m", "gyre_lib.benchmarks.proxy_rig.load", "--history", history, "--sessions", str(sessions)]
        command += [
            "--port",
            str(self.engine_port if direct else self.ports[proxy]),
            "--seconds",
            str(seconds),
            "--first-key",
            str(self.next_key),
        ]
        command += ["--watch", str(self.pids[proxy])]
        command += ["--direct"] * direct + ["--stream"] * stream + ["--warm"] * warm
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, preexec_fn=_on_core(0)).stdout)
        if not direct:
            self.next_key += 1500
        if result["errors"]:
            raise RuntimeError(f"{history}, {sessions} sessions: {result['errors']} errors, the first: {result['first_error']}")
        return result


def run(quick: bool = False) -> list[BenchRow]:
    """Rows of rate, CPU, added latency, streaming and scaling. `quick`: short runs of the cells that have targets."""
    rows: list[BenchRow] = []
    seconds = 1.0 if quick else 3.0
    with rig(1) as one:
        one.load("2k", 8, 1.0)
        for history in ("2k", "100k") if quick else ("2k", "20k", "100k"):
            rows += _cells(one, history, seconds, quick)
        rows += _streaming(one, seconds)
    rows += _rendering()
    if not quick:
        rows += _scaling(seconds)
    return rows


def _cells(one: Rig, history: str, seconds: float, quick: bool) -> list[BenchRow]:
    rate_target = {"2k": 350.0, "100k": 150.0}.get(history)
    cpu_target = {"2k": 3.0, "100k": 7.0}.get(history)
    rows = []
    direct = one.load(history, 64, seconds, direct=True)
    many = one.load(history, 64, seconds, warm=True)
    name = f"64 sessions, {history}"
    rows.append(_row(f"{name}: rate", many["rate"], "req/s", rate_target, at_least=True, baseline=direct["rate"]))
    rows.append(_row(f"{name}: CPU", many["cpu_s_per_1000"], "CPU-s/1000", cpu_target, at_least=False))
    rows.append(BenchRow(f"{name}: body", many["mean_body_kb"], "KiB"))
    if not (quick and history != "2k"):
        direct_one = one.load(history, 1, seconds, direct=True)
        single = one.load(history, 1, seconds, warm=True)
        added = single["p50_ms"] - direct_one["p50_ms"]
        rows.append(_row(f"1 session, {history}: added p50", added, "ms", 4.0 if history == "2k" else None, at_least=False))
        rows.append(BenchRow(f"1 session, {history}: p99", single["p99_ms"], "ms", baseline=direct_one["p99_ms"]))
    return rows


def _streaming(one: Rig, seconds: float) -> list[BenchRow]:
    many = one.load("2k", 64, seconds, stream=True, warm=True)
    single = one.load("2k", 1, seconds, stream=True, warm=True)
    target = 10 * STREAM_PEER_RATE
    return [
        _row("64 sessions, 2k, 128 events: rate", many["rate"], "req/s", target, at_least=True, baseline=STREAM_PEER_RATE),
        BenchRow("64 sessions, 2k, 128 events: CPU", many["cpu_s_per_1000"], "CPU-s/1000"),
        _row("1 session, 2k, 128 events: p50", single["p50_ms"], "ms", 38.0, at_least=False),
        _row(
            "1 session, 2k, 128 events: share at 38-48 ms", single["stalls"] / max(1, single["requests"]), "fraction", 0.1, at_least=False
        ),
    ]


def _rendering() -> list[BenchRow]:
    """Rendering one turn's new message behind a short and behind a long history: the same work."""
    from gyre_lib.trajectories.history import Part, supplied
    from gyre_lib.trajectories.trajectory_tree import TAIL_TOKENS
    from proxy_app.rendering import Rendering

    with tempfile.TemporaryDirectory() as folder:
        rendering = Rendering(write_small_model(Path(folder)), "qwen3")
    message = [supplied([Part("user", "the tests pass now; go on with the next file " * 20)])]
    medians = []
    for length in (2_000, 100_000):
        path = [17] * length
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            rendering.follow(path[-TAIL_TOKENS:], [40, rendering.stop_token_ids[0]], message)
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times))
    return [
        BenchRow("rendering a turn after 100k tokens", medians[1] * 1e3, "ms", baseline=medians[0] * 1e3),
        _row("rendering a turn: 100k over 2k", medians[1] / medians[0], "ratio", 1.5, at_least=False),
    ]


def _scaling(seconds: float) -> list[BenchRow]:
    """Two workers, executions pinned to one each, against one worker (meaningful with four cores or more)."""
    with rig(2) as two:
        alone = two.load("2k", 32, seconds, warm=True)
        command = [sys.executable, "-c", "import sys; from gyre_lib.benchmarks.proxy_rig.load import main; main(sys.argv[1:])"]
        jobs = []
        for proxy in range(2):
            options = [
                "--port",
                str(two.ports[proxy]),
                "--sessions",
                "32",
                "--seconds",
                str(seconds),
                "--warm",
                "--first-key",
                str(two.next_key),
            ]
            two.next_key += 1500
            jobs.append(subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True))
        together = sum(json.loads(job.communicate()[0])["rate"] for job in jobs)
    cores = len(os.sched_getaffinity(0))
    target = 1.5 if cores >= 4 else None
    return [_row(f"two workers over one ({cores} cores)", together / alone["rate"], "ratio", target, at_least=True)]


def _row(name: str, value: float, unit: str, target: float | None, *, at_least: bool, baseline: float | None = None) -> BenchRow:
    if target is None:
        return BenchRow(name, value, unit, baseline=baseline)
    ok = value >= target if at_least else value <= target
    return BenchRow(name, value, unit, f"{'>=' if at_least else '<='} {target:g}", ok, baseline)


@contextmanager
def rig(proxies: int) -> Iterator[Rig]:
    """An engine and proxy processes on free ports, with keys `bench-0` … for KEYS executions."""
    from gyre_lib.benchmarks.proxy_rig.ports import free_ports

    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        root = Path(folder)
        model = write_small_model(root / "model")
        engine_port, *ports = free_ports(1 + 2 * proxies)
        environment = {**os.environ, "GYRE_CONTROL_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        engine_command = [sys.executable, "-m", "gyre_lib.benchmarks.mock_engine", "--model", str(model), "--port", str(engine_port)]
        processes = [subprocess.Popen(engine_command, preexec_fn=_on_core(0))]
        for index in range(proxies):
            command = [sys.executable, "-m", "proxy_app", "--run-dir", str(root / "run"), "--coordinator", "", "--model", str(model)]
            command += ["--port", str(ports[2 * index]), "--control-port", str(ports[2 * index + 1]), "--proxy-id", f"proxy-{index}"]
            log = (root / f"proxy-{index}.log").open("w")
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=_on_core(1) if proxies == 1 else None)
            )
        try:
            for port in (engine_port, *ports[::2]):
                _wait_for(f"http://127.0.0.1:{port}/health")
            for port in ports[1::2]:
                _push(port, engine_port)
            yield Rig(engine_port, ports[::2], [process.pid for process in processes[1:]])
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _push(control_port: int, engine_port: int) -> None:
    engine = {"engine_id": "mock", "url": f"http://127.0.0.1:{engine_port}", "serving": True, "weight_version": 0}
    limits = {"engine_id": "mock", "max_context_tokens": 400_000, "max_output_tokens": 4096, "temperature": 1.0, "train": True}
    executions = [
        {"execution_id": f"exec-{number}", "token_sha256": hashlib.sha256(f"bench-{number}".encode()).hexdigest(), **limits}
        for number in range(KEYS * 4)
    ]
    body = json.dumps({"version": 1, "full": True, "published_version": 0, "engines": [engine], "executions": executions}).encode()
    headers = {"content-type": "application/json", "x-gyre-control": SECRET}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{control_port}/control/table", body, headers)) as answer:
        answer.read()


def _wait_for(url: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _on_core(core: int) -> Any:
    """A child that stays on one core, where there are two or more."""
    cores = sorted(os.sched_getaffinity(0))

    def pin() -> None:
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[core]})

    return pin
