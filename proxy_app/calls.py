"""A model call free of its API's dialect, and the errors that each API words in its own way."""

from dataclasses import dataclass, field
from typing import Any

from gyre_lib.trajectories.history import Head, Message


class ApiError(Exception):
    """An error the harness sees. `kind` is a key of the API modules' tables; `retry_after_s` goes out as a header."""

    def __init__(self, kind: str, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


class PromptTooLong(ApiError):
    """The prompt leaves no room for an answer. Each API says it in the words that make its clients compact or stop."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(PROMPT_TOO_LONG, f"prompt is too long: {tokens} tokens > {limit} maximum")
        self.tokens = tokens
        self.limit = limit


BAD_REQUEST = "bad_request"
UNAUTHENTICATED = "unauthenticated"
ENDED = "ended"
NOT_FOUND = "not_found"
NOT_ALLOWED = "not_allowed"
TOO_LARGE = "too_large"
TOO_SLOW = "too_slow"
PROMPT_TOO_LONG = "prompt_too_long"
OVERLOADED = "overloaded"


@dataclass(slots=True)
class Call:
    """One model call; `messages` are in canonical form."""

    api: str
    head: Head
    messages: list[Message]
    agent_id: str
    parent_agent_id: str
    sub_agent: bool
    names_agents: bool
    """The harness marks its sub-agents: no mark means the main agent."""
    side: bool
    max_tokens: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    model: str
    metadata: dict[str, Any] = field(default_factory=dict)
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerCall:
    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the harness gets. `finish` is stop, length or tool_calls."""

    request_id: str
    text: str
    thinking: str
    calls: tuple[AnswerCall, ...]
    finish: str
    stop_sequence: str
    prompt_tokens: int
    output_tokens: int
    model: str


def call_id(api: str, request_id: str, index: int) -> str:
    """Call ids follow from the request id, so that a restarted proxy derives the same ones."""
    return f"toolu_{request_id}_{index}" if api == "anthropic" else f"call_{request_id}_{index}"


def pieces(text: str, events: int) -> list[str]:
    """Text cut into about `events` pieces of at least four characters, for streaming."""
    size = max(4, -(-len(text) // max(1, events)))
    return [text[start : start + size] for start in range(0, len(text), size)]
