"""A worker: claims launch orders, runs each execution (sandbox and harness) in a thread, and reports how it ended.

`python -m gyre_lib.rollout.worker --run-dir DIR --slots N`. It never talks to an engine, and what it runs never talks to the coordinator.
"""

import argparse
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.process_log import configure_logging
from gyre_lib.coordination.client import CoordinatorClient, find_coordinator
from gyre_lib.rollout.execution import LaunchOrder, run_execution
from gyre_lib.rollout.outcomes import outcome_name

HEARTBEAT_S = 2.0
CLAIM_WAIT_S = 2.0
log = logging.getLogger("gyre.worker")


class Worker:
    def __init__(self, layout: RunLayout, client: CoordinatorClient, slots: int) -> None:
        self._layout = layout
        self._client = client
        self._slots = slots
        self._worker_id = f"worker-{uuid.uuid4().hex[:8]}"
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._freed = threading.Event()
        self.stopping = threading.Event()

    def run(self) -> None:
        """Work until told to stop; then cancel what runs and wait for it."""
        threading.Thread(target=self._heartbeat, daemon=True).start()
        while not self.stopping.is_set():
            free = self._slots - len(self._running)
            if free <= 0:
                self._freed.wait(0.5)
                self._freed.clear()
                continue
            for order in self._client.claim_executions(self._worker_id, free, CLAIM_WAIT_S):
                self._start(order)
        with self._lock:
            for cancelled in self._running.values():
                cancelled.set()
        while self._running:
            time.sleep(0.05)

    def _start(self, order: dict[str, Any]) -> None:
        cancelled = threading.Event()
        with self._lock:
            self._running[order["execution_id"]] = cancelled
        threading.Thread(target=self._execute, args=(order, cancelled), name=order["execution_id"]).start()

    def _execute(self, order: dict[str, Any], cancelled: threading.Event) -> None:
        execution_id = order["execution_id"]
        try:
            with tempfile.TemporaryDirectory(prefix="gyre-") as work_dir:
                result = run_execution(LaunchOrder.from_json(order), Path(work_dir), self._layout.artifacts / execution_id, cancelled)
            outcome, detail, digest = outcome_name(result.outcome), result.detail, result.artifact_digest
        except Exception as error:
            # Whatever goes wrong around an execution is the infrastructure's failure, never the policy's.
            log.exception("execution %s", execution_id)
            outcome, detail, digest = "InfrastructureFailed", f"{type(error).__name__}: {error}", ""
        try:
            self._client.ended(execution_id, outcome, detail, execution_id if digest else "", digest)
        finally:
            with self._lock:
                del self._running[execution_id]
            self._freed.set()

    def _heartbeat(self) -> None:
        while not self.stopping.wait(HEARTBEAT_S):
            with self._lock:
                running = list(self._running)
            try:
                cancel = self._client.heartbeat(self._worker_id, running)
            except Exception:
                # The next one may get through; without heartbeats a healthy worker would be taken for dead.
                log.exception("heartbeat")
                continue
            for execution_id in cancel:
                with self._lock:
                    cancelled = self._running.get(execution_id)
                if cancelled is not None:
                    cancelled.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    arguments = parser.parse_args()
    configure_logging()
    # The control secret stays with this process: nothing that it starts inherits it.
    os.environ.pop("GYRE_CONTROL_SECRET", None)
    layout = RunLayout(arguments.run_dir)
    worker = Worker(layout, CoordinatorClient(find_coordinator(layout)), arguments.slots)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stopping.set())
    worker.run()


if __name__ == "__main__":
    main()
