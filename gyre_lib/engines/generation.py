"""Token generation on an SGLang engine: ids in, ids and log-probs out, checked before anybody may use them.

`/generate` with `input_ids` and `return_logprob`. Request ids are 32 hex digits of fixed length, because the engine's abort matches by
prefix. An aborted request keeps HTTP 200 and what it had generated, which is how a request moves to another engine without losing tokens.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aiohttp
import orjson

from gyre_lib.trajectories.tito_record import VersionSpan

ABORT_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0


class EngineError(RuntimeError):
    """The engine failed, could not be reached or gave an answer that contradicts itself; another try may help."""


class EngineRefused(RuntimeError):
    """The engine understood the request and refuses it; the same request will be refused again."""


@dataclass(slots=True)
class Sampling:
    """How to sample. Only the temperature shapes the distribution: truncated sampling cannot be corrected by the trainer."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]
    stop: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Generated:
    """What one try produced. `finish` is stop, length or abort."""

    ids: list[int]
    logprobs: list[float]
    """Natural log, after temperature, of each id of `ids`."""
    spans: list[VersionSpan]
    finish: str
    cached_tokens: int = 0
    matched: str = ""
    """Stop string that ended it, if one did."""
    detail: str = ""


def new_session() -> aiohttp.ClientSession:
    """One session for all engines of a process; no limit on connections and none on how long a generation may take."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        json_serialize=lambda value: orjson.dumps(value).decode(),
    )


def ids_as_json(ids: list[int]) -> bytes:
    """The ids as the inside of a JSON list; pieces joined by commas are again such an inside."""
    return orjson.dumps(ids)[1:-1]


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    prompt: bytes,
    sampling: Sampling,
    *,
    rid: str,
    vocab_size: int,
    default_version: int,
) -> Generated:
    """Generate once. `prompt` is the inside of a JSON list of ids (see `ids_as_json`).

    `default_version` is what the engine's version "default" stands for. Raises EngineError, EngineRefused. When the caller is cancelled
    the request is aborted at the engine.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        parameters["stop"] = sampling.stop
    head = b'{"rid":"' + rid.encode() + b'","input_ids":['
    settings = b'],"return_logprob":true,"logprob_start_len":-1,"sampling_params":' + orjson.dumps(parameters) + b"}"
    body = b"".join((head, prompt, settings))
    try:
        async with session.post(f"{url}/generate", data=body, headers={"content-type": "application/json"}) as response:
            raw, status = await response.read(), response.status
    except asyncio.CancelledError:
        _in_background(abort(session, url, rid))
        raise
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        _in_background(abort(session, url, rid))  # the engine may have the request although its answer is lost
        raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
    if status == 400:
        raise EngineRefused(f"{url}: {raw[:300].decode(errors='replace')}")
    if status != 200:
        raise EngineError(f"{url}: HTTP {status}: {raw[:300].decode(errors='replace')}")
    return checked(raw, vocab_size, default_version)


def checked(raw: bytes, vocab_size: int, default_version: int) -> Generated:
    """Read an engine's answer. Raises EngineError where ids, log-probs and versions do not fit together; nothing is repaired."""
    try:
        answer = orjson.loads(raw)
        meta = answer["meta_info"]
        ids = answer["output_ids"]
        triples = meta.get("output_token_logprobs") or []
        reason = meta["finish_reason"] or {}
        finish = reason["type"]
        if len(triples) != len(ids):
            raise EngineError(f"{len(ids)} output ids but {len(triples)} log-probs")
        if [triple[1] for triple in triples] != ids:
            raise EngineError("log-probs are of other ids than the output's")
        logprobs = [triple[0] for triple in triples]
        if not math.isfinite(sum(logprobs)):
            raise EngineError("a log-prob is no finite number")
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size):
            raise EngineError(f"output ids outside the vocabulary of {vocab_size}")
        spans = _spans(meta, len(ids), default_version)
    except EngineError:
        raise
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"unreadable answer: {type(error).__name__}: {error}: {raw[:200]!r}") from error
    matched = reason.get("matched")
    return Generated(
        ids,
        list(map(float, logprobs)),
        spans,
        finish,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        matched=matched if isinstance(matched, str) else "",
        detail=str(reason.get("message") or ""),
    )


def _spans(meta: dict[str, Any], length: int, default_version: int) -> list[VersionSpan]:
    """Version run lengths over the output; SGLang gives them end-exclusive on finished responses."""
    if not length:
        return []
    given = meta.get("weight_versions")
    if not given:
        return [VersionSpan(_version(meta.get("weight_version"), default_version), 0, length)]
    spans: list[VersionSpan] = []
    for span in given:
        version, start, end = _version(span["version"], default_version), int(span["start"]), int(span["end"])
        if end <= start:
            continue
        if start != (spans[-1].end if spans else 0):
            raise EngineError(f"weight versions leave a gap at token {start}")
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(version, start, end))
    if not spans or spans[-1].end != length:
        raise EngineError(f"weight versions cover {spans[-1].end if spans else 0} of {length} tokens")
    return spans


def _version(text: Any, default_version: int) -> int:
    if text is None or text == "default":
        return default_version
    return int(text)


def joined(first: Generated, second: Generated) -> Generated:
    """A continuation's tokens after those kept from before the move; equal versions on both sides become one run."""
    offset = len(first.ids)
    spans = list(first.spans)
    for span in second.spans:
        shifted = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == shifted.version and spans[-1].end == shifted.start:
            spans[-1] = VersionSpan(shifted.version, spans[-1].start, shifted.end)
        else:
            spans.append(shifted)
    return Generated(
        first.ids + second.ids,
        first.logprobs + second.logprobs,
        spans,
        second.finish,
        cached_tokens=first.cached_tokens if offset else second.cached_tokens,
        matched=second.matched,
        detail=second.detail,
    )


def new_rid() -> str:
    return uuid4().hex


_background: set[asyncio.Task[None]] = set()


def _in_background(work: Any) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def abort(session: aiohttp.ClientSession, url: str, rid: str) -> None:
    """Ask the engine to stop a request; its answer then comes with what it had. An unreachable engine has nothing left to stop."""
    try:
        timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        async with session.post(
            f"{url}/abort_request", data=orjson.dumps({"rid": rid}), headers={"content-type": "application/json"}, timeout=timeout
        ):
            pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        return
