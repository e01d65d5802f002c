"""The pure core: canonical histories, the tree's walk, classes, and which records may train."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_lib.trajectories import classes, history
from gyre_lib.trajectories.history import EchoedCall, Part, Reply, ToolSpec
from gyre_lib.trajectories.provenance import emitted_mask, trainable_records
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan
from gyre_lib.trajectories.trajectory_tree import Node, TrajectoryTree, WalkState, empty_path
from proxy_app import anthropic, openai
from proxy_app.calls import ApiError


def said(text, role="user"):
    return history.supplied([Part(role, text)])


def node(name, parent, key, text="", calls=(), agent="", output=(1, 2)):
    total = (parent.total_tokens if parent else 0) + 2 + len(output)
    return Node(
        request_id=name,
        sequence=0,
        parent=parent,
        agent_id=agent,
        prompt_key=key,
        call_ids=frozenset(calls),
        text_digest=history.turn_text_digest(text),
        thinking_digest=history.thinking_digest(""),
        input_ids=[7, 8],
        output_ids=list(output),
        total_tokens=total,
        request_digest=name,
    )


class Play:
    """A simulated execution: agents talk over one tree, at each turn from any history they have had, echoing what they like."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.tree = TrajectoryTree()
        self.head = history.head(["system"], [])
        self.histories = {"": [[]], "a": [[]], "b": [[]]}
        self.count = 0

    def turn(self):
        agent = self.random.choice(list(self.histories))
        messages, parent = self.random.choice([(m, self.parent_of(m)) for m in self.histories[agent]])
        self.count += 1
        asked = [*messages, ("said", f"{agent} asks {self.count}")]
        walked = self.tree.walk(self.canonical(asked), agent, WalkState(self.head.key))[-1]
        assert walked.node is parent, "the parent is the call that the history went on from"
        assert walked.consumed == len(messages) and not walked.ambiguous
        calls = [f"call-{self.count}-{i}" for i in range(self.random.randrange(3))]
        made = node(f"n{self.count}", parent, walked.key, f"text {self.count}", calls, agent)
        self.tree.add(made)
        self.histories[agent].append([*asked, ("reply", made)])

    def parent_of(self, messages):
        return messages[-1][1] if messages else None

    def canonical(self, messages):
        out = []
        for kind, what in messages:
            if kind == "said":
                out.append(said(what))
            else:
                out.append(self.echo(what))
        return out

    def echo(self, made):
        """What came back: calls with other arguments, in another order, text moved or dropped beside calls."""
        number = made.request_id[1:]
        calls = [EchoedCall(c, "f", {"changed": self.random.random()}) for c in made.call_ids]
        self.random.shuffle(calls)
        text = f"text {number}" if not calls else self.random.choice([f"  text {number}", "", "other"])
        return history.reply(text if calls else self.random.choice([text, f" {text}\n"]), self.random.choice(["", "thought"]), calls)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_interleaving_of_agents_and_branches_finds_its_parent(seed):
    play = Play(seed)
    for _ in range(25):
        play.turn()


@given(st.lists(st.sampled_from("ums"), max_size=12), st.integers(0, 12))
def test_a_walk_in_two_parts_equals_one(kinds, cut):
    messages = [said(f"{i}") if kind != "m" else history.reply(f"r{i}", "", []) for i, kind in enumerate(kinds)]
    tree = TrajectoryTree()
    first = WalkState(history.head([], []).key)
    whole = tree.walk(messages, "", first)
    cut = min(cut, len(messages))
    begin = tree.walk(messages[:cut], "", first)
    rest = tree.walk(messages[cut:], "", begin[-1] if begin else first, cut)
    assert [*begin, *rest] == whole


def test_token_paths_share_their_buffer_and_branches_copy():
    path = empty_path().extended([1, 2])
    left, right = path.extended([3]), path.extended([4, 5])
    assert (left.ids(), right.ids(), path.ids()) == ([1, 2, 3], [1, 2, 4, 5], [1, 2])
    assert left.buffer is path.buffer and right.buffer is not path.buffer
    assert empty_path().extended([]).ids() == [] and left.extended([]) is left


def test_a_quoted_turn_is_known_wherever_it_stands():
    tree = TrajectoryTree()
    root = node("n1", None, b"k", "", ["c1", "c2"])
    tree.add(root)
    both = history.reply("", "", [EchoedCall("c2", "f", {}), EchoedCall("c1", "f", {})])
    one = history.reply("", "", [EchoedCall("c1", "f", {})])
    assert tree.issued(both) is root and tree.issued(one) is None
    assert tree.issued(history.reply("", "", [])) is None


def test_a_foreign_turn_keeps_its_place_when_its_text_is_issued_elsewhere():
    """Made-up assistant text stands in a history; later the policy says the very same words in another branch."""
    tree = TrajectoryTree()
    start = WalkState(history.head([], []).key)
    quoted = [said("q"), history.reply("No response requested.", "", []), said("go on")]
    before = tree.walk(quoted, "", start)[-1]
    tree.add(node("n1", None, before.key, "first"))
    tree.add(node("n2", None, b"elsewhere", "No response requested."))
    after = tree.walk([*quoted, history.reply("first", "", []), said("more")], "", start)[-1]
    assert after.node is not None and after.node.request_id == "n1"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "citations": []}]},
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": False, "content": [{"type": "text", "text": "r"}]}],
            },
        ),
        ({"role": "system", "content": "x"}, {"role": "system", "content": [{"type": "text", "text": "x"}]}),
    ],
)
def test_spellings_of_one_message_are_equal(first, second):
    assert anthropic.read_messages([first], 0) == anthropic.read_messages([second], 0)


def test_what_differs_is_different():
    texts = [
        {"role": "user", "content": "x"},
        {"role": "system", "content": "x"},
        {"role": "user", "content": "x "},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d", "content": "x"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": ""}]},
    ]
    assert len({m.digest for m in anthropic.read_messages(texts, 0)}) == len(texts)


def test_both_apis_read_one_tool_schema_alike():
    chat = openai.read_head(
        {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}]}, []
    )
    messages = anthropic.read_head({"tools": [{"name": "f", "input_schema": {"type": "object"}}]})
    assert chat.key == messages.key and chat.tools == (ToolSpec("f", "", {"type": "object"}),)


def test_errors_name_their_place():
    with pytest.raises(ApiError, match=r"messages\.1\.content"):
        anthropic.read_messages([{"role": "user", "content": "x"}, {"role": "user", "content": 7}], 0)
    with pytest.raises(ApiError, match=r"tools\.0\.name"):
        anthropic.read_head({"tools": [{"input_schema": {}}]})


SUMMARY_TEXT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n…<summary>…"


def test_a_summary_request_is_known_by_its_trailing_user_message():
    result = history.supplied([Part("tool", "r", "c"), Part("user", SUMMARY_TEXT)])
    assert classes.is_summary_request([said("q"), result])
    assert classes.is_summary_request([said("q"), result, said("agents", "system")])
    assert not classes.is_summary_request([result, said("go on")])
    assert not classes.is_summary_request([result, history.reply("s", "", []), said("x")])
    assert not classes.is_summary_request([said(f"I was told: {SUMMARY_TEXT}")])


def test_side_requests_have_no_agent_and_a_mark():
    schema = {"output_config": {"format": {"type": "json_schema"}}}
    assert classes.is_side_request({**schema, "tools": []}, "")
    assert classes.is_side_request({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "")
    assert not classes.is_side_request({**schema, "tools": [{"name": "f", "input_schema": {}}]}, "")
    assert not classes.is_side_request({**schema, "tools": []}, "agent")
    assert not classes.is_side_request({"output_config": {"effort": "high"}, "tools": []}, "")


def record(name, parent="", digest="", started=0.0, **changes):
    base = RequestRecord(
        run_id="r",
        execution_id="e",
        request_id=name,
        sequence=int(started),
        parent_id=parent,
        agent_id="",
        parent_agent_id="",
        role_class="main_task",
        branch_reason="root",
        input_ids=[1, 2, 3],
        output_ids=[4, 5],
        output_logprobs=[-0.1, -0.2],
        version_spans=[VersionSpan(0, 0, 2)],
        trainable=True,
        untrainable_reason="",
        request_digest=digest or name,
        history_key="00",
        finish_reason="stop",
        temperature=1.0,
        started_s=started,
    )
    return replace(base, **changes)


def test_only_emitted_tokens_can_be_targets():
    assert emitted_mask([record("a"), record("b", "a")]) == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2


@given(st.permutations(range(6)))
def test_what_may_train_does_not_depend_on_order(order):
    records = [
        record("a1", digest="a", started=1),
        record("a2", digest="a", started=2),
        record("b", "a1", started=3),
        record("c1", "b", digest="c", started=4),
        record("c2", "b", digest="c", started=5),
        record("side", role_class="side", started=6),
    ]
    verdict = trainable_records([records[i] for i in order])
    assert verdict == {"a1": True, "a2": False, "b": True, "c1": False, "c2": True, "side": False}


def test_two_answers_that_both_went_on_both_train_and_doubt_trains_nothing():
    both = [record("a1", digest="a"), record("a2", digest="a", started=1), record("x", "a1"), record("y", "a2")]
    assert all(trainable_records(both).values())
    doubt = [*both, record("z", "a2", metadata=json.dumps({"ambiguous": ["a1", "a2"]}))]
    verdict = trainable_records(doubt)
    assert (verdict["a1"], verdict["a2"], verdict["z"]) == (False, False, True)
    assert trainable_records([record("n", trainable=False)]) == {"n": False}


def test_equal_bodies_of_two_agents_are_not_retries():
    twins = [record("a", digest="d", agent_id="x"), record("b", digest="d", agent_id="y")]
    assert all(trainable_records(twins).values())


def test_reply_identity_is_stable():
    one = history.reply("t", "", [EchoedCall("c", "f", {"a": 1, "b": 2})])
    two = history.reply("t", "", [EchoedCall("c", "f", {"b": 2, "a": 1})])
    assert isinstance(one, Reply) and one.digest == two.digest and one.call_ids == {"c"}
