"""The one client of the coordinator's control API, for flows, workers and the command line (synchronous)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.coordination.services_file import read_services

LONG_POLL_S = 20.0
RETRY_S = 0.5


class CoordinatorUnavailable(RuntimeError):
    """The coordinator has not answered for longer than the patience given."""


class OperationFailed(RuntimeError):
    """The coordinator could not perform an action (for instance because a cell is down); asking again may work."""


@dataclass(frozen=True)
class CoordinatorAddress:
    url: str
    secret: str


def find_coordinator(layout: RunLayout) -> CoordinatorAddress:
    """Where a run's coordinator listens. Raises InputError when the run's services are not up."""
    services = read_services(layout)
    if services is None:
        raise InputError(f"{layout.root}: the services of this run are not up (gyre up)")
    return CoordinatorAddress(services.coordinator_url, services.secret)


class CoordinatorClient:
    """Calls are repeated while the coordinator is away (a restart takes seconds); every call is idempotent on its side."""

    def __init__(self, address: CoordinatorAddress, patience_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=address.url, headers={"x-gyre-control": address.secret}, timeout=LONG_POLL_S + 40.0)
        self._patience_s = patience_s

    def close(self) -> None:
        self._http.close()

    def state(self) -> dict[str, Any]:
        return self._call("GET", "/state")

    def stats(self) -> dict[str, int]:
        return self._call("GET", "/stats")

    def start_run(self) -> dict[str, Any]:
        return self._call("POST", "/run/start")

    def feed(self, after: int, timeout_s: float = LONG_POLL_S) -> dict[str, Any]:
        """`entries` later than `after` that are not done, and the coordinator's `life`: positions hold within one life."""
        return self._call("GET", "/feed", params={"after": after, "timeout_s": timeout_s})

    def perform(self, entry_id: str) -> dict[str, Any]:
        """Have an action performed, or attach to it; returns its result. Raises OperationFailed."""
        while True:
            answer = self._call("POST", f"/actions/{entry_id}/perform", params={"timeout_s": LONG_POLL_S})
            if answer["done"]:
                return answer["result"]

    def begin(self, entry_id: str) -> None:
        """Have an action performed without waiting for its end. Raises OperationFailed."""
        self._call("POST", f"/actions/{entry_id}/perform", params={"timeout_s": 0})

    def step(self, step: int) -> dict[str, Any]:
        return self._call("GET", f"/steps/{step}")

    def outstanding_groups(self) -> list[dict[str, Any]]:
        return self._call("GET", "/groups")["groups"]

    def group(self, group_id: str) -> dict[str, Any]:
        return self._call("GET", f"/groups/{group_id}")

    def claim_executions(self, worker_id: str, slots: int, timeout_s: float = LONG_POLL_S) -> list[dict[str, Any]]:
        return self._call("POST", f"/workers/{worker_id}/claim", json={"slots": slots}, params={"timeout_s": timeout_s})["orders"]

    def heartbeat(self, worker_id: str, running: list[str]) -> list[str]:
        """A sign of life, and what the worker runs; returns the executions that it shall cancel."""
        return self._call("POST", f"/workers/{worker_id}/heartbeat", json={"running": running})["cancel"]

    def ended(self, execution_id: str, outcome: str, detail: str, artifact_ref: str, artifact_digest: str) -> None:
        body = {"outcome": outcome, "detail": detail, "artifact_ref": artifact_ref, "artifact_digest": artifact_digest}
        self._call("POST", f"/executions/{execution_id}/ended", json=body)

    def execution(self, execution_id: str) -> dict[str, Any]:
        return self._call("GET", f"/executions/{execution_id}")

    def assessed(self, execution_id: str, assessment: dict[str, Any]) -> None:
        self._call("POST", f"/executions/{execution_id}/assessment", json=assessment)

    def benchmark(self, benchmark_id: str, task_paths: list[str], samples: int) -> dict[str, Any]:
        return self._call("POST", "/benchmarks", json={"benchmark_id": benchmark_id, "task_paths": task_paths, "samples": samples})

    def engine_up(self, engine_id: str, url: str, cell: int, capacity: int, weight_version: int) -> None:
        body = {"engine_id": engine_id, "url": url, "cell": cell, "capacity": capacity, "weight_version": weight_version}
        self._call("POST", "/engines", json=body)

    def engine_down(self, engine_id: str, reason: str) -> None:
        self._call("POST", f"/engines/{engine_id}/down", json={"reason": reason})

    def cell_down(self, cell: int, reason: str) -> None:
        self._call("POST", f"/cells/{cell}/down", json={"reason": reason})

    def wait_healthy(self) -> None:
        """Wait until the coordinator answers, within the patience."""
        self._call("GET", "/health")

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        problem = "no answer"
        for _ in self._attempts():
            try:
                response = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                problem = type(error).__name__
                continue
            if response.status_code >= 500:
                # Something that it needs is away for now (a proxy that restarts, say).
                problem = f"answered {response.status_code}: {response.text[:300]}"
                continue
            if response.status_code == 409:
                raise OperationFailed(response.json()["error"])
            response.raise_for_status()
            return response.json()
        raise CoordinatorUnavailable(f"coordinator at {self._http.base_url}, {method} {path}, for {self._patience_s:g} s: {problem}")

    def _attempts(self) -> Iterator[None]:
        end = time.monotonic() + self._patience_s
        while True:
            yield
            if time.monotonic() > end:
                return
            time.sleep(RETRY_S)
