"""From a request's JSON to a call and its place in the tree, at the price of what is new in it.

The beginning that an agent sent before is compared by value with what was read then; only the rest is validated and digested.
"""

import time
from typing import Any

from gyre_lib.trajectories import classes
from gyre_lib.trajectories.trajectory_tree import WalkState
from proxy_app import anthropic, calls, openai
from proxy_app.calls import ApiError, Call
from proxy_app.sessions import Execution, Remembered

KEPT_HEADERS = (b"user-agent", b"x-claude-code-session-id", b"anthropic-beta")
KEPT_HEADER_CHARS = 200


def read_call(api: str, body: Any, headers: dict[bytes, bytes], execution: Execution, *, remember: bool = True) -> tuple[Call, WalkState]:
    """The call and the walk's end: its parent node and prompt key. Raises ApiError for what the API does not allow."""
    read = _read_anthropic if api == "anthropic" else _read_openai
    try:
        return read(body, headers, execution, remember)
    except RecursionError as error:
        raise ApiError(calls.BAD_REQUEST, "body: nested too deeply") from error


def _read_anthropic(body: Any, headers: dict[bytes, bytes], execution: Execution, remember: bool) -> tuple[Call, WalkState]:
    envelope = anthropic.read_envelope(body)
    raw, raw_system, raw_tools = envelope.messages, body.get("system"), body.get("tools")
    memory_key = headers.get(anthropic.AGENT_HEADER, b"").decode("latin-1")[:64]
    known = execution.memory.find(memory_key, raw_system, raw_tools, raw)
    head = known.head if known else execution.memory.head(memory_key, raw_system, raw_tools) or anthropic.read_head(body)
    agent_id, parent_agent_id, sub_agent = anthropic.agents(headers, head)
    call = Call(
        api="anthropic",
        head=head,
        messages=[],
        agent_id=agent_id,
        parent_agent_id=parent_agent_id,
        sub_agent=sub_agent,
        names_agents=sub_agent or anthropic.SESSION_HEADER in headers,
        side=classes.is_side_request(body, agent_id),
        max_tokens=envelope.max_tokens,
        stop=envelope.stop_sequences or [],
        stream=bool(envelope.stream),
        include_usage=True,
        model=envelope.model,
        metadata=_notes(headers, head.notes, envelope, ("temperature", "top_p", "top_k")),
        arrived_s=time.time(),
    )
    state = _walk(call, raw, raw_system, raw_tools, memory_key, known, execution, anthropic.read_messages, remember)
    return call, state


def _read_openai(body: Any, headers: dict[bytes, bytes], execution: Execution, remember: bool) -> tuple[Call, WalkState]:
    envelope = openai.read_envelope(body)
    leading = openai.leading_system(envelope.messages)
    raw, raw_system, raw_tools = envelope.messages[leading:], envelope.messages[:leading], body.get("tools")
    if not raw:
        raise ApiError(calls.BAD_REQUEST, "messages: at least one user message is needed")
    memory_key = headers.get(anthropic.AGENT_HEADER, b"").decode("latin-1")[:64]
    known = execution.memory.find(memory_key, raw_system, raw_tools, raw)
    head = known.head if known else execution.memory.head(memory_key, raw_system, raw_tools) or openai.read_head(body, raw_system)
    agent_id, parent_agent_id, sub_agent = anthropic.agents(headers, head)
    call = Call(
        api="openai",
        head=head,
        messages=[],
        agent_id=agent_id,
        parent_agent_id=parent_agent_id,
        sub_agent=sub_agent,
        names_agents=sub_agent,
        side=False,
        max_tokens=envelope.max_completion_tokens or envelope.max_tokens,
        stop=[envelope.stop] if isinstance(envelope.stop, str) and envelope.stop else list(envelope.stop or []),
        stream=bool(envelope.stream),
        include_usage=bool(envelope.stream_options and envelope.stream_options.include_usage),
        model=envelope.model,
        metadata=_notes(headers, head.notes, envelope, ("temperature", "top_p")),
        arrived_s=time.time(),
    )
    state = _walk(call, raw, raw_system, raw_tools, memory_key, known, execution, openai.read_messages, remember)
    return call, state


def _walk(
    call: Call,
    raw: list[Any],
    raw_system: Any,
    raw_tools: Any,
    memory_key: str,
    known: Remembered | None,
    execution: Execution,
    read_messages: Any,
    remember: bool,
) -> WalkState:
    start = known.known if known else 0
    new = read_messages(raw[start:], start)
    call.messages = known.messages[:start] + new if known else new
    before = known.state if known else WalkState(call.head.key)
    if not new:
        return before
    states = execution.tree.walk(new, call.agent_id, before, start)
    if remember:
        shared = known.raw[:start] + raw[start:] if known else raw
        entry = Remembered(
            known.raw_system if known else raw_system,
            known.raw_tools if known else raw_tools,
            call.head,
            shared,
            call.messages,
            states[-2] if len(states) > 1 else before,
        )
        execution.memory.keep(memory_key, entry, known)
    return states[-1]


def _notes(headers: dict[bytes, bytes], head_notes: dict[str, str], envelope: Any, sampling: tuple[str, ...]) -> dict[str, Any]:
    """What a record keeps beside its tokens: some headers, what left the prompt, sampling the harness asked for and did not get."""
    notes: dict[str, Any] = dict(head_notes)
    for name in KEPT_HEADERS:
        if name in headers:
            notes[name.decode()] = headers[name].decode("latin-1")[:KEPT_HEADER_CHARS]
    asked = {name: getattr(envelope, name) for name in sampling if getattr(envelope, name) is not None}
    if asked:
        notes["sampling_requested"] = asked
    return notes
