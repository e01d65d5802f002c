"""Starts and watches the processes of one run on one machine: coordinator, proxy, engines, training ranks, worker.

`python -m gyre_lib.coordination.supervisor --run-dir DIR`. What dies is started again: the coordinator replays its journal, a proxy rebuilds
its trees, an engine comes back with the published weights. Ranks of one run share communication groups, so a lost core means new ranks
for all cells (they resume from the last committed step). A lost satellite leaves the others training; when the next burst begins, all ranks
start again, so that it can join the batches to come.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.process_log import configure_logging
from gyre_lib.config.run_config import RunConfig, load_config
from gyre_lib.coordination.client import CoordinatorAddress, CoordinatorClient
from gyre_lib.coordination.services_file import ServiceProcess, Services
from gyre_lib.engines.launcher import EngineDied, EngineProcess, free_port, start_fork_server, wait_fork_server
from gyre_lib.scheduling.scheduler import BATCH, ROLLOUT, TRAINING

WATCH_S = 0.5
STOP_GRACE_S = 10.0
MAX_RESTARTS = 20
MAX_RETURNS = 3
"""How often a cell whose ranks died as a satellite's is given new ones: where it always dies, the others should not be disturbed for it."""
log = logging.getLogger("gyre.supervisor")


@dataclass
class Child:
    """A supervised Python process of ours and how to start it again."""

    name: str
    command: list[str]
    address: str
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    restarts: int = 0


class Supervisor:
    def __init__(self, layout: RunLayout, config: RunConfig) -> None:
        self.layout = layout
        self.config = config
        self.secret = _run_secret(layout)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = CoordinatorClient(CoordinatorAddress(self.url, self.secret))
        self.children: dict[str, Child] = {}
        self.engines: dict[str, EngineProcess] = {}
        self.engine_restarts: dict[str, int] = {}
        self.fork_server: subprocess.Popen[bytes] | None = None
        self.stopping = threading.Event()
        self.given_up = ""
        self.rank_restarts = 0
        self.lost_satellites: dict[int, int] = {}
        """Cell: the burst in which its ranks died."""
        self.satellite_returns: Counter[int] = Counter()
        self._files = threading.Lock()
        me = psutil.Process()
        self.services = Services(me.pid, me.create_time(), coordinator_url=self.url, secret=self.secret)

    # -- start

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        try:
            self._start_all()
            self.services.ready = True
            self._write()
            while not self.stopping.wait(WATCH_S):
                self._watch()
            if self.given_up:
                raise RuntimeError(self.given_up)
            return 0
        except Exception as error:
            log.exception("the services could not be kept up")
            self.services.problem = " ".join(str(error).split())[:500]
            return 1
        finally:
            self._stop_all()

    def _start_all(self) -> None:
        for folder in (self.layout.logs, self.layout.sockets, self.layout.artifacts, self.layout.checkpoints, self.layout.published):
            folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._start(Child("coordinator", self._python("gyre_lib.coordination.service", port=self.port), self.url, self._environment()))
        threading.Thread(target=self._keep_coordinator, name="coordinator", daemon=True).start()
        self._start_ranks()
        self._start_fork_server()
        self.client.wait_healthy()
        self._start_proxy()
        version = self._published_version()
        for cell in range(self.config.cells.count):
            self._start_engine(f"cell-{cell}", version)
        for number in range(self.config.cells.standalone_engines):
            self._start_engine(f"standalone-{number}", version)
        for engine_id in list(self.engines):
            self._engine_ready(engine_id, version)
        self._start_worker()

    def _start_proxy(self) -> None:
        port, control_port = free_port(), free_port()
        options = {
            "coordinator": self.url,
            "port": port,
            "control-port": control_port,
            "proxy-id": "proxy-0",
            "uds": self.layout.sockets / "proxy-0.sock",
            "model": self.config.model.path,
            "renderer": self.config.model.renderer,
            "retry-budget-s": self.config.rollout.request_retry_budget_s,
            "segment-mib": self.config.storage.segment_mib,
        }
        command = self._python("proxy_app", **options)
        self._start(Child("proxy-0", command, f"http://127.0.0.1:{port}", self._environment()))

    def _start_worker(self) -> None:
        command = self._python("gyre_lib.rollout.worker", slots=self.config.rollout.worker_slots)
        self._start(Child("worker-0", command, "", self._environment()))

    def _start_ranks(self) -> None:
        per_cell, cells = self.config.cells.ranks_per_cell, self.config.cells.count
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(per_cell * cells)}
        for cell in range(cells):
            for shard in range(per_cell):
                command = self._python("gyre_lib.cells.rank", coordinator=self.url, cell=cell, shard=shard)
                environment = {**self._environment(), **rendezvous, "RANK": str(cell * per_cell + shard)}
                self._start(Child(_rank_name(cell, shard), command, "", environment))

    def _start_fork_server(self) -> None:
        if self.config.cells.device != "cpu":
            return
        path = self.layout.root / "fork.sock"
        path.unlink(missing_ok=True)
        self.fork_server = start_fork_server(path, self.layout.logs / "fork-server.log", self.config.cells.threads_per_process)
        wait_fork_server(path, self.fork_server)

    def _start_engine(self, engine_id: str, version: int) -> None:
        c, r = self.config.cells, self.config.rollout
        engine = EngineProcess(
            engine_id=engine_id,
            model_dir=self._model_of(version),
            port=self.engines[engine_id].port if engine_id in self.engines else free_port(),
            log_path=self.layout.logs / f"engine-{engine_id}.log",
            capacity=self._capacity(engine_id),
            dtype=self.config.model.dtype,
            device=c.device,
            max_context_tokens=r.max_context_tokens,
            weight_version=version,
            threads=c.threads_per_process,
            tensor_parallel=1 if c.device == "cpu" else c.tensor_parallel,
            fork_socket=self.layout.root / "fork.sock" if c.device == "cpu" else None,
        )
        engine.start()
        self.engines[engine_id] = engine
        self._write()

    def _engine_ready(self, engine_id: str, version: int) -> None:
        engine = self.engines[engine_id]
        engine.wait_ready()
        self.client.engine_up(engine_id, engine.url, _cell_of(engine_id), self._capacity(engine_id), version)

    def _capacity(self, engine_id: str) -> int:
        c = self.config.cells
        return -(-c.standalone_capacity // c.standalone_engines) if engine_id.startswith("standalone") else c.capacity

    def _published_version(self) -> int:
        return int(self.client.state()["published_version"])

    def _model_of(self, version: int) -> Path:
        """Version 0 is the configured model; every later published version has been exported when it was published."""
        return self.layout.published / str(version) if version else Path(self.config.model.path).resolve()

    # -- watch

    def _keep_coordinator(self) -> None:
        """Restart the coordinator in a thread of its own: whatever else is restarted has to be told to it."""
        while not self.stopping.wait(WATCH_S):
            child = self.children["coordinator"]
            if child.process is not None and child.process.poll() is not None:
                try:
                    self._restart(child)
                except RuntimeError as error:
                    self.given_up = str(error)
                    self.stopping.set()

    def _watch(self) -> None:
        others = [child for name, child in list(self.children.items()) if name != "coordinator"]
        dead = [child for child in others if child.process is not None and child.process.poll() is not None]
        ranks = [child for child in dead if child.name.startswith("rank-")]
        for child in dead:
            if child not in ranks:
                self._restart(child)
        if ranks:
            self._ranks_died(ranks)
        elif self.lost_satellites and self._satellites_may_return():
            self._bring_satellites_back()
        for engine_id, engine in list(self.engines.items()):
            if not engine.alive():
                self._engine_died(engine_id)

    def _restart(self, child: Child) -> None:
        code = child.process.returncode if child.process else None
        child.restarts += 1
        log.warning("%s ended with code %s; restart %d", child.name, code, child.restarts)
        if child.restarts > MAX_RESTARTS:
            raise RuntimeError(f"{child.name} ended {child.restarts} times, last with code {code}; see {self.layout.logs / child.name}.log")
        self._start(child)

    def _ranks_died(self, ranks: list[Child]) -> None:
        cells = sorted({int(child.name.split("-")[1]) for child in ranks})
        for cell in cells:
            self._stop_children([c for c in self.children.values() if c.name.startswith(f"rank-{cell}-")])
            self.client.cell_down(cell, "its ranks died")
        if 0 not in cells:
            for cell in cells:
                for name in [name for name in self.children if name.startswith(f"rank-{cell}-")]:
                    del self.children[name]
            log.warning("ranks of cells %s died: their engines serve on, the others train on", cells)
            burst = int(self.client.state()["burst"])
            self.lost_satellites |= {cell: burst for cell in cells if self.satellite_returns[cell] < MAX_RETURNS}
            self._write()
            return
        self.rank_restarts += 1
        if self.rank_restarts > MAX_RESTARTS:
            raise RuntimeError(f"the core's ranks ended {self.rank_restarts} times; see {self.layout.logs / ranks[0].name}.log")
        log.warning("the core's ranks died: all ranks start again from the last committed step")
        self._restart_ranks("the core died")

    def _restart_ranks(self, reason: str) -> None:
        self._stop_children([child for child in self.children.values() if child.name.startswith("rank-")])
        for cell in range(self.config.cells.count):
            self.client.cell_down(cell, reason)
        self.lost_satellites.clear()
        self._start_ranks()

    def _satellites_may_return(self) -> bool:
        """While no cell trains, or at the beginning of a later burst: the core repeats at most what it has done of that burst's first batch."""
        state = self.client.state()
        core, *satellites = state["roles"]
        if state["run_done"] or any(role != ROLLOUT for role in satellites):
            return False
        return core == ROLLOUT or (core == TRAINING and state["phase"] == BATCH and state["burst"] > max(self.lost_satellites.values()))

    def _bring_satellites_back(self) -> None:
        cells = sorted(self.lost_satellites)
        self.satellite_returns.update(cells)
        log.warning("all ranks start again, so that cells %s can train again", cells)
        self._restart_ranks("its ranks start again")

    def _engine_died(self, engine_id: str) -> None:
        self.engine_restarts[engine_id] = self.engine_restarts.get(engine_id, 0) + 1
        if self.engine_restarts[engine_id] > MAX_RESTARTS:
            raise RuntimeError(f"engine {engine_id} ended {self.engine_restarts[engine_id]} times; see its log")
        log.warning("engine %s died; restart %d", engine_id, self.engine_restarts[engine_id])
        self.client.engine_down(engine_id, "its process died")
        version = self._published_version()
        try:
            self._start_engine(engine_id, version)
            self._engine_ready(engine_id, version)
        except EngineDied as error:
            log.warning("engine %s did not come up: %s", engine_id, error)

    # -- processes

    def _python(self, module: str, **options: Any) -> list[str]:
        given = {"run-dir": self.layout.root, **options}
        return [sys.executable, "-m", module, *(text for name, value in given.items() for text in (f"--{name}", str(value)))]

    def _environment(self) -> dict[str, str]:
        threads = str(self.config.cells.threads_per_process)
        return {
            **os.environ,
            "GYRE_CONTROL_SECRET": self.secret,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TORCH_COMPILE_DISABLE": "1",
            "MC_LOG_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": _loopback(),
            "PYTHONUNBUFFERED": "1",
        }

    def _start(self, child: Child) -> None:
        with (self.layout.logs / f"{child.name}.log").open("ab") as output:
            child.process = subprocess.Popen(
                child.command, env=child.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.children[child.name] = child
        self._write()

    def _stop_children(self, children: list[Child]) -> None:
        running = [child.process for child in children if child.process is not None and child.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _stop_all(self) -> None:
        order = ("worker", "proxy", "rank")
        for kind in order:
            self._stop_children([child for child in self.children.values() if child.name.startswith(kind)])
        for engine in self.engines.values():
            engine.stop()
        if self.fork_server is not None and self.fork_server.poll() is None:
            self.fork_server.terminate()
            self.fork_server.wait()
        self._stop_children([child for child in self.children.values() if child.name == "coordinator"])
        (self.layout.root / "fork.sock").unlink(missing_ok=True)
        if self.services.problem:
            self._write()
        else:
            self.layout.services.unlink(missing_ok=True)

    def _write(self) -> None:
        with self._files:
            self._write_services()

    def _write_services(self) -> None:
        self.services.processes = [
            ServiceProcess(
                child.name,
                child.process.pid,
                _created_s(child.process.pid),
                child.address,
                f"{self.layout.logs / child.name}.log",
                child.restarts,
            )
            for child in list(self.children.values())
            if child.process is not None
        ] + [
            ServiceProcess(
                f"engine-{engine_id}",
                engine.pid,
                _created_s(engine.pid),
                engine.url,
                str(engine.log_path),
                self.engine_restarts.get(engine_id, 0),
            )
            for engine_id, engine in self.engines.items()
            if engine.pid is not None
        ]
        if self.fork_server is not None:
            pid, log_path = self.fork_server.pid, f"{self.layout.logs / 'fork-server'}.log"
            self.services.processes.append(ServiceProcess("fork-server", pid, _created_s(pid), "", log_path))
        self.services.write(self.layout.services)


def _rank_name(cell: int, shard: int) -> str:
    return f"rank-{cell}-{shard}"


def _cell_of(engine_id: str) -> int:
    return -1 if engine_id.startswith("standalone") else int(engine_id.split("-")[1])


def _created_s(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _loopback() -> str:
    """The loopback interface's name (gloo wants a name)."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses)
    )


def _run_secret(layout: RunLayout) -> str:
    """Made once per run: the executions' keys derive from it, so a restart issues the same ones."""
    path = layout.root / "secret"
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    layout = RunLayout(parser.parse_args().run_dir.resolve())
    configure_logging()
    sys.exit(Supervisor(layout, load_config(layout.config)).run())


if __name__ == "__main__":
    main()
