"""An engine that answers SGLang's /generate at once with fixed tokens: what a proxy costs is then all that is measured.

`python -m gyre_lib.benchmarks.mock_engine --model DIR --port N --tokens 128`. It answers with the last `nonce=…;` of the prompt, so that a
load generator can tell that it got its own answer, and with made-up log-probs. It never parses the prompt: long ones cost it nothing.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from tokenizers import Tokenizer

FILLER = " the file was changed and every test in that folder passed again after we moved one line of code to its own helper"


class MockEngine:
    """The ASGI application."""

    def __init__(self, model: Path, tokens: int, delay_s: float, tool: str = "", tail_bytes: int = 2000) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._tokens, self._delay_s, self._tool = tokens, delay_s, tool
        self._tail_bytes = tail_bytes
        self._filler = self._encode(FILLER * (tokens // 16 + 1))[: max(0, tokens - 1)]
        self.version = "0"
        self.served = 0

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _nonce(self, body: bytes, start: int, end: int, size: int) -> str:
        """The last nonce in the last `size` bytes of the ids; empty when there is none."""
        near = body[max(start, end - size) : end]
        near = near[near.find(b",") + 1 :] if end - size > start else near
        text = self._tokenizer.decode(orjson.loads(b"[" + near + b"]"), skip_special_tokens=False)
        at = text.rfind("nonce=")
        return text[at + 6 : text.find(";", at)] if at >= 0 and text.find(";", at) >= 0 else ""

    def answer(self, body: bytes) -> bytes:
        """The response to one /generate body (ids first, then parameters, as the client of this project writes it)."""
        start = body.find(b'"input_ids":[') + 13
        end = body.find(b"]", start)
        nonce = self._nonce(body, start, end, self._tail_bytes) or "none"
        head = self._encode(f"ACK {nonce}")
        call = (
            self._encode(f'\n<tool_call>\n{{"name": "{self._tool}", "arguments": {{"arg": "{nonce}"}}}}\n</tool_call>')
            if self._tool
            else []
        )
        ids = [*head, *self._filler[: max(0, self._tokens - 1 - len(head) - len(call))], *call, self._end]
        self.served += 1
        triples = [(-0.1 - (index % 7) / 10, token, None) for index, token in enumerate(ids)]
        meta = {
            "finish_reason": {"type": "stop", "matched": self._end},
            "prompt_tokens": body.count(b",", start, end) + 1,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": triples,
        }
        return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        content = self.answer(b"".join(parts)) if scope["path"] == "/generate" else b"{}"
        if self._delay_s and scope["path"] == "/generate":
            await asyncio.sleep(self._delay_s)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--tool", default="", help="answer with a call of this tool")
    parser.add_argument("--tail-bytes", type=int, default=2000, help="how much of the prompt's end (as JSON) is searched for the nonce")
    options = parser.parse_args(argv)
    engine = MockEngine(options.model, options.tokens, options.delay_ms / 1e3, options.tool, options.tail_bytes)
    uvicorn.run(
        engine,
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
