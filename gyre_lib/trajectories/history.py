"""Canonical histories: what a harness says a conversation is, freed of what it varies without meaning.

A request's history is a list of messages of two kinds: `Supplied` (system, user, tool results: everything from outside) and `Reply`
(an assistant turn as the harness echoes it). Canonical means: cache markers and citations dropped, a string is one text block, an absent
`is_error` is false. A `Reply` is never compared by its content when its calls carry ids that we issued: harnesses reorder, coerce and
complete arguments, so the ids are its identity (facts measured on Claude Code; SYSTEM section 8).

Digests are 16 bytes of BLAKE2b. Keys are chained: `key(prefix + message) = digest(key(prefix), message)`, so a walk over a history costs
one small digest a message and needs no text of the prefix.
"""

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16
BILLING_PREFIX = "x-anthropic-billing-header:"


def digest(*parts: bytes) -> bytes:
    """16-byte digest of length-prefixed parts."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(b"%d:" % len(part))
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Part:
    """One supplied piece in the order the harness gave it. Role is user, tool or system."""

    role: str
    text: str
    call_id: str = ""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Supplied:
    """A message from outside: consecutive parts of one incoming message."""

    parts: tuple[Part, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class EchoedCall:
    """A tool call as echoed; arguments are an object, or the raw text where they are no object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant turn as the harness echoes it."""

    text: str
    thinking: str
    calls: tuple[EchoedCall, ...]
    digest: bytes
    """Of the whole content."""

    @property
    def identity(self) -> bytes:
        """What a turn is known by where we did not issue it: its content if it has calls, else its text (clients drop old thinking)."""
        return self.digest if self.calls else turn_text_digest(self.text)

    @property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.call_id for call in self.calls)


Message = Supplied | Reply


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy sees it."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_template(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the first message: system text and tools. `key` starts the chain."""

    system: str
    tools: tuple[ToolSpec, ...]
    key: bytes
    notes: dict[str, str] = field(default_factory=dict)
    """What was taken out of the prompt and is kept as metadata (billing line)."""


def supplied(parts: list[Part]) -> Supplied:
    pieces: list[bytes] = []
    for part in parts:
        pieces.append(f"{part.role}\0{part.call_id}\0{int(part.is_error)}".encode("utf-8", "surrogatepass"))
        pieces.append(part.text.encode("utf-8", "surrogatepass"))
    return Supplied(tuple(parts), digest(*pieces))


def reply(text: str, thinking: str, calls: list[EchoedCall]) -> Reply:
    body = json.dumps([text, thinking, [[call.call_id, call.name, call.arguments] for call in calls]], sort_keys=True)
    return Reply(text, thinking, tuple(calls), digest(body.encode()))


def head(system_texts: list[str], tools: list[ToolSpec]) -> Head:
    """Head of a conversation. Attribution lines (the billing block of Claude Code) leave the prompt and stay as a note."""
    billing = [text for text in system_texts if text.startswith(BILLING_PREFIX)]
    notes = {"billing": billing[-1]} if billing else {}
    system = "\n\n".join(text for text in system_texts if text and not text.startswith(BILLING_PREFIX))
    described = json.dumps([[tool.name, tool.description, tool.parameters] for tool in tools])
    return Head(system, tuple(tools), digest(b"head", system.encode("utf-8", "surrogatepass"), described.encode()), notes)


def turn_text_digest(text: str) -> bytes:
    """Identity of a turn without calls: its text without the white space that clients trim at both ends."""
    return digest(b"text", text.strip().encode("utf-8", "surrogatepass"))


def thinking_digest(text: str) -> bytes:
    return digest(b"thinking", text.strip().encode("utf-8", "surrogatepass"))


def extend(key: bytes, message_digest: bytes) -> bytes:
    """Key of a prefix with one more message."""
    return blake2b(key + message_digest, digest_size=DIGEST_BYTES).digest()


def after_node(request_id: str) -> bytes:
    """Key right after a turn that we issued: whatever its echo looks like, the path is that of the node."""
    return digest(b"node", request_id.encode())
