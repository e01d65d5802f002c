"""The real Claude Code 2.1.220 through the real proxy and a scripted engine, with thinking on, sub-agents on and compaction on.

Opt-in: `make test-claude` installs the CLI. For every run: each prompt that the engine got is its record's path exactly, a record's parent
is the call that the harness went on from, no false branch, each sampled token in one record, classes as labelled.
"""

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from claude_cli import BINARY, run_claude, user_line
from scripted import Answer, EngineRequest, Harness, ProxyProcess, Turn, harness, path_ids

from gyre_lib.benchmarks.proxy_rig.small_tokenizer import write_small_model
from gyre_lib.trajectories.provenance import trainable_records
from gyre_lib.trajectories.tito_record import RequestRecord
from proxy_app.rendering import Rendering

pytestmark = [
    pytest.mark.claude,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not BINARY.exists(), reason="make test-claude installs the CLI"),
]
SUMMARY = (
    "<analysis>\nthinking it over\n</analysis>\n\n<summary>\n1. Primary Request: THE-SUMMARY-TEXT of [MAIN]\n2. Pending: finish\n</summary>"
)


@pytest.fixture(scope="module", params=["qwen3", "qwen36", "qwen38"])
def policy(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyProcess, Path, Rendering]]:
    model = write_small_model(tmp_path_factory.mktemp("model"))
    proxy = ProxyProcess(tmp_path_factory.mktemp("run"), model, request.param, retry_budget_s=2.0)
    yield proxy, model, Rendering(model, request.param)
    proxy.stop()


@pytest.fixture
def start(policy: tuple[ProxyProcess, Path, Rendering]) -> Iterator[Callable[..., Harness]]:
    with ExitStack() as stack:

        def begin(*scripts: Any, **limits: Any) -> Harness:
            settings = {"max_context_tokens": 200_000, "max_output_tokens": 4000, **limits}
            return stack.enter_context(harness(*policy, *scripts, **settings))

        yield begin


class View:
    """What a scripted policy sees of its prompt."""

    def __init__(self, request: EngineRequest) -> None:
        pieces = [piece.partition("\n") for piece in request.text.split("<|im_start|>")[1:]]
        self.roles = [role for role, _, _ in pieces]
        self.texts = [text.replace("<|im_end|>", "") for _, _, text in pieces]
        self.turn = self.roles.count("assistant") - 1
        self.users = [text for role, text in zip(self.roles, self.texts, strict=True) if role == "user"]

    @property
    def tag(self) -> str:
        """The tag of the task text that began this conversation."""
        found = re.findall(r"\[(MAIN|SUB[A-Z-]*)\]", "\n".join(self.users[:2]))
        return found[0] if found else "?"

    @property
    def summary(self) -> bool:
        return any("CRITICAL: Respond with TEXT ONLY" in text for text in self.users[-2:])


def bash(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, **more}


def run(h: Harness, tmp_path: Path, prompt: str | None = "Do the work. [MAIN]", **more: Any) -> Any:
    return run_claude(prompt, f"{h.proxy.url}/exec/run-1/{h.execution_id}", h.token, tmp_path, **more)


def checked(h: Harness) -> list[RequestRecord]:
    """Token-exactness of every recorded call; returns the records."""
    records = h.records()
    sent = {tuple(request.ids) for request in h.engine.requests}
    for record in records:
        assert tuple(path_ids(records, record)) in sent, record.request_id
        assert record.output_ids and len(record.output_ids) == len(record.output_logprobs)
    return records


def chain(records: list[RequestRecord], agent_id: str = "") -> list[str]:
    return [r.branch_reason for r in records if r.agent_id == agent_id]


def test_single_answer(start, tmp_path):
    h = start(lambda request: Turn("Done: hello.", thinking="say hello"))
    result = run(h, tmp_path)
    assert result.returncode == 0 and result.result["result"] == "Done: hello."
    (record,) = checked(h)
    assert record.role_class == "main_task" and record.branch_reason == "root" and record.trainable
    assert result.result["usage"]["input_tokens"] == len(record.input_ids)


def test_tool_turns_with_awkward_arguments(start, tmp_path):
    work = tmp_path / "work"
    hello = {"file_path": f"{work}/hello.py"}
    turns = [
        Turn("\n\nLet me look.  \n", "I should look around.", [("Bash", {"description": "List  files", "command": "ls -la && echo é中  "})]),
        Turn("", "Read both.", [("Read", {"file_path": f"{work}/hello.py"}), bash("echo par1; sleep 0.3"), bash("echo par2")]),
        Turn("Editing.", "", [("Edit", {"replace_all": "false", "new_string": "print(hi() )\n", "old_string": "print(hi())\n", **hello})]),
        Turn("", "t", [("Write", {"content": "line1  \nline2\t\n\n", "file_path": f"{work}/new.txt", "bogus": 1})]),
        Turn("", "t", [("Read", {"file_path": f"{work}/new.txt", "limit": 2.0, "offset": "1"})]),
        Turn("", "t", [("NoSuchTool", {"x": 1})]),
        Turn("", "t", [("Bash", {})]),
        Turn("   ", "", [bash("cd /tmp && echo same-id; echo 'a\\tb'", timeout=5000)]),
        Turn("", "t", [bash(f"cd {work} && echo 13")]),
        Turn("", "", [bash("python3 -c \"print('x'*40000)\"", description="long output")]),
        Turn("", "t", [("bash", {"command": "echo lower"})]),
        Turn("", "t", [("TaskCreate", {"subject": "do it", "description": "d"})]),
        Turn("", "t", [("Edit", {"file_path": f"{work}/README.md", "old_string": "# scratch", "new_string": "# scratch   \nmore  "})]),
        Turn("  All done.\n\n", "finish"),
    ]  # fmt: skip
    h = start(lambda request: turns[View(request).turn])
    result = run(h, tmp_path)
    assert result.returncode == 0, result.stdout[-2000:]
    records = checked(h)
    assert chain(records) == ["root"] + ["extension"] * (len(turns) - 1)
    assert all(trainable_records(records).values())


def test_malformed_calls_are_text(start, tmp_path, policy):
    broken = {
        "qwen3": '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo broken}}\n</tool_call>',
        "qwen36": "</think>\n\n<tool_call>\n<function=Bash>\n<parameter=command>\necho broken",
    }
    raw = broken["qwen3" if policy[2].name == "qwen3" else "qwen36"]
    h = start(lambda request: [Turn(raw=raw), Turn("done")][min(1, View(request).turn)])
    result = run(h, tmp_path)
    assert result.returncode == 0 and "echo broken" in result.result["result"]
    (record,) = checked(h)
    assert json.loads(record.metadata)["statuses"][0] != "ok"


def agent(prompt: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return "Agent", {"description": "a part", "prompt": prompt, "subagent_type": "general-purpose", "run_in_background": False, **changes}


def agents_script(request: EngineRequest) -> Turn:
    view = View(request)
    tag, turn = view.tag, view.turn
    if tag == "MAIN":
        return [
            Turn("Delegating.", "split it", [
                agent("[SUB-A] do a"), agent("[SUB-B] do b", subagent_type="Explore"),
            ]),
            Turn("", "t", [agent("[SUB-C] do c", run_in_background=True)]),
            Turn("", "t", [bash("sleep 0.5; echo main-works")]),
            Turn("main done", delay_s=0.2), Turn("main done again"), Turn("main done still"),
        ][turn]  # fmt: skip
    if tag == "SUB-A":
        return [
            Turn("", "t", [bash("echo from-a")], delay_s=0.5),
            Turn("", "t", [agent("[SUB-NEST] deeper")]),
            Turn("A is done.", "wrap up", delay_s=0.3),
        ][turn]  # fmt: skip
    if tag in ("SUB-B", "SUB-C"):
        return [Turn("", "t", [bash(f"echo from-{tag}")], delay_s=0.6), Turn(f"{tag} is done.", delay_s=0.4)][turn]
    return Turn("nested is done.", delay_s=0.3)


def test_sub_agents_run_at_the_same_time(start, tmp_path):
    h = start(agents_script)
    result = run(h, tmp_path)
    assert result.returncode == 0
    records = checked(h)
    by_agent = Counter(r.agent_id for r in records)
    assert len(by_agent) == 5 and by_agent[""] >= 4
    for agent_id in by_agent:
        assert chain(records, agent_id) == ["root"] + ["extension"] * (by_agent[agent_id] - 1)
    assert {r.role_class for r in records if r.agent_id} == {"sub_task"}
    assert {r.role_class for r in records if not r.agent_id} == {"main_task"}
    nested = [r for r in records if r.parent_agent_id]
    assert len(nested) == 1 and nested[0].parent_agent_id in by_agent
    assert all(trainable_records(records).values())


def test_twin_sub_agents_with_equal_bodies_are_two_turns(start, tmp_path):
    twin = {"description": "part", "prompt": "[SUB-B] same words", "subagent_type": "general-purpose", "run_in_background": False}

    def script(request):
        view = View(request)
        if view.tag == "MAIN":
            return [Turn("", "t", [("Agent", twin), ("Agent", twin), ("Agent", twin)]), Turn("all done")][min(view.turn, 1)]
        return [Turn("", "t", [bash("echo twin")], delay_s=0.4), Turn("twin is done.", delay_s=0.4)][view.turn]

    h = start(script)
    assert run(h, tmp_path).returncode == 0
    records = checked(h)
    by_agent = Counter(r.agent_id for r in records)
    assert sorted(by_agent.values()) == [2, 2, 2, 2]
    for agent_id in by_agent:
        assert chain(records, agent_id) == ["root", "extension"]
    assert all(trainable_records(records).values())


def compaction_script(turns_before: int, sub: bool = False) -> Callable[[EngineRequest], Turn]:
    count: Counter[str] = Counter()
    lock = threading.Lock()

    def script(request: EngineRequest) -> Turn:
        view = View(request)
        if view.summary:
            with lock:
                count["summary"] += 1
            return Turn(SUMMARY, "summarise")
        with lock:
            count[view.tag] += 1
            n = count[view.tag]
        if view.tag.startswith("SUB"):
            return Turn("", "t", [bash(f"echo sub{n}; python3 -c \"print('word{n} '*3000)\"")]) if n <= 4 else Turn("sub is done.")
        if sub and n == 1:
            call = {"description": "part", "prompt": "[SUB] fill it", "subagent_type": "general-purpose", "run_in_background": False}
            return Turn("", "t", [("Agent", call)])
        if n <= turns_before and not sub:
            return Turn(f"Step {n}.", f"think {n}", [bash(f"echo step{n}; python3 -c \"print('word{n} '*3000)\"")])
        return Turn(f"finished at {n}.", "end")

    return script


def compacted(records: list[RequestRecord], agent_id: str, summary_class: str) -> None:
    """One or more compactions in this agent's calls: a summary off an older call, then a new root."""
    own = [r for r in records if r.agent_id == agent_id]
    reasons = [r.branch_reason for r in own]
    assert reasons.count("compaction") >= 1, reasons
    assert "history" not in reasons and "retry" not in reasons, reasons
    for position, record in enumerate(own):
        if record.branch_reason == "compaction":
            assert record.role_class == summary_class
            following = own[position + 1 :]
            assert not following or following[0].branch_reason == "root", reasons
        else:
            assert record.role_class == summary_class.replace("summary", "task")
    verdict = trainable_records(records)
    assert all(verdict.values())


def test_compaction_by_the_window(start, tmp_path):
    h = start(compaction_script(6))
    first = {}

    def script(request):
        first.setdefault("tokens", len(request.ids))
        return base(request)

    base = h.engine.script
    h.engine.script = script
    env = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "85"}
    result = run(h, tmp_path, env=env)
    assert result.returncode == 0, result.stdout[-1500:]
    records = checked(h)
    compacted(records, "", "main_summary")


def test_compaction_when_the_prompt_is_too_long(start, tmp_path):
    """The proxy's own 400 makes the CLI compact: nothing else would for a model it does not know."""
    h = start(compaction_script(7), max_context_tokens=70_000)
    result = run(h, tmp_path)
    assert result.returncode == 0, result.stdout[-1500:]
    compacted(checked(h), "", "main_summary")


def test_compaction_by_command_in_one_session(start, tmp_path):
    h = start(compaction_script(2))

    def answered(count):
        return lambda: len(h.engine.requests) >= count and not h.engine.live

    lines = [user_line("Do the work. [MAIN]"), answered(3), user_line("/compact keep the file names"), answered(4)]
    lines += [user_line("Continue now. [MAIN]"), answered(5)]
    result = run(h, tmp_path, None, lines=lines)
    assert result.returncode == 0
    compacted(checked(h), "", "main_summary")


def test_compaction_and_resume_in_new_processes(start, tmp_path):
    h = start(compaction_script(2))
    first = run(h, tmp_path)
    session = first.result["session_id"]
    assert run(h, tmp_path, "/compact", flags=["--resume", session]).returncode == 0
    assert run(h, tmp_path, "Continue now. [MAIN]", flags=["--resume", session]).returncode == 0
    compacted(checked(h), "", "main_summary")


def test_compaction_of_a_sub_agent(start, tmp_path):
    h = start(compaction_script(0, sub=True), max_context_tokens=40_000)
    result = run(h, tmp_path)
    assert result.returncode == 0, result.stdout[-1500:]
    records = checked(h)
    (agent_id,) = {r.agent_id for r in records} - {""}
    compacted(records, agent_id, "sub_summary")


def endings() -> dict[str, list[Any]]:
    return {
        "maxtok": [Turn("cut off text", "t", limit=5), Turn("recovered.")],
        "maxtoktool": [Turn("", "t", [bash("echo cut in the middle")], limit=14), Turn("recovered.")],
        "thinkonly": [Turn("", "only thinking, nothing else"), Turn("recovered.")],
        "thinkmax": [Turn("", "only thinking that is cut off somewhere in the middle", limit=6), Turn("recovered.")],
        "empty": [Turn(raw=""), Turn("recovered.")],
    }


@pytest.mark.parametrize("kind", list(endings()))
def test_odd_ends_of_a_reply(start, tmp_path, kind):
    """The reply that was dropped or cut stays a node; the harness goes on from the right one."""
    replies = endings()[kind]
    count = {"n": 0}

    def script(request):
        if View(request).turn == 0:
            return Turn("", "first", [bash("echo first")])
        count["n"] += 1
        return replies[min(count["n"] - 1, len(replies) - 1)]

    h = start(script)
    result = run(h, tmp_path)
    assert result.returncode == 0 and result.result["result"] == "recovered.", result.stdout[-800:]
    records = checked(h)
    assert [r.role_class for r in records] == ["main_task"] * len(records)
    assert chain(records)[:2] == ["root", "extension"] and set(chain(records)[2:]) <= {"extension", "history"}
    last = records[-1]
    assert last.parent_id in (records[0].request_id, records[1].request_id)
    assert all(trainable_records(records).values())


@pytest.mark.parametrize("faults", [["500"], ["drop"], ["short"]])
def test_engine_faults_are_invisible(start, tmp_path, faults):
    left = list(faults)

    def script(request):
        if View(request).turn == 1 and left:
            kind = left.pop()
            if kind == "500":
                return Answer(500, {"error": "scripted"})
            if kind == "short":
                return Answer(200, {"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": []}})
            raise RuntimeError("the connection breaks")
        return [Turn("", "t", [bash("echo first")]), Turn("recovered.")][View(request).turn]

    h = start(script)
    result = run(h, tmp_path)
    assert result.returncode == 0 and not any(e.get("subtype") == "api_retry" for e in result.events)
    records = checked(h)
    assert chain(records) == ["root", "extension"] and records[1].attempts == 2


def test_overload_reaches_the_cli_and_its_retry_is_one_turn(start, tmp_path):
    count = {"n": 0}

    def script(request):
        if View(request).turn == 1:
            count["n"] += 1
            if count["n"] < 12 and not done.is_set():
                return Answer(500, {"error": "scripted"})
        return [Turn("", "t", [bash("echo first")]), Turn("recovered.")][View(request).turn]

    done = threading.Event()
    threading.Timer(12, done.set).start()
    h = start(script)
    result = run(h, tmp_path)
    assert result.returncode == 0
    assert any(e.get("subtype") == "api_retry" for e in result.events)
    assert chain(checked(h)) == ["root", "extension"]


def test_a_client_timeout_and_its_retry_are_one_turn(start, tmp_path):
    count = {"n": 0}

    def script(request):
        if View(request).turn == 1:
            count["n"] += 1
            if count["n"] == 1:
                return Turn("never", delay_s=60)
        return [Turn("", "t", [bash("echo first")]), Turn("recovered.")][View(request).turn]

    h = start(script)
    result = run(h, tmp_path, env={"API_TIMEOUT_MS": "8000"})
    assert result.returncode == 0
    assert chain(checked(h)) == ["root", "extension"] and len(h.engine.aborted) == 1


def test_a_slow_head_is_waited_for(start, tmp_path):
    h = start(lambda request: Turn("late but fine", delay_s=8))
    result = run(h, tmp_path)
    assert result.returncode == 0 and len(checked(h)) == 1


def test_closing_the_execution_ends_the_cli(start, tmp_path):
    def script(request):
        if View(request).turn == 1:
            h.proxy.control("close", {"execution_id": h.execution_id})
        return Turn("", "t", [bash("echo again")])

    h = start(script)
    result = run(h, tmp_path)
    assert result.returncode == 1 and result.result["is_error"] and result.result["api_error_status"] == 403


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_free_the_engine(start, tmp_path, number):
    h = start(lambda request: Turn("never", delay_s=60))
    result = run(h, tmp_path, kill=(lambda: bool(h.engine.live), number))
    assert result.returncode == (143 if number == signal.SIGTERM else 0)
    assert len(h.engine.aborted) == 1 and h.records() == []


def test_turn_limit_hooks_and_mcp(start, tmp_path):
    server = Path(__file__).parent / "mcp_server.py"
    hook = {
        "hooks": [
            {
                "type": "command",
                "command": 'echo \'{"hookSpecificOutput":{"hookEventName":"PostToolUse","additionalContext":"HOOK-CONTEXT"}}\'',
            }
        ]
    }
    mcp = {"mcpServers": {"st": {"command": "python3", "args": [str(server)]}}}
    flags = ["--max-turns", "3", "--settings", json.dumps({"hooks": {"PostToolUse": [{"matcher": "Bash", **hook}]}})]
    flags += ["--mcp-config", json.dumps(mcp), "--strict-mcp-config"]
    turns = [Turn("", "t", [("mcp__st__zap", {"b": "3", "a": "q"})]), Turn("", "t", [bash("echo one")]), Turn("", "t", [bash("echo two")])]
    h = start(lambda request: turns[min(View(request).turn, 2)])
    result = run(h, tmp_path, flags=flags)
    assert result.returncode == 1 and result.result["subtype"] == "error_max_turns"
    records = checked(h)
    late = "mcp__st__zap" not in h.engine.requests[0].text  # the tool server was slow to start: its tools came with the second request
    assert chain(records) == ["root", "root" if late else "extension", "extension"]
    assert "zapped" in h.engine.requests[1].text and "HOOK-CONTEXT" in h.engine.requests[2].text


def test_side_requests_are_recorded_and_never_trained(start, tmp_path):
    """Without the quiet variables the CLI asks for a title beside the task."""

    def script(request):
        view = View(request)
        return Turn('{"title": "Say hello"}') if "title" in view.texts[0][:3000] and view.tag != "MAIN" else Turn("Done.")

    h = start(script)
    env = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    result = run(h, tmp_path, env=env)
    assert result.returncode == 0
    records = checked(h)
    sides = [r for r in records if r.role_class == "side"]
    assert len(sides) == 1 and not sides[0].trainable
    assert [r.role_class for r in records if r.role_class != "side"] == ["main_task"]


def test_forks_branch_inside_the_parents_turn(start, tmp_path):
    call = {"description": "fork it", "prompt": "[SUB-F] carry on alone", "subagent_type": "fork", "run_in_background": False}

    def script(request):
        view = View(request)
        if "carry on alone" in view.users[-1] or "carry on alone" in view.users[-2:][0]:
            return Turn("fork is done.")
        return [Turn("", "t", [bash("echo before")]), Turn("Forking.", "t", [("Agent", call)]), Turn("main done"), Turn("main done again")][
            min(view.turn, 3)
        ]

    h = start(script)
    result = run(h, tmp_path, env={"CLAUDE_CODE_FORK_SUBAGENT": "1"})
    assert result.returncode == 0
    records = checked(h)
    forks = [r for r in records if r.agent_id]
    mains = [r for r in records if not r.agent_id]
    assert forks and {r.role_class for r in forks} == {"sub_task"}
    assert forks[0].branch_reason in ("fork", "root")
    if forks[0].branch_reason == "fork":
        assert forks[0].parent_id in {r.request_id for r in mains}
    assert chain(records) == ["root"] + ["extension"] * (len(mains) - 1)
