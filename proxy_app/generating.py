"""From a prompt to a complete sampled turn, over however many engines it takes.

The harness sees one slow call: failures, moves and waits happen here. Tokens already sampled are kept across a move and count against
the request's budget. What is given up is only time without progress: more than the retry budget of it ends in the API's overload error.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import aiohttp

from gyre_lib.engines import generation
from gyre_lib.engines.generation import EngineError, EngineRefused, Generated, Sampling
from proxy_app import calls
from proxy_app.calls import ApiError, PromptTooLong
from proxy_app.routing import Attempt, Engine, ExecutionEnded, RoutingTable

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
ABORT_GRACE_S = 5.0
"""How long an engine may take to hand over what it had after an abort; then its tokens are given up."""


@dataclass(slots=True)
class Sampled:
    """A complete turn. `finish` of `generated` is stop or length."""

    generated: Generated
    engine_ids: list[str] = field(default_factory=list)
    attempts: int = 0
    reroutes: int = 0


@dataclass(slots=True)
class Counters:
    """What the proxy has done, for /control/stats."""

    requests: int = 0
    retries: int = 0
    reroutes: int = 0
    harness_visible_errors: int = 0
    joined: int = 0
    replayed: int = 0
    disconnects: int = 0


class Generator:
    """Runs requests against the engines of the routing table."""

    def __init__(self, table: RoutingTable, vocab_size: int, retry_budget_s: float, counters: Counters) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._retry_budget_s = retry_budget_s
        self._counters = counters
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def sample(self, execution_id: str, prompt: bytes, sampling: Sampling) -> Sampled:
        """Sample one turn. Raises ApiError (ended, prompt too long, overloaded)."""
        done = Sampled(Generated([], [], [], "abort"))
        avoid: frozenset[str] = frozenset()
        backoff_s = FIRST_BACKOFF_S
        stalled_since: float | None = None
        last_error = "no engine serves"
        while True:
            if stalled_since is not None and time.monotonic() - stalled_since > self._retry_budget_s:
                logger.error("execution %s: gave up after %.0f s without progress: %s", execution_id, self._retry_budget_s, last_error)
                raise ApiError(calls.OVERLOADED, "Overloaded", retry_after_s=5)
            engine = self._choose(execution_id, avoid)
            if engine is None:
                stalled_since = stalled_since or time.monotonic()
                await self._table.wait_change(backoff_s)
                avoid, backoff_s = frozenset(), min(2 * backoff_s, LONGEST_BACKOFF_S)
                continue
            done.attempts += 1
            if done.engine_ids and done.engine_ids[-1] != engine.engine_id:
                done.reroutes += 1
                self._counters.reroutes += 1
            try:
                part = await self._try(execution_id, engine, prompt, done.generated.ids, sampling, bool(avoid))
            except EngineError as error:
                stalled_since = stalled_since or time.monotonic()
                last_error = str(error)
                self._counters.retries += 1
                logger.warning("execution %s: engine %s: %s", execution_id, engine.engine_id, error)
                avoid |= {engine.engine_id}
                continue
            except EngineRefused as error:
                if "context length" in str(error) or "too long" in str(error):
                    tokens = prompt.count(b",") + 1 + len(done.generated.ids)
                    raise PromptTooLong(tokens, tokens - 1) from error
                stalled_since = stalled_since or time.monotonic()
                last_error = str(error)
                self._counters.retries += 1
                logger.error("execution %s: engine %s refused: %s", execution_id, engine.engine_id, error)
                avoid |= {engine.engine_id}
                continue
            if part is None:
                stalled_since = stalled_since or time.monotonic()
                continue
            if part.ids:
                done.generated = generation.joined(done.generated, part)
                stalled_since, backoff_s = None, FIRST_BACKOFF_S
                if not done.engine_ids or done.engine_ids[-1] != engine.engine_id:
                    done.engine_ids.append(engine.engine_id)
            done.generated.finish = part.finish
            if part.finish != "abort":
                if not done.engine_ids:
                    done.engine_ids.append(engine.engine_id)
                return done
            if len(done.generated.ids) >= sampling.max_new_tokens:
                done.generated.finish = "length"
                return done
            stalled_since = stalled_since or time.monotonic()
            if self._choose(execution_id, frozenset()) == engine:
                await self._table.wait_change(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    def _choose(self, execution_id: str, avoid: frozenset[str]) -> Engine | None:
        try:
            return self._table.choose(execution_id, avoid)
        except ExecutionEnded as error:
            raise ApiError(calls.ENDED, "this execution has ended") from error

    async def _try(
        self, execution_id: str, engine: Engine, prompt: bytes, kept: list[int], sampling: Sampling, fallback: bool
    ) -> Generated | None:
        """One try; None when the engine was taken away and did not hand over what it had."""
        if self._session is None:
            self._session = generation.new_session()
        if kept:
            prompt = prompt + b"," + generation.ids_as_json(kept)
        attempt = Attempt(execution_id, engine, generation.new_rid(), fallback)
        part = Sampling(sampling.max_new_tokens - len(kept), sampling.temperature, sampling.stop_token_ids, sampling.stop)
        self._table.begin(attempt)
        try:
            work = asyncio.ensure_future(
                generation.generate(
                    self._session,
                    engine.url,
                    prompt,
                    part,
                    rid=attempt.rid,
                    vocab_size=self._vocab_size,
                    default_version=engine.weight_version,
                )
            )
            try:
                await asyncio.wait((work, attempt.moved), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    await generation.abort(self._session, engine.url, attempt.rid)
                    await asyncio.wait((work,), timeout=ABORT_GRACE_S)
                if not work.done():
                    return None
                return work.result()
            finally:
                work.cancel()
        finally:
            self._table.end(attempt)
