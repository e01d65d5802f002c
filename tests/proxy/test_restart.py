"""Durability: a proxy that is killed comes back with its trees, and the harness's retry finds its place."""

import threading
import time

import pytest
from scripted import ProxyProcess, Turn, harness, path_ids

from gyre_lib.trajectories.provenance import trainable_records


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def moved(h, proxy):
    """The same execution behind another proxy process."""
    h.proxy = proxy
    h.route(next(iter(h.engines)))


def test_a_killed_proxy_rebuilds_its_trees(run_dir, small_model, qwen3):
    replies = iter([Turn("one", "t"), Turn("two", calls=[("Bash", {"command": "ls"})]), Turn("three")])
    tools = [{"name": "Bash", "input_schema": {"type": "object", "properties": {}}}]
    first = ProxyProcess(run_dir, small_model, "qwen3")
    with harness(first, small_model, qwen3, lambda request: next(replies)) as h:
        messages = [user("q")]
        messages += [{"role": "assistant", "content": h.messages(messages, tools=tools)["content"]}, user("r")]
        answer = h.messages(messages, tools=tools)
        first.kill()
        second = ProxyProcess(run_dir, small_model, "qwen3")
        try:
            moved(h, second)
            call = next(block for block in answer["content"] if block["type"] == "tool_use")
            echo = [{**block, "input": {"changed": True}} if block is call else block for block in answer["content"]]
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}]}
            h.messages([*messages, {"role": "assistant", "content": echo}, result], tools=tools)
            records = h.records()
            assert [r.branch_reason for r in records] == ["root", "extension", "extension"]
            assert [r.sequence for r in records] == [0, 1, 2]
            assert path_ids(records, records[-1]) == h.engine.requests[-1].ids
            assert second.control("close", {"execution_id": h.execution_id}) == {
                "requests": 3,
                "output_tokens": sum(len(r.output_ids) for r in records),
            }
        finally:
            second.stop()


def test_an_answer_recorded_before_the_kill_is_handed_out_not_sampled_again(run_dir, small_model, qwen3):
    first = ProxyProcess(run_dir, small_model, "qwen3")
    with harness(first, small_model, qwen3, lambda request: Turn("only once", "deep thought", delay_s=0.2)) as h:
        before = h.messages([user("q")])
        first.kill()
        second = ProxyProcess(run_dir, small_model, "qwen3")
        try:
            moved(h, second)
            again = h.messages([user("q")])
            assert (again["id"], again["content"], again["usage"]) == (before["id"], before["content"], before["usage"])
            assert len(h.engine.requests) == 1 and len(h.records()) == 1
        finally:
            second.stop()


def test_no_answer_is_seen_whose_record_could_be_lost(run_dir, small_model, qwen3):
    """Kill at random moments under load: every answer a client saw is on disk afterwards, exactly once."""
    seen, stop = [], threading.Event()
    proxy = ProxyProcess(run_dir, small_model, "qwen3")
    with harness(proxy, small_model, qwen3, lambda request: Turn("x" * 40)) as h:

        def client(name):
            n = 0
            while not stop.is_set():
                n += 1
                try:
                    answer = h.raw("/v1/messages", {"model": "m", "max_tokens": 50, "messages": [user(f"{name} {n}")]}, timeout=5)
                except (OSError, ValueError):
                    return
                if answer.status == 200:
                    seen.append(answer.json["id"].removeprefix("msg_"))

        clients = [threading.Thread(target=client, args=(name,)) for name in "abcd"]
        for thread in clients:
            thread.start()
        time.sleep(1.0)
        proxy.kill()
        stop.set()
        for thread in clients:
            thread.join(20)
        ids = [record.request_id for record in h.records()]
        assert len(seen) > 10 and len(ids) == len(set(ids))
        assert set(seen) <= set(ids)


def test_two_proxies_record_one_run(run_dir, small_model, qwen3):
    proxies = [ProxyProcess(run_dir, small_model, "qwen3", f"proxy-{n}") for n in range(2)]
    try:
        with (
            harness(proxies[0], small_model, qwen3, lambda request: Turn("a")) as one,
            harness(proxies[1], small_model, qwen3, lambda request: Turn("b")) as two,
        ):
            one.messages([user("q")])
            two.messages([user("q")])
            assert [len(h.records()) for h in (one, two)] == [1, 1]
            assert trainable_records(one.records()).values()
    finally:
        for proxy in proxies:
            proxy.stop()


def test_a_proxy_that_is_stopped_asks_for_a_retry(run_dir, small_model, qwen3):
    """SIGTERM with a call in flight: the harness gets an overload, not the end of its execution, and its retry is the only turn."""
    proxy = ProxyProcess(run_dir, small_model, "qwen3")
    with harness(proxy, small_model, qwen3, lambda request: Turn("late", delay_s=1.5)) as h:
        out = []
        body = {"model": "m", "max_tokens": 50, "messages": [user("q")]}
        thread = threading.Thread(target=lambda: out.append(h.raw("/v1/messages", body)))
        thread.start()
        while not h.engine.requests:
            time.sleep(0.02)
        proxy.process.terminate()
        thread.join(15)
        proxy.process.wait(15)
        assert out[0].status == 529
        second = ProxyProcess(run_dir, small_model, "qwen3")
        try:
            moved(h, second)
            assert h.messages([user("q")])["content"][0]["text"] == "late"
            assert len(h.records()) == 1
        finally:
            second.stop()
