"""Faults that users of other frameworks reported (C01-C17, C26-C28), each as the kind it belongs to."""

import json
import socket
import threading
import time

import pytest
from scripted import Answer, Turn, generated, http, path_ids

from gyre_lib.trajectories.provenance import emitted_mask, trainable_records

TOOLS = [
    {"name": "Bash", "description": "run", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}},
    {"name": "Edit", "description": "edit", "input_schema": {"type": "object", "properties": {"file": {"type": "string"}}}},
]


def user(text):
    return {"role": "user", "content": text}


def echo(answer):
    return {"role": "assistant", "content": answer["content"]}


def results(answer, *texts):
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)],
    }


def in_order(*turns):
    """A script that gives the turns one after the other."""
    left = list(turns)
    lock = threading.Lock()

    def script(request):
        with lock:
            return left.pop(0)

    return script


def test_c01_a_divergence_inside_a_response_is_a_branch_and_keeps_the_response(start):
    long = " ".join(f"word{n}" for n in range(600))
    h = start(in_order(Turn(long), Turn("short")))
    first = h.messages([user("write")])
    cut = {"role": "assistant", "content": first["content"][0]["text"][:900] + " but then something else"}
    h.messages([user("write"), cut, user("go on")])
    one, two = h.records()
    assert len(one.output_ids) > 600 and one.trainable
    assert two.parent_id == "" and two.branch_reason == "root"
    assert trainable_records([one, two]) == {one.request_id: True, two.request_id: True}
    assert two.output_ids and emitted_mask([two]).count(True) == len(two.output_ids)


@pytest.mark.parametrize("keep", [True, False])
def test_c02_thinking_kept_or_dropped_by_the_client_is_one_path(start, keep):
    h = start(in_order(*(Turn(f"answer {n}", thinking=f"thought {n}\n\nmore") for n in range(3))))
    messages = []
    for n in range(3):
        messages.append(user(f"question {n}"))
        answer = h.messages(messages)
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        kept = answer["content"] if keep else [block for block in answer["content"] if block["type"] == "text"]
        messages.append({"role": "assistant", "content": kept})
    records = h.records()
    assert [r.parent_id for r in records] == ["", records[0].request_id, records[1].request_id]
    assert [r.branch_reason for r in records] == ["root", "extension", "extension"]
    for record, sent in zip(records, h.engine.requests, strict=True):
        assert path_ids(records, record) == sent.ids


def test_c03_equal_bodies_of_two_sub_agents_are_two_turns(start):
    gate = threading.Barrier(2, timeout=20)

    def script(request):
        if "go on" not in request.text:
            gate.wait()
        return Turn("same text")

    h = start(script)
    out = {}

    def agent(name):
        head = {"x-claude-code-agent-id": name, "x-claude-code-session-id": "s"}
        first = h.messages([user("do the part")], head)
        out[name] = h.messages([user("do the part"), echo(first), user("go on")], head)

    threads = [threading.Thread(target=agent, args=(name,)) for name in ("a" * 17, "b" * 17)]
    [t.start() for t in threads]
    [t.join(30) for t in threads]
    records = h.records()
    assert len(records) == 4 and len(out) == 2
    by_id = {r.request_id: r for r in records}
    for record in records:
        if record.parent_id:
            assert by_id[record.parent_id].agent_id == record.agent_id
    assert all(trainable_records(records).values())
    assert {r.role_class for r in records} == {"sub_task"}


def test_c03_what_cannot_be_told_apart_never_trains(start):
    """Two answers to one delivered question, equal texts and different tokens, no agent id: either could be the one that goes on."""
    split = [Turn(raw="same"), Turn(raw="<think>\n\n</think>\n\nsame"), Turn("next")]
    h = start(in_order(*split))
    first = h.messages([user("q")])
    second = h.messages([user("q")])
    assert first["content"][-1]["text"] == second["content"][-1]["text"] and first["id"] != second["id"]
    h.messages([user("q"), {"role": "assistant", "content": "same"}, user("go on")])
    a, b, child = h.records()
    verdict = trainable_records([child, b, a])
    assert verdict == {a.request_id: False, b.request_id: False, child.request_id: True}


def test_c04_the_separator_is_there_and_no_target(start, qwen3):
    h = start(in_order(Turn("one"), Turn("two")))
    first = h.messages([user("hello")])
    h.messages([user("hello"), echo(first), user("again")])
    one, two = h.records()
    stream = path_ids([one, two], two)
    text = h.engine.tokenizer.decode(stream, skip_special_tokens=False)
    assert "one<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n" in text
    newline = h.engine.tokenizer.encode("\n", add_special_tokens=False).ids
    assert two.input_ids[: len(newline)] == newline and one.output_ids[-1] == qwen3.stop_token_ids[0]


def test_c05_a_turn_under_two_branches_is_one_node(start):
    h = start(in_order(Turn("shared"), Turn("left"), Turn("right")))
    first = h.messages([user("q")])
    h.messages([user("q"), echo(first), user("left?")])
    h.messages([user("q"), echo(first), user("right?")])
    shared, left, right = h.records()
    assert left.parent_id == right.parent_id == shared.request_id
    assert right.branch_reason == "history"
    assert not set(left.input_ids[:3]) - set(right.input_ids[:3])


def test_c06_an_answer_that_never_arrived_is_handed_out_again(start, proxy):
    """The client gives up while the answer is generated: the engine's request is cancelled and the retry is the only turn."""
    h = start(in_order(Turn("late", delay_s=30), Turn("in time"), Turn("after")))
    with pytest.raises(OSError):
        h.raw("/v1/messages", {"model": "m", "max_tokens": 100, "messages": [user("q")]}, timeout=0.5)
    answer = h.messages([user("q")])
    h.messages([user("q"), echo(answer), user("more")])
    records = h.records()
    assert [r.branch_reason for r in records] == ["root", "extension"]
    assert answer["content"][0]["text"] == "in time"
    assert all(trainable_records(records).values())


def test_c06_records_alone_settle_which_answer_was_taken(start):
    """A (delivered to a socket nobody read) and B (has children), in any order, also as the first turn."""
    h = start(in_order(Turn("A"), Turn("B"), Turn("child")))
    h.messages([user("q")])
    b = h.messages([user("q")])
    h.messages([user("q"), echo(b), user("more")])
    records = h.records()
    assert records[1].branch_reason == "retry"
    for order in (records, records[::-1], [records[1], records[2], records[0]]):
        verdict = trainable_records(order)
        assert [verdict[r.request_id] for r in records] == [False, True, True]


def test_c06_the_last_of_two_answers_without_children_trains(start):
    h = start(in_order(Turn("A"), Turn("B")))
    h.messages([user("q")])
    h.messages([user("q")])
    a, b = h.records()
    assert trainable_records([b, a]) == {a.request_id: False, b.request_id: True}


def test_c07_interleaved_agents_on_one_key_are_three_chains(start):
    def script(request):
        last = request.text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        return Turn(f"re {last}")

    h = start(script)
    histories = {name: [] for name in ("main", "sub one", "sub two")}
    for n in range(3):
        for name, messages in histories.items():
            messages.append(user(f"{name} {n}"))
            messages.append(echo(h.messages(messages, system=f"You are {name}.")))
    records = h.records()
    assert sum(r.parent_id == "" for r in records) == 3
    for record in records:
        text = h.engine.tokenizer.decode(path_ids(records, record), skip_special_tokens=False)
        assert sum(f"You are {name}." in text for name in histories) == 1


def test_c08_attribution_line_and_cache_marker_do_not_matter(start):
    h = start(in_order(Turn("one"), Turn("two")))

    def system(code):
        return [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.175; cch={code};"},
            {"type": "text", "text": "Be brief."},
        ]

    marked = [{"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]}]
    first = h.messages(marked, system=system("72702"))
    again = [user("q"), echo(first), {"role": "user", "content": [{"type": "text", "text": "r", "cache_control": {"type": "ephemeral"}}]}]
    h.messages(again, system=system("3edb3"))
    one, two = h.records()
    assert two.parent_id == one.request_id and two.branch_reason == "extension"
    assert "cch" not in h.engine.requests[1].text and "cch=3edb3" in json.loads(two.metadata)["billing"]


@pytest.mark.parametrize(
    ("raw", "calls", "shown"),
    [
        ('<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}', 0, "ls"),
        ('ok<tool_call>\n{"name": "Bash", "arguments": {"command": "echo broken}}\n</tool_call>', 0, "broken"),
        ('<tool_call>\n{"arguments": {"command": "ls"}}\n</tool_call>', 0, "arguments"),
        ('<tool_call>\n{"name": "Bash"}\n</tool_call>', 1, ""),
        ('<tool_call>\n{"name": "Bash", "arguments": 7}\n</tool_call>', 0, "7"),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', 0, "3"),
        ("<tool_call>\n[1, 2]\n</tool_call>", 0, "[1, 2]"),
        ('<tool_call>\n{"name": "Bash", "arguments": {"command": NaN}}\n</tool_call>', 0, "NaN"),
        ("</tool_call></think><tool_call></tool_call>", 0, ""),
    ],
)
def test_c09_malformed_calls_become_text_and_leave_the_tokens_alone(start, raw, calls, shown):
    h = start(in_order(Turn(raw=raw), Turn("ok")))
    answer = h.messages([user("q")], tools=TOOLS)
    assert sum(block["type"] == "tool_use" for block in answer["content"]) == calls
    assert shown in "".join(block.get("text", "") for block in answer["content"])
    follow = [user("q"), echo(answer), results(answer, *["done"] * calls) if calls else user("that was no call")]
    h.messages(follow, tools=TOOLS)
    one, two = h.records()
    assert one.output_ids == h.engine.turn_ids(Turn(raw=raw)) and len(one.output_logprobs) == len(one.output_ids)
    assert two.parent_id == one.request_id


def test_c09_calls_without_tools_are_text(start):
    h = start(in_order(Turn(calls=[("Bash", {"command": "ls"})])))
    answer = h.chat([user("q")])
    assert not answer["choices"][0]["message"].get("tool_calls") and "ls" in answer["choices"][0]["message"]["content"]


def test_c09_one_bad_call_of_three(start):
    good = '<tool_call>\n{{"name": "Bash", "arguments": {{"command": "{}"}}}}\n</tool_call>'
    h = start(in_order(Turn(raw=good.format("a") + '<tool_call>\n{"name": "Bash", "arg\n</tool_call>' + good.format("c"))))
    answer = h.messages([user("q")], tools=TOOLS)
    assert [b["input"]["command"] for b in answer["content"] if b["type"] == "tool_use"] == ["a", "c"]
    assert json.loads(h.records()[0].metadata)["statuses"] == ["ok", "invalid_json", "ok"]


def test_c10_text_that_looks_like_code_stays_text(start):
    poison = "__import__('os').system('touch /tmp/gyre-evaluated')"
    h = start(in_order(Turn(calls=[("Bash", {"command": poison, "list": poison})])))
    tools = [{"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}, "list": {"type": "array"}}}}]
    answer = h.messages([user("q")], tools=tools)
    assert answer["content"][-1]["input"] == {"command": poison, "list": poison}


def test_c11_arguments_as_text_or_object_and_schema_defaults_render_the_same(start):
    h = start(lambda request: Turn("x"))
    plain = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    full = [
        {
            "type": "function",
            "function": {"name": "f", "description": "", "strict": None, "parameters": {"type": "object", "properties": {}}},
        }
    ]
    for arguments, tools in (('{"a": 1, "b": [true]}', plain), ({"a": 1, "b": [True]}, full)):
        call = {"id": "foreign", "type": "function", "function": {"name": "f", "arguments": arguments}}
        h.chat(
            [
                user("q"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "foreign", "content": "r"},
            ],
            tools=tools,
        )
    assert h.engine.requests[0].ids == h.engine.requests[1].ids


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c12_two_results_in_the_order_given_in_one_turn(start, order):
    h = start(in_order(Turn(calls=[("Bash", {"command": "a"}), ("Bash", {"command": "b"})]), Turn("done")))
    first = h.messages([user("q")], tools=TOOLS)
    given = results(first, "result-0", "result-1")
    given["content"] = [given["content"][i] for i in order]
    h.messages([user("q"), echo(first), given], tools=TOOLS)
    one, two = h.records()
    text = h.engine.tokenizer.decode(two.input_ids, skip_special_tokens=False)
    assert two.parent_id == one.request_id
    assert text.count("<|im_start|>user") == 1
    assert text.index(f"result-{order[0]}") < text.index(f"result-{order[1]}")


@pytest.mark.parametrize(
    "echoed",
    [
        {"command": "ls", "flag": False, "limit": 2},
        {"limit": 2.0, "flag": "false", "command": "ls"},
        {"command": "ls", "flag": False, "limit": 2, "replace_all": False},
        {"__unparsedToolInput": {"raw": "x", "len": 1}},
    ],
)
def test_c13_reserialised_arguments_are_no_branch(start, echoed):
    h = start(in_order(Turn("  text \n", calls=[("Bash", {"command": "ls", "flag": False, "limit": 2.0})]), Turn("done")))
    first = h.messages([user("q")], tools=TOOLS)
    turn = [{**block, "input": echoed} if block["type"] == "tool_use" else block for block in first["content"]]
    h.messages([user("q"), {"role": "assistant", "content": turn}, results(first, "r")], tools=TOOLS)
    one, two = h.records()
    assert two.parent_id == one.request_id and two.branch_reason == "extension"
    assert h.engine.requests[1].ids == one.input_ids + one.output_ids + two.input_ids


def broken(ids, change):
    body = generated(ids, {"type": "stop", "matched": ids[-1]}, "0")
    change(body)
    return Answer(200, body)


def test_c14_logprobs_that_do_not_fit_are_refused_and_never_cut(start):
    calls = {"n": 0}

    def script(request):
        calls["n"] += 1
        if calls["n"] == 1:
            return broken([5, 6, 7], lambda body: body["meta_info"]["output_token_logprobs"].pop())
        if calls["n"] == 2:
            return broken([5, 6, 7], lambda body: body["meta_info"]["output_token_logprobs"].append([-0.1, 8, None]))
        return Turn("fine")

    h = start(script)
    answer = h.messages([user("q")])
    assert answer["content"][0]["text"] == "fine"
    (record,) = h.records()
    assert record.attempts == 3 and len(record.output_ids) == len(record.output_logprobs)
    assert "3 output ids but 2 log-probs" in h.proxy.log.read_text()


def test_c15_the_sampled_ids_value_counts(start):
    def script(request):
        body = generated([40, 41, 2], {"type": "stop", "matched": 2}, "0")
        body["meta_info"]["output_top_logprobs"] = [[[-0.001, 99, None], [-3.0, 40, None]]] * 3
        return Answer(200, body)

    h = start(script)
    h.messages([user("q")])
    (record,) = h.records()
    from scripted import logprob

    assert record.output_logprobs == pytest.approx([logprob(i, t) for i, t in enumerate([40, 41, 2])], abs=1e-6)
    assert record.temperature == 1.0


def test_c16_what_our_side_appends_is_no_target(start, qwen3):
    h = start(in_order(Turn("cut in the middle of", limit=3), Turn("rest")))
    first = h.messages([user("q")])
    assert first["stop_reason"] == "max_tokens"
    h.messages([user("q"), echo(first), user("resume")])
    one, two = h.records()
    end = qwen3.stop_token_ids[0]
    assert one.finish_reason == "length" and end not in one.output_ids
    assert two.parent_id == one.request_id and two.input_ids[0] == end
    assert len(one.output_logprobs) == len(one.output_ids) == 3


def test_c17_tokens_carry_the_version_that_sampled_them(start):
    def script(request):
        ids = h.engine.turn_ids(Turn("one two three four"))
        body = generated(ids, {"type": "stop", "matched": ids[-1]}, "5")
        body["meta_info"]["weight_versions"] = [
            {"version": "3", "start": 0, "end": 2},
            {"version": "4", "start": 2, "end": 2},
            {"version": "4", "start": 2, "end": 3},
            {"version": "5", "start": 3, "end": len(ids)},
        ]
        return Answer(200, body)

    h = start(script)
    h.messages([user("q")])
    (record,) = h.records()
    assert [(s.version, s.start, s.end) for s in record.version_spans] == [(3, 0, 2), (4, 2, 3), (5, 3, len(record.output_ids))]


def test_c26_tokens_before_a_move_are_kept_and_count(start):
    text = " ".join(["word"] * 200)
    slow = Turn(text, step_s=0.02, version="0")
    h = start(lambda request: slow, lambda request: Turn(raw=" tail" * 300, version="2"))
    first, second = h.engines
    done = {}
    thread = threading.Thread(target=lambda: done.update(h.messages([user("q")], max_tokens=100)))
    thread.start()
    while not h.engine.requests:
        time.sleep(0.01)
    time.sleep(0.8)
    h.route(second, {first: False})
    thread.join(20)
    (record,) = h.records()
    kept = record.version_spans[0].end
    moved = h.engines[second].requests[0]
    assert 0 < kept < 100 and len(record.output_ids) == 100 and record.finish_reason == "length"
    assert moved.ids == record.input_ids + record.output_ids[:kept]
    assert moved.sampling["max_new_tokens"] == 100 - kept
    assert [s.version for s in record.version_spans] == [0, 2]
    assert record.engine_ids == [first, second] and record.reroutes == 1
    assert done["stop_reason"] == "max_tokens" and done["usage"]["output_tokens"] == 100
    assert h.engines[first].aborted


def test_c27_a_lost_connection_is_one_turn_and_overload_ends(start, small_model, tmp_path, qwen3):
    from scripted import ProxyProcess, harness

    proxy = ProxyProcess(tmp_path / "run", small_model, "qwen3", retry_budget_s=1.0)
    try:
        with harness(proxy, small_model, qwen3, lambda request: Answer(500, {"error": "scripted fault"})) as h:
            began = time.monotonic()
            failed = h.raw("/v1/messages", {"model": "m", "max_tokens": 10, "messages": [user("q")]})
            assert failed.status == 529 and failed.json["error"]["type"] == "overloaded_error" and failed.headers["retry-after"]
            chat = h.raw("/v1/chat/completions", {"model": "m", "messages": [user("q")]})
            assert chat.status == 429 and chat.headers["retry-after"]
            assert time.monotonic() - began < 15
            assert h.records() == [] and "scripted fault" in proxy.log.read_text()
    finally:
        proxy.stop()


def test_c27_two_connections_for_one_call_share_one_generation(start):
    h = start(in_order(Turn("once", delay_s=1.0)))
    out = []
    body = {"model": "m", "max_tokens": 100, "messages": [user("q")]}
    threads = [
        threading.Thread(target=lambda stream=stream: out.append(h.raw("/v1/messages", {**body, "stream": stream})))
        for stream in (True, False)
    ]
    [t.start() for t in threads]
    [t.join(20) for t in threads]
    assert [r.status for r in out] == [200, 200]
    assert len(h.records()) == 1 and len(h.engine.requests) == 1


def test_c27_retries_right_after_disconnects_are_one_turn(start):
    """Whether a retry finds the old generation still open (it joins) or already cancelled (it starts anew): one record."""
    h = start(lambda request: Turn("late", delay_s=0.6))
    body = json.dumps({"model": "m", "max_tokens": 100, "messages": [user("q")]}).encode()
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-length: %d\r\n\r\n" % (h.token.encode(), len(body))
    for pause_s in (0.0, 0.05, 0.2, 0.0, 0.1):
        with socket.create_connection(("127.0.0.1", h.proxy.port)) as client:
            client.sendall(head + body)
            time.sleep(pause_s)
    answer = h.messages([user("q")], max_tokens=100)
    h.messages([user("q"), echo(answer), user("more")])
    records = h.records()
    assert [r.branch_reason for r in records] == ["root", "extension"] and all(trainable_records(records).values())


def test_c28_a_disconnect_cancels_the_engines_request(start, proxy):
    h = start(in_order(Turn("never read", delay_s=60)))
    with pytest.raises(OSError):
        h.raw("/v1/messages", {"model": "m", "max_tokens": 100, "stream": True, "messages": [user("q")]}, timeout=0.5)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not h.engine.aborted:
        time.sleep(0.05)
    assert h.engine.aborted == [h.engine.requests[0].rid]
    engine_id = next(iter(h.engines))
    assert proxy.control("inflight")["engines"][engine_id] == 0
    assert h.records() == []
    assert http(f"{proxy.url}/health").status == 200
