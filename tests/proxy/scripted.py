"""Real proxy processes and scripted engines for tests: fakes only at the engine boundary.

A script takes an `EngineRequest` and returns a `Turn` (put into tokens as the policy's template writes it), a `Tokens`, or an `Answer`
(HTTP status and raw body). Log-probs are made up deterministically: position and id decide.
"""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web
from tokenizers import Tokenizer

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.history import EchoedCall, Reply
from gyre_lib.trajectories.store import read_execution
from gyre_lib.trajectories.tito_record import RequestRecord
from proxy_app.rendering import Rendering

SECRET = "test-control-secret"


@dataclass
class Turn:
    """A reply as the policy would write it."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, dict[str, Any] | str]] = field(default_factory=list)
    finish: str = "stop"
    delay_s: float = 0.0
    step_s: float = 0.0
    """Seconds per token: what an abort hands over is what was due by then."""
    raw: str | None = None
    """The sampled text itself, in place of text, thinking and calls."""
    version: str = "0"
    limit: int | None = None
    """Stop with finish `length` after this many tokens."""


@dataclass
class Tokens:
    ids: list[int]
    finish: str = "stop"
    version: str = "0"


@dataclass
class Answer:
    status: int
    body: dict[str, Any]


@dataclass
class EngineRequest:
    rid: str
    ids: list[int]
    text: str
    sampling: dict[str, Any]
    body: dict[str, Any]


def logprob(position: int, token: int) -> float:
    return -((token * 31 + position * 7) % 97 + 1) / 50


class ScriptedEngine:
    """SGLang's /generate and /abort_request in a thread of this process."""

    def __init__(self, model: Path, rendering: Rendering, script: Callable[[EngineRequest], Any]) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.rendering = rendering
        self.script = script
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.live: dict[str, asyncio.Event] = {}
        self.down = False
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(32)
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._threads.shutdown(wait=False)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(runner.cleanup())

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        for live, event in self.live.items():
            if live.startswith(rid):
                event.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = body["input_ids"]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        asked = EngineRequest(body["rid"], ids, text, body["sampling_params"], body)
        self.requests.append(asked)
        if self.down:
            return web.json_response({"error": {"message": "down"}}, status=503)
        event = self.live[asked.rid] = asyncio.Event()
        try:
            reply = await self._loop.run_in_executor(self._threads, self.script, asked)
            if isinstance(reply, Answer):
                return web.json_response(reply.body, status=reply.status)
            return web.json_response(await self._sampled(asked, reply, event))
        finally:
            self.live.pop(asked.rid, None)

    async def _sampled(self, asked: EngineRequest, reply: Any, event: asyncio.Event) -> dict[str, Any]:
        ids = list(reply.ids) if isinstance(reply, Tokens) else self.turn_ids(reply)
        finish: dict[str, Any] = {"type": "stop", "matched": ids[-1] if ids else None}
        limit = asked.sampling["max_new_tokens"]
        if isinstance(reply, Turn) and reply.limit is not None:
            limit = min(limit, reply.limit)
        if len(ids) > limit or reply.finish == "length":
            ids = ids[:limit]
            finish = {"type": "length", "length": len(ids)}
        if isinstance(reply, Turn) and (reply.delay_s or reply.step_s):
            due = reply.delay_s + reply.step_s * len(ids)
            started = time.monotonic()
            try:
                await asyncio.wait_for(event.wait(), due)
                done = int((time.monotonic() - started - reply.delay_s) / reply.step_s) if reply.step_s else 0
                ids = ids[: max(0, min(done, len(ids)))]
                finish = {"type": "abort", "message": "Aborted"}
            except TimeoutError:
                pass
        return generated(ids, finish, reply.version)

    def turn_ids(self, turn: Turn) -> list[int]:
        """The turn's tokens, beginning where the generation prompt ends, with the end-of-turn token unless it is cut."""
        if turn.raw is not None:
            ids = self.tokenizer.encode(turn.raw, add_special_tokens=False).ids
        else:
            calls = tuple(EchoedCall(f"c{i}", name, arguments) for i, (name, arguments) in enumerate(turn.calls))
            quoted = self.rendering.quoted(Reply(turn.text, turn.thinking, calls, b""))
            text = self.tokenizer.decode(quoted[:-1], skip_special_tokens=False)
            opening = self.tokenizer.decode(self.rendering.generation_prompt, skip_special_tokens=False)
            assert text.startswith(opening), (text, opening)
            ids = self.tokenizer.encode(text[len(opening) :], add_special_tokens=False).ids
        return ids if turn.finish == "length" else [*ids, self.rendering.stop_token_ids[0]]


def generated(ids: list[int], finish: dict[str, Any], version: str) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}] if ids else [],
            "output_token_logprobs": [[logprob(position, token), token, None] for position, token in enumerate(ids)],
            "cached_tokens": 0,
        },
    }


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


def http(url: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None, timeout: float = 60) -> Response:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Response(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        return Response(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


class ProxyProcess:
    """`python -m proxy_app` as it is started in a run."""

    def __init__(self, run_dir: Path, model: Path, renderer: str, proxy_id: str = "proxy-0", retry_budget_s: float = 8.0) -> None:
        self.run_dir, self.proxy_id = run_dir, proxy_id
        run_dir.mkdir(parents=True, exist_ok=True)
        self.port, self.control_port = free_port(), free_port()
        self.uds = Path("/tmp") / f"gyre-test-{uuid4().hex[:12]}.sock"
        self.log = run_dir / f"{proxy_id}-{uuid4().hex[:6]}.log"
        command = [
            sys.executable, "-m", "proxy_app", "--run-dir", str(run_dir), "--coordinator", "", "--port", str(self.port), "--control-port",
            str(self.control_port), "--uds", str(self.uds), "--model", str(model), "--renderer", renderer, "--proxy-id", proxy_id,
            "--retry-budget-s", str(retry_budget_s),
        ]  # fmt: skip
        environment = {**os.environ, "GYRE_CONTROL_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT)
        self.version = 0
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                if http(f"{self.url}/health").status == 200:
                    return
            except OSError:
                time.sleep(0.05)
            assert self.process.poll() is None, self.log.read_text()
        raise AssertionError(self.log.read_text())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def control(self, path: str, body: Any = None) -> Any:
        answer = http(f"http://127.0.0.1:{self.control_port}/control/{path}", body, {"x-gyre-control": SECRET})
        assert answer.status == 200, answer.raw
        return answer.json

    def push(self, engines: list[dict[str, Any]] = (), executions: list[dict[str, Any]] = (), closed: list[str] = ()) -> None:
        self.version += 1
        rows = {"version": self.version, "published_version": 0, "engines": list(engines), "executions": list(executions)}
        assert self.control("table", {**rows, "closed": list(closed)}) == {"version": self.version}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
        self.uds.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Harness:
    """One execution as its harness sees it, and what the proxy recorded of it."""

    proxy: ProxyProcess
    execution_id: str
    token: str
    engines: dict[str, ScriptedEngine]
    limits: dict[str, Any]

    def route(self, engine_id: str, serving: dict[str, bool] | None = None) -> None:
        rows = [
            {"engine_id": name, "url": engine.url, "serving": (serving or {}).get(name, True), "weight_version": 0}
            for name, engine in self.engines.items()
        ]
        row = {
            "execution_id": self.execution_id,
            "token_sha256": hashlib.sha256(self.token.encode()).hexdigest(),
            "engine_id": engine_id,
            **self.limits,
        }
        self.proxy.push(rows, [row])

    @property
    def engine(self) -> ScriptedEngine:
        return next(iter(self.engines.values()))

    def raw(self, path: str, body: Any, headers: dict[str, str] | None = None, timeout: float = 60) -> Response:
        return http(f"{self.proxy.url}{path}", body, {"x-api-key": self.token, **(headers or {})}, timeout=timeout)

    def messages(self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        answer = self.raw("/v1/messages?beta=true", {"model": "m", "max_tokens": 1000, "messages": messages, **body}, headers)
        assert answer.status == 200, answer.raw
        return answer.json

    def chat(self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        answer = self.raw("/v1/chat/completions", {"model": "m", "messages": messages, **body}, headers)
        assert answer.status == 200, answer.raw
        return answer.json

    def records(self) -> list[RequestRecord]:
        return read_execution(RunLayout(self.proxy.run_dir), self.execution_id)


def path_ids(records: list[RequestRecord], record: RequestRecord) -> list[int]:
    """The whole prompt of a record: its parents' inputs and outputs, then its own input."""
    by_id = {item.request_id: item for item in records}
    chain = [record]
    while chain[-1].parent_id:
        chain.append(by_id[chain[-1].parent_id])
    ids: list[int] = []
    for item in reversed(chain):
        ids += item.input_ids
        if item is not record:
            ids += item.output_ids
    return ids


@contextmanager
def harness(
    proxy: ProxyProcess, model: Path, rendering: Rendering, *scripts: Callable[[EngineRequest], Any], **limits: Any
) -> Iterator[Harness]:
    """A new execution with one engine per script; its route is the first."""
    name = uuid4().hex[:8]
    engines = {f"{name}-{index}": ScriptedEngine(model, rendering, script) for index, script in enumerate(scripts)}
    settings = {"max_context_tokens": 20_000, "max_output_tokens": 2_000, "temperature": 1.0, "train": True, **limits}
    found = Harness(proxy, f"exec-{name}", f"token-{name}", engines, settings)
    found.route(f"{name}-0")
    try:
        yield found
    finally:
        if proxy.process.poll() is None:
            gone = [{"engine_id": name, "url": engine.url, "serving": False, "weight_version": 0} for name, engine in engines.items()]
            proxy.push(gone)
        for engine in engines.values():
            engine.close()
