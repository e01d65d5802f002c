"""Reading a request by what is new in it gives what reading it whole gives."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy_app.calls import ApiError
from proxy_app.reading import read_call
from proxy_app.sessions import REMEMBERED_AGENTS, Execution, PrefixMemory, Remembered


def body_of(messages, system="s", tools=None):
    return {"model": "m", "max_tokens": 10, "system": system, "tools": tools, "messages": messages}


class Writer:
    """A harness that appends, moves markers, respells, rewrites old messages, and changes its system prompt."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.messages, self.system, self.count = [], "s", 0

    def next(self):
        self.count += 1
        for _ in range(self.random.randrange(1, 4)):
            self.messages.append({"role": "user", "content": f"u{self.count} {self.random.randrange(3)}"})
            if self.random.random() < 0.6:
                self.messages.append({"role": "assistant", "content": [{"type": "text", "text": f"a{self.random.randrange(3)}"}]})
        self.messages.append({"role": "user", "content": "end"})
        if self.random.random() < 0.2:
            self.messages[self.random.randrange(len(self.messages))]["content"] = "rewritten"
        if self.random.random() < 0.1:
            self.system = f"s{self.count}"
        if self.random.random() < 0.1:
            self.messages = self.messages[: self.random.randrange(1, len(self.messages) + 1)]
        sent = copy.deepcopy(self.messages)
        if self.random.random() < 0.5 and isinstance(sent[-1]["content"], str):
            sent[-1]["content"] = [{"type": "text", "text": sent[-1]["content"], "cache_control": {"type": "ephemeral"}}]
        return body_of(sent, self.system)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_remembering_changes_nothing(seed):
    writer, remembering = Writer(seed), Execution("e")
    for _ in range(8):
        body = writer.next()
        with_memory, state = read_call("anthropic", copy.deepcopy(body), {}, remembering)
        fresh, plain = read_call("anthropic", body, {}, Execution("e"))
        assert state == plain and with_memory.messages == fresh.messages and with_memory.head == fresh.head


def test_only_what_is_new_is_validated():
    execution = Execution("e")
    messages = [{"role": "user", "content": f"m{n}"} for n in range(50)]
    read_call("anthropic", body_of(messages), {}, execution)
    known = execution.memory.find("", "s", None, [*copy.deepcopy(messages), {"role": "user", "content": "new"}])
    assert known is not None and known.known == 49
    with pytest.raises(ApiError, match=r"messages"):
        read_call("anthropic", body_of([*messages, {"role": "user", "content": 5}]), {}, execution)
    assert execution.memory.find("", "other", None, messages) is None
    assert execution.memory.find("agent", "s", None, messages) is None


def test_memory_is_bounded():
    memory = PrefixMemory()
    execution = Execution("e")
    read_call("anthropic", body_of([{"role": "user", "content": "x"}]), {}, execution)
    entry = execution.memory.find("", "s", None, [{"role": "user", "content": "x"}])
    assert isinstance(entry, Remembered)
    for n in range(10 * REMEMBERED_AGENTS):
        memory.keep(f"agent-{n}", entry, None)
        memory.keep("busy", entry, None)
    assert len(memory._by_agent) <= REMEMBERED_AGENTS and len(memory._by_agent["busy"]) <= 3
