"""What the proxy knows of one execution while it runs: its tree, its open calls, and the prefixes it has read before."""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from gyre_lib.trajectories.history import Head, Message
from gyre_lib.trajectories.tito_record import RequestRecord
from gyre_lib.trajectories.trajectory_tree import TAIL_TOKENS, Node, TrajectoryTree, WalkState
from proxy_app.calls import Answer

REMEMBERED_AGENTS = 64
REMEMBERED_PER_AGENT = 3


@dataclass(frozen=True, slots=True)
class Remembered:
    """A history that was read and matched before. A later request that begins the same way starts from here."""

    raw_system: Any
    raw_tools: Any
    head: Head
    raw: list[Any]
    messages: list[Message]
    state: WalkState
    """After all messages but the last: harnesses rewrite markers in the last one."""

    @property
    def known(self) -> int:
        """Messages of the prefix that is known."""
        return len(self.raw) - 1


class PrefixMemory:
    """The last histories of each agent of an execution."""

    def __init__(self) -> None:
        self._by_agent: OrderedDict[str, deque[Remembered]] = OrderedDict()

    def find(self, agent_id: str, raw_system: Any, raw_tools: Any, raw: list[Any]) -> Remembered | None:
        """The longest remembered history that `raw` extends, compared by value; None when there is none."""
        best: Remembered | None = None
        for entry in self._by_agent.get(agent_id, ()):
            known = entry.known
            if len(raw) <= known or (best is not None and known <= best.known):
                continue
            if raw[:known] == entry.raw[:known] and raw_system == entry.raw_system and raw_tools == entry.raw_tools:
                best = entry
        return best

    def head(self, agent_id: str, raw_system: Any, raw_tools: Any) -> Head | None:
        """The head of a remembered history with the same system and tools."""
        for entry in self._by_agent.get(agent_id, ()):
            if raw_system == entry.raw_system and raw_tools == entry.raw_tools:
                return entry.head
        return None

    def keep(self, agent_id: str, entry: Remembered, replaces: Remembered | None) -> None:
        entries = self._by_agent.get(agent_id)
        if entries is None:
            entries = self._by_agent[agent_id] = deque(maxlen=REMEMBERED_PER_AGENT)
            if len(self._by_agent) > REMEMBERED_AGENTS:
                self._by_agent.popitem(last=False)
        else:
            self._by_agent.move_to_end(agent_id)
        if replaces is not None:
            for index, old in enumerate(entries):
                if old is replaces:
                    del entries[index]
                    break
        entries.append(entry)


@dataclass(slots=True, eq=False)
class Flight:
    """A call on its way: one generation, however many connections wait for it."""

    task: "asyncio.Task[tuple[Answer, Node]]"
    waiters: int = 0


@dataclass(slots=True, eq=False)
class Execution:
    """The proxy's state of one execution."""

    execution_id: str
    tree: TrajectoryTree = field(default_factory=TrajectoryTree)
    memory: PrefixMemory = field(default_factory=PrefixMemory)
    flights: dict[str, Flight] = field(default_factory=dict)
    payloads: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Name and arguments of each call that we issued, by call id."""
    task_texts: dict[bytes, str] = field(default_factory=dict)
    """Digests of long text arguments of issued calls, with the agent that gave them: a root that begins with one is a sub-agent's."""
    agents_by_head: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    """(agent, parent agent) of roots without an agent header, by their first prompt key."""
    parent_agents: dict[str, str] = field(default_factory=dict)
    undelivered: dict[str, Answer] = field(default_factory=dict)
    """Recorded answers that have not reached the harness yet, by request id."""
    restored_finish: dict[str, str] = field(default_factory=dict)
    """How the turns read back from the store ended."""
    committing: "set[asyncio.Task[None]]" = field(default_factory=set)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    loaded: bool = False
    next_sequence: int = 0
    output_tokens: int = 0

    def restore(self, records: list[RequestRecord], notes: list[dict[str, Any]]) -> None:
        """Rebuild the tree from records in sequence order; `notes` are their parsed metadata."""
        for record, note in zip(records, notes, strict=True):
            parent = self.tree.nodes.get(record.parent_id) if record.parent_id else None
            total = (parent.total_tokens if parent else 0) + len(record.input_ids) + len(record.output_ids)
            node = Node(
                request_id=record.request_id,
                sequence=record.sequence,
                parent=parent,
                agent_id=record.agent_id,
                prompt_key=bytes.fromhex(record.history_key),
                call_ids=frozenset(note.get("calls", [])),
                text_digest=bytes.fromhex(note.get("text", "")),
                thinking_digest=bytes.fromhex(note.get("thinking", "")),
                input_ids=record.input_ids,
                output_ids=record.output_ids,
                total_tokens=total,
                request_digest=record.request_digest,
                delivered=False,
            )
            self.restored_finish[record.request_id] = record.finish_reason
            node.tail = prompt_tail(parent, record.input_ids)
            node.pack()
            self.tree.add(node)
            if parent is not None:
                parent.delivered = True
            self.next_sequence = max(self.next_sequence, record.sequence + 1)
            self.output_tokens += len(record.output_ids)


def prompt_tail(parent: Node | None, input_ids: list[int]) -> list[int]:
    """The last ids of a prompt that ends with `input_ids` after the parent's path."""
    if len(input_ids) >= TAIL_TOKENS or parent is None:
        return input_ids[-TAIL_TOKENS:]
    before = [*parent.tail, *parent.output_ids[-TAIL_TOKENS:]][-(TAIL_TOKENS - len(input_ids)) :]
    return before + input_ids
