"""The harness-facing ASGI application: routes, keys, body limits, disconnects, and the bytes that go back.

A plain ASGI callable: the path may have any prefix (harnesses are given base URLs with one), and every call passes here. A response's head
and body are sent only when the turn is complete and its record durable, so a harness never sees half an answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from proxy_app import anthropic, calls, openai
from proxy_app.calls import ApiError
from proxy_app.generating import Counters
from proxy_app.reading import read_call
from proxy_app.routing import ExecutionEnded, ExecutionRoute, RoutingTable, UnknownToken, bearer
from proxy_app.turns import Turns

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 32 * 2**20
DRAINED_BODY_BYTES = 4 * MAX_BODY_BYTES
"""A body that is too large is still read (and dropped) up to here, so that the client sees the error and not a reset."""
BODY_TIME_S = 120.0
"""Longest time that a request's body may take; a generation may take as long as it likes."""
FIRST_TABLE_WAIT_S = 20.0
"""How long a call waits for the coordinator's first table after the proxy's start."""
MODEL_NAMES = ["policy"]
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")


class Disconnected(Exception):
    """The harness went away."""


class HarnessApp:
    """The application. One instance serves the TCP port and the unix socket."""

    def __init__(self, table: RoutingTable, turns: Turns, counters: Counters) -> None:
        self._table = table
        self._turns = turns
        self._counters = counters

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"].rstrip("/")
        headers = dict(scope["headers"])
        api = (
            openai
            if path.endswith("/chat/completions") or (path.endswith("/models") and b"anthropic-version" not in headers)
            else anthropic
        )
        try:
            await self._route(scope["method"], path, headers, receive, send)
        except Disconnected:
            self._counters.disconnects += 1
        except ApiError as failure:
            await self._fail(api, failure, send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], path[-80:])
            await self._fail(api, ApiError(calls.OVERLOADED, "Overloaded", retry_after_s=1), send)

    async def _route(self, method: str, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if method == "HEAD":
            await _respond(send, 200, [JSON], b"")
        elif path.endswith("/v1/messages"):
            await self._call("anthropic", method, headers, receive, send)
        elif path.endswith("/chat/completions"):
            await self._call("openai", method, headers, receive, send)
        elif path.endswith("/v1/messages/count_tokens"):
            await self._count(method, headers, receive, send)
        elif path.endswith("/models") or "/models/" in path:
            await self._models(method, path, headers, send)
        elif path in ("", "/health", "/api/hello") and method == "GET":
            await _respond(send, 200, [JSON], b'{"status":"ok"}')
        else:
            raise ApiError(calls.NOT_FOUND, "no such route")

    async def _call(self, api: str, method: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        _only(method, "POST")
        route = await self._authenticate(headers)
        body = _loads(await _read_body(receive))
        if route.execution_id not in self._table.executions:
            raise ApiError(calls.ENDED, "this execution has ended")
        self._counters.requests += 1
        execution = await self._turns.execution(route.execution_id)
        call, state = read_call(api, body, headers, execution)
        placed = self._turns.place(call, state, execution)
        flight = self._turns.join(placed, route, execution)
        gone = asyncio.ensure_future(_until_disconnect(receive))
        flight.waiters += 1
        try:
            await asyncio.wait((flight.task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not flight.task.done():
                raise Disconnected
            answer, node = self._landed(flight.task, route)
            delivered = not gone.done()
            if call.stream:
                content = anthropic.stream(answer) if api == "anthropic" else openai.stream(answer, call.include_usage)
                response_headers = [EVENTS, NO_CACHE]
            else:
                content = anthropic.response(answer) if api == "anthropic" else openai.response(answer)
                response_headers = [JSON]
            response_headers.append((b"request-id", f"req_{answer.request_id}".encode()))
            await _respond(send, 200, response_headers, content)
            if delivered:
                node.delivered = True
                execution.undelivered.pop(node.request_id, None)
        finally:
            gone.cancel()
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._turns.abandon(flight, placed, execution)

    async def _count(self, method: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        _only(method, "POST")
        route = await self._authenticate(headers)
        body = _loads(await _read_body(receive))
        execution = await self._turns.execution(route.execution_id)
        call, state = read_call("anthropic", body, headers, execution, remember=False)
        placed = self._turns.place(call, state, execution)
        new = await self._turns.prompt_ids(placed, execution)
        total = len(new) + (placed.state.node.total_tokens if placed.state.node else 0)
        await _respond(send, 200, [JSON], orjson.dumps({"input_tokens": total}))

    async def _models(self, method: str, path: str, headers: dict[bytes, bytes], send: Send) -> None:
        _only(method, "GET")
        await self._authenticate(headers)
        if not path.endswith("/models"):
            name = path.rpartition("/models/")[2]
            await _respond(
                send, 200, [JSON], orjson.dumps({"id": name, "object": "model", "type": "model", "display_name": name, "created": 0})
            )
            return
        listed = anthropic.models(MODEL_NAMES) if b"anthropic-version" in headers else openai.models(MODEL_NAMES)
        await _respond(send, 200, [JSON], listed)

    async def _authenticate(self, headers: dict[bytes, bytes]) -> ExecutionRoute:
        token = bearer(headers)
        if not token:
            raise ApiError(calls.UNAUTHENTICATED, "no API key: give x-api-key or authorization: Bearer")
        if not self._table.ready:
            await self._table.wait_change(FIRST_TABLE_WAIT_S)
            if not self._table.ready:
                raise ApiError(calls.OVERLOADED, "Overloaded", retry_after_s=5)
        try:
            return self._table.authenticate(token)
        except UnknownToken as error:
            raise ApiError(calls.UNAUTHENTICATED, "invalid API key") from error
        except ExecutionEnded as error:
            raise ApiError(calls.ENDED, "this execution has ended") from error

    def _landed(self, task: "asyncio.Task[Any]", route: ExecutionRoute) -> Any:
        try:
            return task.result()
        except asyncio.CancelledError as error:
            if route.execution_id in self._table.executions:  # this process is going; the harness's retry finds the next one
                raise ApiError(calls.OVERLOADED, "Overloaded", retry_after_s=1) from error
            raise ApiError(calls.ENDED, "this execution has ended") from error

    async def _fail(self, api: Any, failure: ApiError, send: Send) -> None:
        if failure.kind == calls.OVERLOADED:
            self._counters.harness_visible_errors += 1
        status, content = api.error(failure)
        headers = [JSON]
        if failure.retry_after_s:
            headers.append((b"retry-after", b"%d" % failure.retry_after_s))
        if failure.kind == calls.ENDED:
            headers.append((b"x-should-retry", b"false"))
        if failure.kind in (calls.TOO_LARGE, calls.TOO_SLOW):
            headers.append((b"connection", b"close"))
        await _respond(send, status, headers, content)


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise ApiError(calls.NOT_ALLOWED, f"use {allowed}")


def _loads(content: bytes) -> Any:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(calls.BAD_REQUEST, f"body: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(calls.BAD_REQUEST, "body: a JSON object is needed")
    return body


async def _read_body(receive: Receive) -> bytes:
    """The whole body, within the limits of size and of time."""
    try:
        async with asyncio.timeout(BODY_TIME_S):
            return await _pieces(receive)
    except TimeoutError as error:
        raise ApiError(calls.TOO_SLOW, f"the request body took longer than {BODY_TIME_S:g} s") from error


async def _pieces(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size <= MAX_BODY_BYTES:
            pieces.append(piece)
        if size > DRAINED_BODY_BYTES or (size > MAX_BODY_BYTES and not message.get("more_body", False)):
            raise ApiError(calls.TOO_LARGE, f"request exceeds {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(content)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
