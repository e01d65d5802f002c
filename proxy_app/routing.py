"""The routing table: which execution a token belongs to, which engine serves it, and the requests in flight on each engine.

The coordinator pushes versions of the table; having applied one is the acknowledgement. Requests on an engine that the new table no longer
gives them are aborted at the source and go on elsewhere with the tokens they have.
"""

import asyncio
import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Engine:
    engine_id: str
    url: str
    serving: bool
    weight_version: int


@dataclass(frozen=True, slots=True)
class ExecutionRoute:
    execution_id: str
    token_sha256: str
    engine_id: str
    max_context_tokens: int
    max_output_tokens: int
    temperature: float
    train: bool


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a request at an engine, as long as it is in flight."""

    execution_id: str
    engine: Engine
    rid: str
    fallback: bool = False
    """Its own engine had failed: it may stay where it is while that engine serves."""
    moved: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the table took the engine away from it."""


class UnknownToken(Exception):
    """No execution has this token."""


class ExecutionEnded(Exception):
    """The execution was closed; its token is revoked."""


class RoutingTable:
    """Everything the coordinator told this proxy. Used from one event loop only."""

    def __init__(self) -> None:
        self.version = -1
        self.pushes = 0
        self.published_version = 0
        self.engines: dict[str, Engine] = {}
        self.executions: dict[str, ExecutionRoute] = {}
        self.attempts: set[Attempt] = set()
        self.inflight: Counter[str] = Counter()
        self._by_token: dict[str, str] = {}
        self._ended_tokens: dict[str, str] = {}
        self._closed: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.version >= 0

    def apply(self, push: dict[str, Any]) -> list[str]:
        """Apply a push; a delta older than what is known is ignored. Returns the execution ids it closed.

        Raises KeyError, TypeError or ValueError for a push that is not one; nothing is applied then.
        """
        version, full = int(push["version"]), bool(push.get("full", False))
        engines = {
            row["engine_id"]: Engine(row["engine_id"], row["url"].rstrip("/"), bool(row["serving"]), int(row["weight_version"]))
            for row in push.get("engines", [])
        }
        executions = {row["execution_id"]: _route(row) for row in push.get("executions", [])}
        closed = [str(name) for name in push.get("closed", [])]
        if not full and version < self.version:
            return []
        self.published_version = int(push.get("published_version", self.published_version))
        if full:
            gone = [name for name in self.executions if name not in executions]
            closed = list(dict.fromkeys([*closed, *gone]))
            self.engines = engines
        else:
            self.engines.update(engines)
        for name, route in executions.items():
            if name not in closed:
                self._closed.discard(name)
                self.executions[name] = route
                self._by_token[route.token_sha256] = name
        for name in closed:
            self.close(name)
        self.version, self.pushes = version, self.pushes + 1
        for attempt in self.attempts:
            if not self._keeps(attempt) and not attempt.moved.done():
                attempt.moved.set_result(None)
        self._changed.set()
        self._changed = asyncio.Event()
        return closed

    def close(self, execution_id: str) -> None:
        """Revoke an execution's token."""
        self._closed.add(execution_id)
        route = self.executions.pop(execution_id, None)
        if route is not None:
            self._by_token.pop(route.token_sha256, None)
            self._ended_tokens[route.token_sha256] = execution_id

    def authenticate(self, token: bytes) -> ExecutionRoute:
        """The execution of a token. Only digests are compared, in constant time. Raises UnknownToken, ExecutionEnded."""
        sha = hashlib.sha256(token).hexdigest()
        name = self._by_token.get(sha)
        if name is not None and hmac.compare_digest(self.executions[name].token_sha256, sha):
            return self.executions[name]
        if sha in self._ended_tokens:
            raise ExecutionEnded(self._ended_tokens[sha])
        raise UnknownToken

    def choose(self, execution_id: str, avoid: frozenset[str]) -> Engine | None:
        """The engine for an execution's next try: its own if it serves; after a failure there any other that serves; None: wait."""
        route = self.executions.get(execution_id)
        if route is None:
            raise ExecutionEnded(execution_id)
        own = self.engines.get(route.engine_id)
        if own is None or not own.serving:
            return None
        if own.engine_id not in avoid:
            return own
        others = [engine for engine in self.engines.values() if engine.serving and engine.engine_id not in avoid]
        return min(others, key=lambda engine: (self.inflight[engine.engine_id], engine.engine_id)) if others else None

    async def wait_change(self, timeout_s: float) -> None:
        """Return when a push was applied, or after `timeout_s`."""
        changed = self._changed
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except TimeoutError:
            return

    def begin(self, attempt: Attempt) -> None:
        self.attempts.add(attempt)
        self.inflight[attempt.engine.engine_id] += 1

    def end(self, attempt: Attempt) -> None:
        self.attempts.discard(attempt)
        self.inflight[attempt.engine.engine_id] -= 1

    def _keeps(self, attempt: Attempt) -> bool:
        engine = self.engines.get(attempt.engine.engine_id)
        route = self.executions.get(attempt.execution_id)
        if engine is None or not engine.serving or engine.url != attempt.engine.url:
            return False
        return route is not None and (attempt.fallback or route.engine_id == engine.engine_id)


def _route(row: dict[str, Any]) -> ExecutionRoute:
    route = ExecutionRoute(
        execution_id=str(row["execution_id"]),
        token_sha256=str(row["token_sha256"]).lower(),
        engine_id=str(row["engine_id"]),
        max_context_tokens=int(row["max_context_tokens"]),
        max_output_tokens=int(row["max_output_tokens"]),
        temperature=float(row["temperature"]),
        train=bool(row.get("train", True)),
    )
    if len(route.token_sha256) != 64 or route.max_context_tokens < 2 or route.max_output_tokens < 1 or route.temperature < 0:
        raise ValueError(f"execution {route.execution_id}: impossible route")
    return route


def bearer(headers: dict[bytes, bytes]) -> bytes:
    """The key of a request: `x-api-key`, or `authorization: Bearer …`; empty when there is none."""
    key = headers.get(b"x-api-key", b"")
    if key:
        return key.strip()
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
