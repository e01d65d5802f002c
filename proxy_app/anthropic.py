"""The Anthropic Messages API: requests to calls, answers to responses and event streams, errors in its own shape.

Unknown fields are ignored. Only new messages are validated: those of a known prefix were validated when they came first.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from gyre_lib.trajectories import classes, history
from gyre_lib.trajectories.history import EchoedCall, Message, Part, ToolSpec
from proxy_app import calls
from proxy_app.calls import Answer, ApiError, pieces

AGENT_HEADER = b"x-claude-code-agent-id"
PARENT_AGENT_HEADER = b"x-claude-code-parent-agent-id"
SESSION_HEADER = b"x-claude-code-session-id"

STATUS = {
    calls.BAD_REQUEST: (400, "invalid_request_error"),
    calls.PROMPT_TOO_LONG: (400, "invalid_request_error"),
    calls.UNAUTHENTICATED: (401, "authentication_error"),
    calls.ENDED: (403, "permission_error"),
    calls.NOT_FOUND: (404, "not_found_error"),
    calls.NOT_ALLOWED: (405, "invalid_request_error"),
    calls.TOO_SLOW: (408, "timeout_error"),
    calls.TOO_LARGE: (413, "request_too_large"),
    calls.OVERLOADED: (529, "overloaded_error"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(_Model):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Model):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Model):
    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(_Model):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]


class ToolReferenceBlock(_Model):
    type: Literal["tool_reference"]
    tool_name: str


class ImageBlock(_Model):
    type: Literal["image", "document"]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "image" if kind in ("image", "document") else str(kind)


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ToolReferenceBlock, Tag("tool_reference")] | Annotated[ImageBlock, Tag("image")],
    Discriminator(_kind),
]


class ToolResultBlock(_Model):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ImageBlock, Tag("image")],
    Discriminator(_kind),
]


class IncomingMessage(_Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(_Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class Envelope(_Model):
    """The request without its messages."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(default=None, max_length=16)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    messages: Annotated[list[Any], Field(min_length=1)]


_ENVELOPE = TypeAdapter(Envelope)
_MESSAGES = TypeAdapter(list[IncomingMessage])
_SYSTEM = TypeAdapter(str | list[TextBlock] | None)
_TOOLS = TypeAdapter(list[ToolDefinition] | None)


def read_envelope(body: Any) -> Envelope:
    return _validated(_ENVELOPE, body, "")


def read_head(body: dict[str, Any]) -> history.Head:
    system = _validated(_SYSTEM, body.get("system"), "system")
    texts = [system] if isinstance(system, str) else [block.text for block in system or []]
    tools = [
        ToolSpec(tool.name, tool.description or "", tool.input_schema)
        for tool in _validated(_TOOLS, body.get("tools"), "tools") or []
        if tool.input_schema is not None
    ]
    return history.head(texts, tools)


def read_messages(raw: list[Any], first: int) -> list[Message]:
    """Canonical form of `raw`; `first` is the index of its first message, for error texts. Raises ApiError."""
    return [_canonical(message, index) for index, message in enumerate(_validated(_MESSAGES, raw, "messages"), first)]


def _canonical(message: IncomingMessage, index: int) -> Message:
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return _reply(blocks, index)
    parts: list[Part] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            parts.append(Part(message.role, block.text))
        elif isinstance(block, ToolResultBlock):
            parts.append(Part("tool", _result_text(block, index), block.tool_use_id, bool(block.is_error)))
        elif isinstance(block, ImageBlock):
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}: this model reads text only; images and documents are not supported")
        else:
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}: a {block.type} block cannot stand in a {message.role} message")
    if not parts:
        parts.append(Part(message.role, ""))
    return history.supplied(parts)


def _reply(blocks: list[Any], index: int) -> Message:
    text, thinking, found = [], [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            found.append(EchoedCall(block.id, block.name, block.input))
        elif not isinstance(block, RedactedThinkingBlock):
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}: a {block.type} block cannot stand in an assistant message")
    if found:
        text = [piece for piece in text if piece.strip()]
    return history.reply("".join(text), "".join(thinking), found)


def _result_text(block: ToolResultBlock, index: int) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = []
    for item in block.content:
        if isinstance(item, ImageBlock):
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}: this model reads text only; images and documents are not supported")
        texts.append(item.text if isinstance(item, TextBlock) else f"[tool reference: {item.tool_name}]")
    return "\n".join(texts)


def agents(headers: dict[bytes, bytes], head: history.Head) -> tuple[str, str, bool]:
    """(agent id, parent agent id, whether it is a sub-agent for certain). Without the header the attribution line may still say so."""
    agent = headers.get(AGENT_HEADER, b"").decode("latin-1")[:64]
    if agent:
        return agent, headers.get(PARENT_AGENT_HEADER, b"").decode("latin-1")[:64], True
    if classes.SUBAGENT_MARK in head.notes.get("billing", ""):
        return f"unnamed-{head.key.hex()[:16]}", "", True
    return "", "", False


def response(answer: Answer) -> bytes:
    content: list[dict[str, Any]] = []
    if answer.thinking:
        content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments})
    return orjson.dumps(
        {
            "id": f"msg_{answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_sequence or None,
            "usage": _usage(answer, answer.output_tokens),
        }
    )


def stream(answer: Answer) -> bytes:
    """The whole event stream of a complete answer."""
    message: dict[str, Any] = {
        "id": f"msg_{answer.request_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, 1),
    }
    out = [_event(b"message_start", {"type": "message_start", "message": message})]
    index = 0
    if answer.thinking:
        out += _block(
            index, {"type": "thinking", "thinking": "", "signature": ""}, b'"type":"thinking_delta","thinking":', answer.thinking, answer
        )
        index += 1
    if answer.text:
        out += _block(index, {"type": "text", "text": ""}, b'"type":"text_delta","text":', answer.text, answer)
        index += 1
    for call in answer.calls:
        arguments = orjson.dumps(call.arguments).decode()
        start = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        out += _block(index, start, b'"type":"input_json_delta","partial_json":', arguments, answer)
        index += 1
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence or None}
    out.append(_event(b"message_delta", {"type": "message_delta", "delta": delta, "usage": {"output_tokens": answer.output_tokens}}))
    out.append(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    return b"".join(out)


def _block(index: int, start: dict[str, Any], delta: bytes, text: str, answer: Answer) -> list[bytes]:
    number = b"%d" % index
    before = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":' + number + b',"delta":{' + delta
    return [
        _event(b"content_block_start", {"type": "content_block_start", "index": index, "content_block": start}),
        *(before + orjson.dumps(piece) + b"}}\n\n" for piece in pieces(text, answer.output_tokens)),
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":' + number + b"}\n\n",
    ]


def _event(name: bytes, data: dict[str, Any]) -> bytes:
    return b"event: " + name + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _stop_reason(answer: Answer) -> str:
    if answer.finish == "length":
        return "max_tokens"
    if answer.finish == "tool_calls":
        return "tool_use"
    return "stop_sequence" if answer.stop_sequence else "end_turn"


def _usage(answer: Answer, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def error(failure: ApiError) -> tuple[int, bytes]:
    status, kind = STATUS[failure.kind]
    return status, orjson.dumps({"type": "error", "error": {"type": kind, "message": failure.message}})


def models(names: list[str]) -> bytes:
    data = [{"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"} for name in names]
    return orjson.dumps({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


def _validated(adapter: TypeAdapter[Any], value: Any, where: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(item) for item in (where, *first["loc"]) if item != "")
        raise ApiError(calls.BAD_REQUEST, f"{place or 'body'}: {first['msg']}") from failure
