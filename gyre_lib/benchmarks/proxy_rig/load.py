"""A load generator: agent sessions that resend their whole growing history each turn, and check every reply.

Histories are kept as ready JSON fragments and the HTTP client is a C parser on a bare protocol, so that the generator costs little next to
what it measures. `python -m gyre_lib.benchmarks.proxy_rig.load` prints one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httptools
import orjson

WORDS = b"the file was changed and every test in that folder passed again after we moved one line of code to its own helper".split()


@dataclass(frozen=True)
class History:
    """How a session's history grows: `system_bytes` once, then `turn_bytes` a turn, for `turns` turns."""

    turns: int
    system_bytes: int
    turn_bytes: int


HISTORIES = {"2k": History(5, 2000, 400), "20k": History(20, 48_000, 700), "100k": History(20, 240_000, 7100)}
"""Named by the tokens (of 4 bytes) that a history nears at its end."""


@dataclass(frozen=True)
class Load:
    """What one run of load saw."""

    requests: int
    errors: int
    seconds: float
    rate: float
    """Requests per second."""
    p50_ms: float
    p99_ms: float
    stalls: int
    """Replies that took 38 to 48 ms: the mark of writes that wait for a delayed acknowledgement."""
    mean_body_kb: float
    cpu_s_per_1000: float
    """CPU seconds of the watched process per 1000 requests; 0 when none is watched."""
    first_error: str


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self) -> None:
        self.closed = True

    def connection_made(self, transport: Any) -> None:
        self._transport, self.closed = transport, False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed by the server"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def send(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.writelines([head, body])
        await self._done
        return self._parser.get_status_code(), b"".join(self._pieces)


class Session:
    """One agent session of the Anthropic API, or of /generate (the direct line to the engine)."""

    def __init__(self, number: int, history: History, text: bytes, stream: bool, direct: bool) -> None:
        self._random = random.Random(number)
        self._text, self._history, self._stream, self._direct = text, history, stream, direct
        self._system = self._slice(history.system_bytes)
        self._fragments: list[bytes] = []
        self._ids = b"17"
        self._number, self.turn = number, 0

    def _slice(self, size: int) -> bytes:
        start = self._random.randrange(len(self._text) - size)
        return self._text[start : start + size]

    def body(self) -> bytes:
        self._nonce = b"s%dt%d" % (self._number, self.turn)
        if self._direct:
            size = self._history.turn_bytes + (self._history.system_bytes if self.turn == 0 else 512)
            self._ids += b",1234" * (size // 4)
            return b'{"rid":"x","input_ids":[' + self._ids + b'],"return_logprob":true,"sampling_params":{"max_new_tokens":4096}}'
        said = self._slice(max(1, self._history.turn_bytes - 60)) + b" nonce=" + self._nonce + b"; go on"
        self._fragments.append(b'{"role":"user","content":[{"type":"text","text":"' + said + b'"}]}')
        stream = b',"stream":true' if self._stream else b""
        return (
            b'{"model":"policy","max_tokens":4096' + stream + b',"system":"' + self._system + b'","messages":['
            + b",".join(self._fragments) + b"]}"
        )  # fmt: skip

    def take(self, raw: bytes) -> None:
        """Check a reply and add it to the history. Raises ValueError, KeyError."""
        self.turn += 1
        if self._direct:
            if not orjson.loads(raw)["output_ids"]:
                raise ValueError("no output ids")
            return
        text = _streamed_text(raw) if self._stream else "".join(b.get("text", "") for b in orjson.loads(raw)["content"])
        if self._nonce.decode() + " " not in text:
            raise ValueError(f"not the answer to this request: {text[:60]!r}")
        self._fragments.append(orjson.dumps({"role": "assistant", "content": [{"type": "text", "text": text}]}))


def _streamed_text(raw: bytes) -> str:
    pieces: list[str] = []
    ended = False
    for line in raw.split(b"\n"):
        if line.startswith(b'data: {"type":"content_block_delta"'):
            pieces.append(orjson.loads(line[6:])["delta"].get("text", ""))
        elif line.startswith(b'data: {"type":"message_stop"'):
            ended = True
    if not ended:
        raise ValueError("the stream has no end")
    return "".join(pieces)


async def run_load(
    port: int,
    history: History,
    sessions: int,
    seconds: float,
    *,
    stream: bool = False,
    direct: bool = False,
    first_key: int = 0,
    warm: bool = False,
    watch: int = 0,
) -> Load:
    """Load for `seconds`; session n uses the key `bench-n`. With `warm`, first turns are sent before the clock starts (and not counted)."""
    text = b" ".join(random.Random(1).choices(WORDS, k=(history.system_bytes + history.turn_bytes + 65536) // 4))
    path = b"/generate" if direct else b"/v1/messages"
    counter = iter(range(first_key, first_key + 1_000_000))
    latencies: list[float] = []
    failures: list[str] = []
    sizes: list[int] = []
    started = asyncio.Event()
    warmed = 0

    async def one(connection: Connection, session: Session, number: int) -> None:
        body = session.body()
        head = b"POST %s HTTP/1.1\r\nhost: x\r\nx-api-key: bench-%d\r\ncontent-length: %d\r\n\r\n" % (path, number, len(body))
        begin = time.perf_counter()
        status, raw = await asyncio.wait_for(connection.send(head, body), 120)
        took = time.perf_counter() - begin
        if status != 200:
            raise ValueError(f"HTTP {status}: {raw[:200]!r}")
        session.take(raw)
        if started.is_set():
            latencies.append(took)
            sizes.append(len(body))

    async def slot() -> None:
        nonlocal warmed
        connection: Connection | None = None
        first = True
        while first or time.perf_counter() < deadline:
            number = next(counter)
            session = Session(number, history, text, stream, direct)
            for turn in range(history.turns):
                if connection is None or connection.closed:
                    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
                if started.is_set() and time.perf_counter() >= deadline:
                    return
                try:
                    await one(connection, session, number)
                except (OSError, ValueError, KeyError, TimeoutError) as error:
                    failures.append(f"{type(error).__name__}: {error}"[:300])
                    connection = None
                    break
                if first and warm and turn == 0:
                    warmed += 1
                    await started.wait()
            first = False

    deadline = time.perf_counter() + seconds
    slots = [asyncio.create_task(slot()) for _ in range(sessions)]
    if warm:
        while warmed + len(failures) < sessions:
            await asyncio.sleep(0.01)
    begin = time.perf_counter()
    deadline = begin + seconds
    cpu = cpu_seconds(watch)
    started.set()
    await asyncio.gather(*slots)
    took, cpu = time.perf_counter() - begin, cpu_seconds(watch) - cpu
    ordered = sorted(latencies) or [float("nan")]
    return Load(
        requests=len(latencies),
        errors=len(failures),
        seconds=took,
        rate=len(latencies) / took,
        p50_ms=ordered[len(ordered) // 2] * 1e3,
        p99_ms=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        stalls=sum(0.038 <= value <= 0.048 for value in latencies),
        mean_body_kb=sum(sizes) / max(1, len(sizes)) / 1024,
        cpu_s_per_1000=cpu / max(1, len(latencies)) * 1000,
        first_error=failures[0] if failures else "",
    )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads so far, from the scheduler's own clock; 0 for pid 0."""
    if not pid:
        return 0.0
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def main(argv: list[str] | None = None) -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--history", choices=list(HISTORIES), default="2k")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--watch", type=int, default=0, help="pid whose CPU time to report")
    parser.add_argument("--first-key", type=int, default=0)
    options = parser.parse_args(argv)
    found = uvloop.run(
        run_load(
            options.port,
            HISTORIES[options.history],
            options.sessions,
            options.seconds,
            stream=options.stream,
            direct=options.direct,
            first_key=options.first_key,
            warm=options.warm,
            watch=options.watch,
        )
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
