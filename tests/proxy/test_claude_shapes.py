"""The shapes that Claude Code 2.1.220 was seen to send, rebuilt small: what it varies, moves, drops and quotes must not break a path.

The same claims as `test_claude_code.py` makes of the real program, for the ordinary suite.
"""

import threading

import pytest
from scripted import ProxyProcess, Turn, harness, path_ids

from gyre_lib.trajectories.admission import admit
from gyre_lib.trajectories.provenance import trainable_records
from proxy_app.rendering import Rendering

SUMMARY = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n<analysis> … <summary> …"
TOOLS = [
    {"name": name, "description": f"the {name} tool", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
    for name in ("Bash", "Agent", "Edit")
]
AGENTS = "Available agent types: general-purpose, Explore"


@pytest.fixture(scope="module", params=["qwen3", "qwen38"])
def policy(request, small_model, tmp_path_factory):
    proxy = ProxyProcess(tmp_path_factory.mktemp("run"), small_model, request.param)
    yield proxy, small_model, Rendering(small_model, request.param)
    proxy.stop()


class Cli:
    """Builds requests as the CLI does: markers that move, strings for lists, an echo that is not what was sent."""

    def __init__(self, h, agent="", parent="", system="You are Claude Code.", task="Do the work."):
        self.h, self.agent, self.parent = h, agent, parent
        self.suffix, self.system, self.tools = "a1", system, TOOLS
        self.messages = [
            {"role": "user", "content": [text("<system-reminder>\n# currentDate\n</system-reminder>\n\n"), text(task)]},
            {"role": "system", "content": AGENTS},
        ]

    def headers(self):
        found = {"x-claude-code-session-id": "s-1", "user-agent": "claude-cli/2.1.220 (external, sdk-cli)"}
        if self.agent:
            found["x-claude-code-agent-id"] = self.agent
        if self.parent:
            found["x-claude-code-parent-agent-id"] = self.parent
        return found

    def body(self, messages):
        billing = f"x-anthropic-billing-header: cc_version=2.1.220.{self.suffix}; cc_entrypoint=sdk-cli;"
        billing += " cc_is_subagent=true;" if self.agent else ""
        return {
            "system": [text(billing), {**text("You are a Claude agent."), "cache_control": {"type": "ephemeral"}}, text(self.system)],
            "tools": self.tools,
            "metadata": {"user_id": '{"session_id":"s-1"}'},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "messages": [*messages[:-1], marked(messages[-1])],
        }

    def ask(self, messages=None, **more):
        """Send; returns the reply, not yet in the history."""
        body = {**self.body(messages or self.messages), **more}
        return self.h.messages(body.pop("messages"), self.headers(), **body)

    def take(self, reply, *results, change=lambda block: block):
        """Put the reply's echo and its tool results (in the order given) into the history."""
        self.messages.append({"role": "assistant", "content": [change(dict(block)) for block in reply["content"]]})
        calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": calls[index], "content": value} for index, value in results]
        self.messages.append({"role": "user", "content": blocks or "go on"})

    def step(self, *results, **more):
        reply = self.ask()
        self.take(reply, *(results or [(0, "ok")]), **more)
        return reply


def text(value):
    return {"type": "text", "text": value}


def marked(message):
    """The cache marker sits on the last block of the last message; a plain text message is a list while it has it."""
    content = [text(message["content"])] if isinstance(message["content"], str) else [dict(block) for block in message["content"]]
    content[-1] = {**content[-1], "cache_control": {"type": "ephemeral"}}
    return {"role": message["role"], "content": content}


def bash(n, thinking="t"):
    return Turn(f"Step {n}.", f"{thinking} {n}", [("Bash", {"command": f"echo {n}"})])


def counting(*turns):
    lock, left = threading.Lock(), list(turns)

    def script(request):
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return script


def exact(h):
    """Every record is the prompt that the engine had; each sampled token is a target at most once, and of a recorded output."""
    records = h.records()
    sent = {tuple(request.ids) for request in h.engine.requests}
    assert all(tuple(path_ids(records, record)) in sent for record in records)
    admitted = admit(records, run_id="r", execution_id=h.execution_id, version=0, max_trajectories=None)
    verdict = trainable_records(records)
    assert sum(a.target_tokens for a in admitted) == sum(len(r.output_ids) for r in records if verdict[r.request_id])
    return records


def reasons(records, agent=""):
    return [r.branch_reason for r in records if r.agent_id == agent]


def test_an_ordinary_session_is_one_path(policy):
    with harness(*policy, counting(*(bash(n) for n in range(6)))) as h:
        cli = Cli(h)
        for n in range(6):
            cli.step(change=lambda block, n=n: {**block, "input": {"extra": n}} if block["type"] == "tool_use" else block)
            cli.suffix = f"b{n}"
            if n == 2:
                cli.messages.append({"role": "system", "content": [text("The task tools have not been used lately.")]})
        assert reasons(exact(h)) == ["root"] + ["extension"] * 5


def test_caching_on_and_off_render_the_same(policy):
    with harness(*policy, lambda request: bash(1)) as h:
        plain = [{"role": "user", "content": "q"}, {"role": "system", "content": AGENTS}]
        h.messages(plain, tools=TOOLS)
        h.messages([marked(plain[0]), marked(plain[1])], tools=[{**tool, "cache_control": {"type": "ephemeral"}} for tool in TOOLS])
        assert h.engine.requests[0].ids == h.engine.requests[1].ids


def test_parallel_results_in_order_of_completion(policy):
    both = Turn("", "t", [("Bash", {"command": "a"}), ("Bash", {"command": "b"}), ("Bash", {"command": "c"})])
    with harness(*policy, counting(both, Turn("done"))) as h:
        cli = Cli(h)
        cli.step((2, "result-3"), (0, "result-1"), (1, "result-2"))
        cli.ask()
        assert reasons(exact(h)) == ["root", "extension"]
        prompt = h.engine.requests[1].text
        assert prompt.index("result-3") < prompt.index("result-1") < prompt.index("result-2")


def test_odd_echoes_are_recognised_by_their_call(policy):
    echoes = [
        lambda b: {**b, "input": {"description": "x", "command": "echo"}} if b["type"] == "tool_use" else b,
        lambda b: {**b, "input": {"__unparsedToolInput": {"raw": "{", "len": 1}}} if b["type"] == "tool_use" else b,
        lambda b: {**b, "text": b["text"].strip()} if b["type"] == "text" else b,
        lambda b: {**b, "name": "bash"} if b["type"] == "tool_use" else b,
        lambda b: {**b, "signature": "changed"} if b["type"] == "thinking" else b,
    ]
    with harness(*policy, counting(*(bash(n) for n in range(6)))) as h:
        cli = Cli(h)
        for change in echoes:
            cli.step(change=change)
        cli.ask()
        assert reasons(exact(h)) == ["root"] + ["extension"] * len(echoes)


def test_a_moved_or_dropped_text_beside_calls_is_no_branch(policy):
    with harness(*policy, counting(bash(1), bash(2), Turn("done"))) as h:
        cli = Cli(h)
        first = cli.ask()
        cli.take({"content": [b for b in first["content"] if b["type"] != "text"] + [text("   ")]}, (0, "ok"))
        second = cli.ask()
        cli.take({"content": sorted(second["content"], key=lambda b: b["type"])}, (0, "ok"))
        cli.ask()
        assert reasons(exact(h)) == ["root", "extension", "extension"]


def test_a_reply_without_visible_output_is_dropped_and_branches_before_it(policy):
    with harness(*policy, counting(bash(1), Turn("", "only thinking"), Turn("recovered"))) as h:
        cli = Cli(h)
        cli.step()
        cli.ask()
        cli.messages[-1]["content"].append(text("[Your previous response had no visible output. Please continue.]"))
        cli.ask()
        records = exact(h)
        assert reasons(records) == ["root", "extension", "history"]
        assert records[2].parent_id == records[1].parent_id == records[0].request_id
        assert all(trainable_records(records).values())


@pytest.mark.parametrize("trailing_system", [False, True])
def test_compaction_branches_off_an_older_request_and_starts_a_new_root(policy, trailing_system):
    turns = [bash(n) for n in range(4)]
    with harness(*policy, counting(*turns, Turn("<summary>\nTHE-SUMMARY\n</summary>", "summarise"), bash(9), Turn("done"))) as h:
        cli = Cli(h)
        for _ in range(3):
            cli.step()
        last = cli.ask()
        older = [*cli.messages[:-1], {"role": "user", "content": [*cli.messages[-1]["content"], text(SUMMARY)]}]
        if trailing_system:
            older.append({"role": "system", "content": "reminder"})
        summary = cli.ask(older)
        assert "THE-SUMMARY" in summary["content"][-1]["text"]
        cli.suffix = "c7"
        cli.messages = [{"role": "user", "content": [text("This session is being continued… Summary:\nTHE-SUMMARY")]}]
        cli.take(last, (0, "result of the quoted call"))
        cli.messages.append({"role": "system", "content": AGENTS})
        cli.step()
        cli.ask()
        records = exact(h)
        assert reasons(records) == ["root", "extension", "extension", "extension", "compaction", "root", "extension"]
        assert [r.role_class for r in records] == ["main_task"] * 4 + ["main_summary"] + ["main_task"] * 2
        assert records[4].parent_id == records[3].parent_id
        quoted, root = records[3], records[5]
        where = " ".join(map(str, root.input_ids)).find(" ".join(map(str, quoted.output_ids)))
        assert where > 0, "the quoted reply stands in the new context with the ids that were sampled"


def test_sub_agents_with_equal_bodies_interleave(policy):
    with harness(*policy, lambda request: Turn("same words")) as h:
        agents = [Cli(h, f"{n}" * 17, system="You are an agent.", task="[SUB] same") for n in range(3)]
        main = Cli(h)
        for _ in range(3):
            for cli in (*agents, main):
                cli.take(cli.ask())
        records = exact(h)
        for cli in (*agents, main):
            own = [r for r in records if r.agent_id == cli.agent]
            assert reasons(own, cli.agent) == ["root", "extension", "extension"]
            assert {r.role_class for r in own} == {"sub_task" if cli.agent else "main_task"}
        assert all(trainable_records(records).values())


def test_a_sub_agents_compaction_is_a_sub_summary(policy):
    with harness(*policy, counting(bash(1), bash(2), Turn("<summary>s</summary>"), Turn("done"))) as h:
        cli = Cli(h, "f" * 17, "e" * 17, system="You are an agent.")
        cli.step()
        cli.ask()
        cli.ask([*cli.messages[:-1], {"role": "user", "content": [*cli.messages[-1]["content"], text(SUMMARY)]}, cli.messages[1]])
        cli.messages = [{"role": "user", "content": "This session is being continued… s"}]
        cli.ask()
        records = exact(h)
        assert [r.role_class for r in records] == ["sub_task", "sub_task", "sub_summary", "sub_task"]
        assert {r.parent_agent_id for r in records} == {"e" * 17}


def test_sub_agents_are_known_without_headers_by_their_task(policy):
    """Another harness, no marks: a conversation that begins with the text of an issued call belongs to that call's agent."""
    call = Turn("", "t", [("Agent", {"command": "Look into the parser, and report back."})])
    with harness(*policy, counting(call, Turn("looking", calls=[("Bash", {"command": "ls"})]), Turn("found it"), Turn("thanks"))) as h:
        first = h.messages([{"role": "user", "content": "big task"}], tools=TOOLS, system="main")
        sub = [{"role": "user", "content": "Look into the parser, and report back."}]
        reply = h.messages(sub, tools=TOOLS, system="sub")
        call_id = reply["content"][-1]["id"]
        sub += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "x"}]},
        ]
        h.messages(sub, tools=TOOLS, system="sub")
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "found it"}
        h.messages(
            [
                {"role": "user", "content": "big task"},
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result]},
            ],
            tools=TOOLS,
            system="main",
        )
        records = exact(h)
        assert [r.role_class for r in records] == ["main_task", "sub_task", "sub_task", "main_task"]
        assert records[1].agent_id == records[2].agent_id != ""
        assert [r.branch_reason for r in records] == ["root", "root", "extension", "extension"]


def test_a_fork_branches_inside_the_parents_turn(policy):
    two = Turn("Forking.", "t", [("Agent", {"command": "fork one"}), ("Bash", {"command": "ls"})])
    with harness(*policy, counting(bash(1), two, Turn("fork done"), Turn("main done"))) as h:
        cli = Cli(h)
        cli.step()
        forking = cli.ask()
        only = next(b for b in forking["content"] if b["type"] == "tool_use")
        fork = Cli(h, "d" * 17)
        fork.messages = [
            *cli.messages,
            {"role": "assistant", "content": [only]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": only["id"], "content": "forked"}, text("carry on alone")]},
        ]
        fork.ask()
        cli.take(forking, (0, "fork done"), (1, "x"))
        cli.ask()
        records = exact(h)
        assert [r.branch_reason for r in records] == ["root", "extension", "fork", "extension"]
        assert records[2].parent_id == records[0].request_id and records[2].role_class == "sub_task"
        assert records[3].parent_id == records[1].request_id


def test_changed_tools_or_git_status_start_a_new_root(policy):
    with harness(*policy, counting(bash(1), bash(2), bash(3))) as h:
        cli = Cli(h)
        cli.step()
        cli.tools = TOOLS[:2]
        cli.step()
        cli.system = "You are Claude Code. gitStatus: M hello.py"
        cli.ask()
        records = exact(h)
        assert reasons(records) == ["root", "root", "root"] and {r.role_class for r in records} == {"main_task"}


def test_side_requests_and_titles(policy):
    with harness(*policy, counting(Turn("{}"), Turn("found"), bash(1))) as h:
        cli = Cli(h)
        title = {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "tools": []}
        cli.ask([{"role": "user", "content": "a title please"}], **title)
        cli.ask([{"role": "user", "content": "search"}], tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}])
        cli.ask()
        records = exact(h)
        assert [r.role_class for r in records] == ["side", "side", "main_task"]
        assert [r.trainable for r in records] == [False, False, True]


def test_the_non_streaming_twin_is_the_same_call(policy):
    with harness(*policy, lambda request: Turn("once", delay_s=0.6)) as h:
        cli = Cli(h)
        out = []
        body = {"model": "m", "max_tokens": 9, **cli.body(cli.messages)}

        def call(stream):
            out.append(h.raw("/v1/messages", {**body, "stream": stream}, cli.headers()))

        threads = [threading.Thread(target=call, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [answer.status for answer in out] == [200, 200] and len(exact(h)) == 1


def test_fourteen_agents_at_once(policy):
    gate = threading.Barrier(15, timeout=30)

    def script(request):
        gate.wait()
        return Turn("all together")

    with harness(*policy, script) as h:
        clis = [Cli(h), *(Cli(h, f"{n:017x}", system="You are an agent.", task="same") for n in range(1, 15))]
        threads = [threading.Thread(target=cli.ask) for cli in clis]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(exact(h)) == 15 and len({r.agent_id for r in h.records()}) == 15
