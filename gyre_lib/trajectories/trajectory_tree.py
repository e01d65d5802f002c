"""The trajectory tree of one execution: one node per model call, found again by what we issued and never by what came back.

Invariants
1. A node's prompt is its parent's prompt, the parent's output, then the node's own `input_ids`; nothing is stored twice.
2. The longest matching path wins. A turn is recognised among the nodes that had exactly this prompt: by its call ids when it has calls,
   else by its text, then by its thinking, then by its agent. Content that differs is a branch, not an error.
3. Outputs that were generated independently stay separate nodes, also under one prompt.
4. Where two nodes cannot be told apart the match says so (`ambiguous`): none of them may train.

Pure: no clock, no I/O. The walk costs one digest a message; a caller that remembers the state of a known prefix starts from there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from gyre_lib.trajectories import history
from gyre_lib.trajectories.history import Reply

TAIL_TOKENS = 40
"""Last ids of a prompt that a renderer's bridge needs: measured to give the same continuation as the whole prompt."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """Ids from the root to some point, kept as the inside of a JSON list in a buffer that descendants share: extending costs O(new)."""

    buffer: bytearray
    length: int

    def extended(self, ids: Sequence[int]) -> "TokenPath":
        if not ids:
            return self
        text = orjson.dumps(list(ids))[1:-1]
        buffer = self.buffer if len(self.buffer) == self.length else self.buffer[: self.length]
        if self.length:
            buffer += b","
        buffer += text
        return TokenPath(buffer, len(buffer))

    def as_json(self) -> bytes:
        """`1,2,3`: the inside of a JSON list."""
        return bytes(memoryview(self.buffer)[: self.length])

    def ids(self) -> list[int]:
        return orjson.loads(b"[" + self.as_json() + b"]")


def empty_path() -> TokenPath:
    return TokenPath(bytearray(), 0)


@dataclass(slots=True, eq=False)
class Node:
    """A recorded model call."""

    request_id: str
    sequence: int
    parent: "Node | None"
    agent_id: str
    prompt_key: bytes
    call_ids: frozenset[str]
    text_digest: bytes
    thinking_digest: bytes
    input_ids: Sequence[int]
    """Empty once `path` holds them."""
    output_ids: Sequence[int]
    """Kept packed: an execution of 200k tokens stays in memory while it runs."""
    total_tokens: int
    """Length of prompt and output together."""
    request_digest: str
    tail: list[int] = field(default_factory=list)
    """Last TAIL_TOKENS ids of the prompt (before the output)."""
    path: TokenPath | None = None
    """Prompt and output; made on demand for nodes read back from the store."""
    children: int = 0
    continued: bool = False
    """Its own agent went on from here (a fork of it by another agent does not count)."""
    delivered: bool = True
    """The harness is known to have had the whole answer."""

    def token_path(self) -> TokenPath:
        """Prompt and output from the root, built from the nearest ancestor that has it."""
        missing: list[Node] = []
        node: Node | None = self
        while node is not None and node.path is None:
            missing.append(node)
            node = node.parent
        path = node.path if node is not None and node.path is not None else empty_path()
        for node in reversed(missing):
            path = path.extended(node.input_ids).extended(node.output_ids)
            node.path, node.input_ids = path, ()
        return path

    def pack(self) -> None:
        """Hold the ids in four bytes each, and the input only in the path."""
        self.output_ids = array("i", self.output_ids)
        self.input_ids = array("i", self.input_ids) if self.path is None else ()

    @property
    def prompt_tokens(self) -> int:
        return self.total_tokens - len(self.output_ids)


@dataclass(frozen=True, slots=True)
class WalkState:
    """Where a walk stands after some messages: chain key, deepest node recognised, messages up to and including its turn."""

    key: bytes
    node: Node | None = None
    consumed: int = 0
    ambiguous: tuple[str, ...] = ()


@dataclass(slots=True)
class TrajectoryTree:
    """All nodes of one execution."""

    nodes: dict[str, Node] = field(default_factory=dict)
    by_prompt: dict[bytes, list[Node]] = field(default_factory=dict)
    by_call: dict[str, Node] = field(default_factory=dict)
    by_text: dict[bytes, list[Node]] = field(default_factory=dict)
    by_request: dict[str, list[Node]] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)

    def add(self, node: Node) -> None:
        self.nodes[node.request_id] = node
        self.by_prompt.setdefault(node.prompt_key, []).append(node)
        for call_id in node.call_ids:
            self.by_call[call_id] = node
        if not node.call_ids:
            self.by_text.setdefault(node.text_digest, []).append(node)
        self.by_request.setdefault(node.request_digest, []).append(node)
        self.agents.add(node.agent_id)
        if node.parent is not None:
            node.parent.children += 1
            node.parent.continued |= node.agent_id == node.parent.agent_id

    def walk(self, messages: Sequence[history.Message], agent_id: str, start: WalkState, offset: int = 0) -> list[WalkState]:
        """States after each of `messages`, beginning after `start`; `offset` is how many messages came before them.

        The last state's `node` is the parent of the request, its `consumed` says which messages the path already holds,
        and its `key` is the request's prompt key.
        """
        states: list[WalkState] = []
        state = start
        for index, message in enumerate(messages, offset + 1):
            if isinstance(message, Reply):
                state = self._after_reply(message, agent_id, state, index)
            else:
                state = WalkState(history.extend(state.key, message.digest), state.node, state.consumed, state.ambiguous)
            states.append(state)
        return states

    def _after_reply(self, message: Reply, agent_id: str, state: WalkState, index: int) -> WalkState:
        node, doubtful = recognise(self.by_prompt.get(state.key, ()), message, agent_id)
        if node is not None:
            return WalkState(history.after_node(node.request_id), node, index, state.ambiguous + doubtful)
        issued = self.issued(message) if message.calls else None
        identity = history.after_node(issued.request_id) if issued is not None else message.identity
        return WalkState(history.extend(state.key, identity), state.node, state.consumed, state.ambiguous)

    def issued(self, message: Reply) -> Node | None:
        """The node whose turn this is, wherever it stands in the tree; None if we did not issue it, or only a part of it."""
        if message.calls:
            node = self.by_call.get(message.calls[0].call_id)
            return node if node is not None and node.call_ids == message.call_ids else None
        if not message.text.strip():
            return None
        found = self.by_text.get(history.turn_text_digest(message.text), [])
        return found[0] if found else None


def recognise(candidates: Sequence[Node], message: Reply, agent_id: str) -> tuple[Node | None, tuple[str, ...]]:
    """The node among `candidates` (equal prompts) that issued this turn, and the ids that cannot be told from it."""
    if not candidates:
        return None, ()
    if message.calls:
        ids = message.call_ids
        hits = [node for node in candidates if node.call_ids == ids]
    else:
        wanted = history.turn_text_digest(message.text)
        hits = [node for node in candidates if not node.call_ids and node.text_digest == wanted]
    if len(hits) > 1:
        thinking = history.thinking_digest(message.thinking)
        hits = [node for node in hits if node.agent_id == agent_id] or hits
        if message.thinking:
            hits = [node for node in hits if node.thinking_digest == thinking] or hits
        hits = [node for node in hits if node.delivered] or hits
    if not hits:
        return None, ()
    same_ids = all(node.output_ids == hits[0].output_ids for node in hits)
    doubtful = () if same_ids else tuple(node.request_id for node in hits)
    return hits[-1], doubtful


def branch_reason(parent: Node | None, agent_id: str, summary: bool, repeated: bool) -> str:
    """Why a new node stands where it stands: root, retry, compaction, fork, history or extension."""
    if repeated:
        return "retry"
    if summary:
        return "compaction"
    if parent is None:
        return "root"
    if parent.agent_id != agent_id:
        return "fork"
    return "history" if parent.continued else "extension"
