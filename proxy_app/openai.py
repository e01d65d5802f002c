"""The OpenAI Chat Completions API: requests to calls, answers to responses and event streams, errors in its own shape."""

import time
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from gyre_lib.trajectories import history
from gyre_lib.trajectories.history import EchoedCall, Message, Part, ToolSpec
from proxy_app import calls
from proxy_app.calls import Answer, ApiError, PromptTooLong, pieces

STATUS = {
    calls.BAD_REQUEST: (400, "invalid_request_error", None),
    calls.PROMPT_TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    calls.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    calls.ENDED: (403, "permission_error", None),
    calls.NOT_FOUND: (404, "not_found_error", None),
    calls.NOT_ALLOWED: (405, "invalid_request_error", None),
    calls.TOO_SLOW: (408, "timeout_error", None),
    calls.TOO_LARGE: (413, "invalid_request_error", None),
    calls.OVERLOADED: (429, "rate_limit_error", "rate_limit_exceeded"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextContent(_Model):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class OtherContent(_Model):
    type: str


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "text" if kind in ("text", "refusal") else "other"


ContentItem = Annotated[Annotated[TextContent, Tag("text")] | Annotated[OtherContent, Tag("other")], Discriminator(_kind)]


class FunctionCall(_Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = ""


class ToolCall(_Model):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    function: FunctionCall


class IncomingMessage(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentItem] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(_Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(_Model):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class StreamOptions(_Model):
    include_usage: bool | None = None


class Envelope(_Model):
    """The request without its messages."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[str, Field(max_length=1024)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]
        | None
    ) = None
    n: Literal[1] | None = None
    temperature: float | None = None
    top_p: float | None = None
    messages: Annotated[list[Any], Field(min_length=1)]


_ENVELOPE = TypeAdapter(Envelope)
_MESSAGES = TypeAdapter(list[IncomingMessage])
_TOOLS = TypeAdapter(list[ToolDefinition] | None)


def read_envelope(body: Any) -> Envelope:
    return _validated(_ENVELOPE, body, "")


def read_head(body: dict[str, Any], leading: list[Any]) -> history.Head:
    """`leading` are the system and developer messages that the conversation begins with."""
    texts = [_text(message, index) for index, message in enumerate(_validated(_MESSAGES, leading, "messages"))]
    tools = [
        ToolSpec(tool.function.name, tool.function.description or "", tool.function.parameters or {"type": "object", "properties": {}})
        for tool in _validated(_TOOLS, body.get("tools"), "tools") or []
    ]
    return history.head(texts, tools)


def leading_system(raw: list[Any]) -> int:
    """How many messages at the start are system or developer messages."""
    count = 0
    for message in raw:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        count += 1
    return count


def read_messages(raw: list[Any], first: int) -> list[Message]:
    """Canonical form, one message each; consecutive tool results land in one turn when rendered. Raises ApiError."""
    return [_canonical(message, index) for index, message in enumerate(_validated(_MESSAGES, raw, "messages"), first)]


def _canonical(message: IncomingMessage, index: int) -> Message:
    text = _text(message, index)
    if message.role == "assistant":
        found = [EchoedCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return history.reply(text, message.reasoning_content or message.reasoning or "", found)
    if message.role == "tool":
        if not message.tool_call_id:
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}.tool_call_id: a tool message names the call it answers")
        return history.supplied([Part("tool", text, message.tool_call_id)])
    return history.supplied([Part("user" if message.role == "user" else "system", text)])


def _text(message: IncomingMessage, index: int) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for item in message.content:
        if isinstance(item, OtherContent):
            raise ApiError(calls.BAD_REQUEST, f"messages.{index}: this model reads text only; {item.type[:40]} content is not supported")
        texts.append(item.text or item.refusal or "")
    return "\n".join(texts)


def response(answer: Answer) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}}
            for call in answer.calls
        ]
    return orjson.dumps(
        {
            "id": f"chatcmpl-{answer.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}],
            "usage": _usage(answer),
        }
    )


def stream(answer: Answer, include_usage: bool) -> bytes:
    """The whole event stream of a complete answer."""
    common = orjson.dumps(
        {"id": f"chatcmpl-{answer.request_id}", "object": "chat.completion.chunk", "created": int(time.time()), "model": answer.model}
    )[:-1]
    before = b"data: " + common + b',"choices":[{"index":0,"delta":'
    after = b',"logprobs":null,"finish_reason":null}]}\n\n'
    out = [before + b'{"role":"assistant","content":""}' + after]
    for name, text in ((b'{"reasoning_content":', answer.thinking), (b'{"content":', answer.text)):
        out += [before + name + orjson.dumps(piece) + b"}" + after for piece in pieces(text, answer.output_tokens)]
    for index, call in enumerate(answer.calls):
        function = {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
        entry = {"tool_calls": [{"index": index, "id": call.call_id, "type": "function", "function": function}]}
        out.append(before + orjson.dumps(entry) + after)
    out.append(before + b'{},"logprobs":null,"finish_reason":' + orjson.dumps(answer.finish) + b"}]}\n\n")
    if include_usage:
        out.append(b"data: " + common + b',"choices":[],"usage":' + orjson.dumps(_usage(answer)) + b"}\n\n")
    out.append(b"data: [DONE]\n\n")
    return b"".join(out)


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }


def error(failure: ApiError) -> tuple[int, bytes]:
    status, kind, code = STATUS[failure.kind]
    message = failure.message
    if isinstance(failure, PromptTooLong):
        message = (
            f"This model's maximum context length is {failure.limit} tokens. However, your messages resulted in {failure.tokens} tokens."
            " Please reduce the length of the messages."
        )
    return status, orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def models(names: list[str]) -> bytes:
    return orjson.dumps({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "policy"} for name in names]})


def _validated(adapter: TypeAdapter[Any], value: Any, where: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(item) for item in (where, *first["loc"]) if item != "")
        raise ApiError(calls.BAD_REQUEST, f"{place or 'body'}: {first['msg']}") from failure
