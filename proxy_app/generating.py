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

    def take(self, part: Generated, engine_id: str) -> None:
        """Add what an engine handed over."""
        self.generated = generation.joined(self.generated, part)
        if not self.engine_ids or self.engine_ids[-1] != engine_id:
            self.engine_ids.append(engine_id)


class _Patience:
    """How much time without progress is left, and how long to pause before the next try."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self.renew()

    def renew(self) -> None:
        self._since: float | None = None
        self._pause_s = FIRST_BACKOFF_S

    def spend(self, execution_id: str, why: str) -> None:
        """No progress at the moment. Raises ApiError when that has lasted longer than the budget."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._budget_s:
            logger.error("execution %s: gave up after %.0f s without progress: %s", execution_id, now - self._since, why)
            raise ApiError(calls.OVERLOADED, "Overloaded", retry_after_s=5)

    def next_pause_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
        return pause_s


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
        patience = _Patience(self._retry_budget_s)
        avoid: frozenset[str] = frozenset()
        while True:
            engine = self._choose(execution_id, avoid)
            if engine is None:
                patience.spend(execution_id, "no engine serves")
                await self._table.wait_change(patience.next_pause_s())
                avoid = frozenset()
                continue
            self._count_attempt(done, engine)
            try:
                part = await self._try(execution_id, engine, prompt, done.generated.ids, sampling, bool(avoid))
            except (EngineError, EngineRefused) as error:
                if isinstance(error, EngineRefused) and ("context length" in str(error) or "too long" in str(error)):
                    tokens = prompt.count(b",") + 1 + len(done.generated.ids)
                    raise PromptTooLong(tokens, tokens - 1) from error
                logger.warning("execution %s: engine %s: %s", execution_id, engine.engine_id, error)
                self._counters.retries += 1
                patience.spend(execution_id, str(error))
                avoid |= {engine.engine_id}
                continue
            if part is None:
                patience.spend(execution_id, f"{engine.engine_id} was taken away and kept what it had")
                continue
            if part.ids or part.finish != "abort":
                patience.renew()
                done.take(part, engine.engine_id)
            if part.finish != "abort":
                return done
            if len(done.generated.ids) >= sampling.max_new_tokens:
                done.generated.finish = "length"
                return done
            patience.spend(execution_id, f"{engine.engine_id} aborted the request: {part.detail}")
            if self._choose(execution_id, frozenset()) == engine:
                await self._table.wait_change(patience.next_pause_s())

    def _count_attempt(self, done: Sampled, engine: Engine) -> None:
        done.attempts += 1
        if done.engine_ids and done.engine_ids[-1] != engine.engine_id:
            done.reroutes += 1
            self._counters.reroutes += 1

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
