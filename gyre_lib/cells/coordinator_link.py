"""A rank's side of the coordinator's API: commands in, reports out, micro-steps claimed.

A coordinator that is away is waited for: it may be restarting, and every call is idempotent on its side. Its answers carry the life they
come from (`x-gyre-life`), because a coordinator that has restarted hands out the open batch anew, and a cell must then not keep the
gradients it accumulated for the earlier life.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from gyre_lib.training.micro_steps import Closed, MicroStep, Wait, from_arrow

LONG_POLL_S = 20.0
RETRY_S = 0.5
LONGEST_WAIT_S = 0.2
"""A cell that finds no work asks less and less often, down to this: on a small machine the asking itself takes time from the rollouts."""
REFUSALS = 5
"""So many server errors in a row are taken for an answer."""

log = logging.getLogger("gyre.rank")


class CoordinatorRefused(RuntimeError):
    """The coordinator answered with an error; the message holds it."""


class CoordinatorLink:
    """One rank's connection. Calls block until the coordinator answers; raises CoordinatorRefused for an error that is an answer."""

    def __init__(self, url: str, cell: int, shard: int, secret: str) -> None:
        self.cell = cell
        self.shard = shard
        self._http = httpx.Client(base_url=url, headers={"x-gyre-control": secret}, timeout=LONG_POLL_S + 20.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def say_ready(self, pid: int) -> None:
        """Tell that this rank is up and begins with an empty sequence of commands."""
        self.call("POST", f"/cells/{self.cell}/ready", json={"shard": self.shard, "pid": pid})

    def commands(self, after: int) -> list[dict[str, Any]]:
        """Commands later than `after`, in order; waits for one, and returns an empty list when none came for a while."""
        answer = self.call("GET", f"/cells/{self.cell}/commands", params={"after": after, "timeout_s": LONG_POLL_S})
        return answer.json()["commands"]

    def report(self, report: Mapping[str, Any]) -> None:
        self.call("POST", f"/cells/{self.cell}/reports", json={"shard": self.shard, **report})

    def call(
        self, method: str, path: str, accept: Callable[[httpx.Response], bool] = lambda answer: False, **arguments: Any
    ) -> httpx.Response:
        """The answer to a request, repeated until there is one. `accept` says which error answers the caller wants to see itself."""
        refusals = 0
        waiting = False
        while True:
            try:
                answer = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if not waiting:
                    log.warning("the coordinator does not answer (%s); waiting for it", type(error).__name__)
                waiting = True
                time.sleep(RETRY_S)
                continue
            if answer.is_success or accept(answer):
                return answer
            refusals += 1
            if answer.status_code < 500 or refusals >= REFUSALS:
                raise CoordinatorRefused(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
            time.sleep(RETRY_S)


class HttpMicroStepSource:
    """Claims the micro-steps of one batch for a cell (training.micro_steps.MicroStepSource), as part of one train command."""

    def __init__(self, link: CoordinatorLink, step: int, command_id: str) -> None:
        self._link = link
        self._asked = {"cell": link.cell, "step": step, "command_id": command_id}
        self._life: str | None = None
        self._wait_s = 0.0
        self.superseded = False
        """The coordinator has restarted since the first claim: it counts nothing of what this source has claimed."""

    def claim(self) -> MicroStep | Wait | Closed:
        """Closed also once the source is superseded, so that the pipeline drains in order."""
        if self.superseded:
            return Closed(0)
        answer = self._link.call("POST", "/micro_steps/claim", accept=lambda answer: answer.status_code == 410, json=self._asked)
        if self._is_of_another_life(answer):
            return Closed(0)
        if answer.status_code == 410:
            return Closed(answer.json()["executions"])
        if answer.status_code == 204:
            self._wait_s = min(2 * self._wait_s or float(answer.headers["x-gyre-wait-s"]), LONGEST_WAIT_S)
            return Wait(self._wait_s)
        self._wait_s = 0.0
        return from_arrow(answer.content)

    def done(self, micro_step: MicroStep, stats: Mapping[str, Any]) -> None:
        if self.superseded:
            return
        body = {**self._asked, "micro_step_id": micro_step.micro_step_id, "stats": dict(stats)}
        self._is_of_another_life(self._link.call("POST", "/micro_steps/done", accept=self._is_of_another_life, json=body))

    def _is_of_another_life(self, answer: httpx.Response) -> bool:
        life = answer.headers.get("x-gyre-life")
        if self._life is None:
            self._life = life
        elif life != self._life:
            self.superseded = True
        return self.superseded
