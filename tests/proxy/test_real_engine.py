"""The proxy in front of a real SGLang engine: multi-turn tool tasks by the official clients, exact tokens, true log-probs."""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
from scripted import ProxyProcess, http, path_ids

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.provenance import trainable_records
from gyre_lib.trajectories.store import read_execution

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
MODEL = Path(__file__).parents[2] / "data/models/tiny-qwen3"
TOOL = {
    "name": "shell",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


@pytest.fixture(scope="module")
def served(engine_fork_socket, free_port, tmp_path_factory):
    with serving(MODEL, engine_fork_socket, free_port(), tmp_path_factory.mktemp("served")) as found:
        yield found


@contextmanager
def serving(model, fork_socket, port, folder):
    """A real engine with a policy, and a proxy whose table knows it under two names."""
    from gyre_lib.engines.launcher import EngineProcess

    engine = EngineProcess("cell-0", model, port, folder / "engine.log", 8, fork_socket=fork_socket)
    engine.start()
    proxy = None
    try:
        engine.wait_ready()
        proxy = ProxyProcess(folder / "run", model, "auto")
        rows = [{"engine_id": name, "url": engine.url, "serving": True, "weight_version": 0} for name in ("cell-0", "cell-1")]

        def execution(name, engine_id="cell-0"):
            row = {
                "execution_id": name,
                "token_sha256": hashlib.sha256(name.encode()).hexdigest(),
                "engine_id": engine_id,
                "max_context_tokens": 2048,
                "max_output_tokens": 96,
                "temperature": 1.0,
                "train": True,
            }
            proxy.push(rows, [row])

        yield SimpleNamespace(
            engine=engine, proxy=proxy, execution=execution, records=lambda name: read_execution(RunLayout(proxy.run_dir), name)
        )
    finally:
        if proxy is not None:
            proxy.stop()
        engine.stop()


def scored(engine, ids):
    """The engine's own log-probs of every token of `ids` after the first."""
    body = {
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    answer = httpx.post(f"{engine.url}/generate", json=body, timeout=60).json()
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]


def exact(served, name, turns):
    """Each prompt is its parent's path; recorded log-probs are what the engine gives the same tokens when it scores them."""
    records = served.records(name)
    assert [r.branch_reason for r in records] == ["root"] + ["extension"] * (turns - 1)
    assert all(trainable_records(records).values())
    for record in records:
        whole = path_ids(records, record) + record.output_ids
        logprobs = scored(served.engine, whole)
        start = len(whole) - len(record.output_ids)
        assert record.output_logprobs == pytest.approx(logprobs[start:], abs=2e-3)
        assert [s.version for s in record.version_spans] == [0]
        assert record.finish_reason == "length" or record.output_ids[-1] in (0, 2), "the end of turn was sampled too"
    return records


def test_the_anthropic_client_works_through_several_turns(served):
    served.execution("anthropic-task")
    client = anthropic.Anthropic(base_url=served.proxy.url, api_key="anthropic-task", max_retries=0)
    messages = [{"role": "user", "content": "Write the number 3 to /app/out.txt."}]
    for turn in range(4):
        if turn % 2:
            with client.messages.stream(
                model="policy", max_tokens=60, messages=messages, tools=[TOOL], system="You are an agent."
            ) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(model="policy", max_tokens=60, messages=messages, tools=[TOOL], system="You are an agent.")
        calls = [block for block in reply.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": reply.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
        messages.append({"role": "user", "content": results or "go on"})
    records = exact(served, "anthropic-task", 4)
    assert reply.usage.output_tokens == len(records[-1].output_ids)


def test_the_openai_client_works_through_several_turns(served):
    served.execution("openai-task")
    client = openai.OpenAI(base_url=f"{served.proxy.url}/v1", api_key="openai-task", max_retries=0)
    tool = {"type": "function", "function": {"name": "shell", "description": "Run a command.", "parameters": TOOL["input_schema"]}}
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Write the number 4 to /app/out.txt."}]
    for _ in range(4):
        message = client.chat.completions.create(model="policy", max_tokens=60, messages=messages, tools=[tool]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls or []]
        messages += results or [{"role": "user", "content": "go on"}]
    exact(served, "openai-task", 4)


def running(engine):
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in httpx.get(f"{engine.url}/v1/loads").json()["loads"])


def slow(engine, seconds):
    httpx.post(f"{engine.url}/slow_down", json={"forward_sleep_time": seconds}).raise_for_status()


def call(served, name, out, timeout=60):
    body = {"model": "m", "max_tokens": 90, "messages": [{"role": "user", "content": "Write a long story about " + name}]}
    try:
        out.append(http(f"{served.proxy.url}/v1/messages", body, {"x-api-key": name}, timeout=timeout))
    except OSError as error:
        out.append(error)


def test_a_disconnect_frees_the_engines_slot(served):
    served.execution("leaver")
    slow(served.engine, 0.2)
    try:
        out = []
        call(served, "leaver", out, timeout=1.5)
        assert isinstance(out[0], OSError)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and running(served.engine):
            time.sleep(0.2)
        assert running(served.engine) == 0 and served.records("leaver") == []
    finally:
        slow(served.engine, None)


def test_a_move_in_mid_generation_keeps_its_tokens(served):
    served.execution("mover")
    slow(served.engine, 0.1)
    out = []
    thread = threading.Thread(target=call, args=(served, "mover", out))
    thread.start()
    time.sleep(2.0)
    served.execution("mover", "cell-1")
    slow(served.engine, None)
    thread.join(60)
    (record,) = exact(served, "mover", 1)
    assert out[0].status == 200
    if record.reroutes:
        assert record.engine_ids == ["cell-0", "cell-1"] and record.attempts == 2
    assert json.loads(out[0].raw)["usage"]["output_tokens"] == len(record.output_ids) <= 90
