"""Both APIs as their official clients and as raw requests use them: shapes, errors, streams, counts."""

import contextlib
import json
import socket
import threading
import time

import anthropic
import openai
import pytest
from scripted import Answer, Turn, http

TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
OPENAI_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]}}


def user(text):
    return {"role": "user", "content": text}


def tool_task(request):
    """Call the tool until a result stands in the prompt."""
    return (
        Turn("The sum is 3.", "I have it")
        if "RESULT" in request.text
        else Turn("Adding.", "Let me add", [("add", {"a": 1}), ("add", {"a": 2})])
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_the_anthropic_client_does_a_tool_task(start, streaming):
    h = start(tool_task)
    client = anthropic.Anthropic(base_url=f"{h.proxy.url}/exec/1", api_key=h.token, max_retries=0)
    messages = [user("add")]
    for _ in range(3):
        if streaming:
            with client.messages.stream(model="claude-opus-5", max_tokens=500, messages=messages, tools=[TOOL]) as stream:
                events = [event.type for event in stream]
                reply = stream.get_final_message()
            assert events[0] == "message_start" and events[-1] == "message_stop"
        else:
            reply = client.messages.create(model="claude-opus-5", max_tokens=500, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if reply.stop_reason != "tool_use":
            break
        messages.append(user([{"type": "tool_result", "tool_use_id": call.id, "content": "RESULT"} for call in calls]))
    assert reply.content[-1].text == "The sum is 3." and reply.content[0].thinking == "I have it"
    assert [call.input for call in calls] == [] and reply.stop_reason == "end_turn"
    one, two = h.records()
    assert two.parent_id == one.request_id and one.stream == streaming
    assert reply.usage.input_tokens == len(h.engine.requests[-1].ids) and reply.usage.output_tokens == len(two.output_ids)
    counted = client.messages.count_tokens(model="m", messages=messages[:1], tools=[TOOL])
    assert counted.input_tokens == len(h.engine.requests[0].ids)
    assert client.models.list().data[0].id == "policy"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_openai_client_does_a_tool_task(start, streaming):
    h = start(tool_task)
    client = openai.OpenAI(base_url=f"{h.proxy.url}/v1", api_key=h.token, max_retries=0)
    messages = [{"role": "system", "content": "Be exact."}, user("add")]
    for _ in range(3):
        if streaming:
            chunks = list(
                client.chat.completions.create(
                    model="gpt-x", messages=messages, tools=[OPENAI_TOOL], stream=True, stream_options={"include_usage": True}
                )
            )
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
            finish = next(c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason)
            usage = chunks[-1].usage
        else:
            reply = client.chat.completions.create(model="gpt-x", messages=messages, tools=[OPENAI_TOOL])
            message, usage, finish = reply.choices[0].message, reply.usage, reply.choices[0].finish_reason
            text, calls = message.content, message.tool_calls or []
        if finish != "tool_calls":
            break
        echoed = [{"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}} for c in calls]
        messages.append({"role": "assistant", "content": text, "tool_calls": echoed})
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "RESULT"} for c in calls]
    assert text == "The sum is 3." and finish == "stop"
    one, two = h.records()
    assert two.parent_id == one.request_id and one.finish_reason == "tool_calls" and one.api == "openai"
    assert usage.prompt_tokens == len(h.engine.requests[-1].ids) and usage.completion_tokens == len(two.output_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert client.models.list().data[0].id == "policy"


def test_ids_never_repeat(start):
    h = start(lambda request: Turn("x", calls=[("add", {"a": 1}), ("add", {"a": 2})]))
    found = []
    for n in range(30):
        answer = h.messages([user(f"q{n}")], tools=[TOOL])
        found += [answer["id"], *(block["id"] for block in answer["content"] if block["type"] == "tool_use")]
    assert len(found) == 90 == len(set(found))


def test_stop_sequences_end_the_text(start):
    def script(request):
        ids = h.engine.turn_ids(Turn("one two STOP"))[:-1]
        from scripted import generated

        return Answer(200, generated(ids, {"type": "stop", "matched": "STOP"}, "0"))

    h = start(script)
    answer = h.messages([user("q")], stop_sequences=["STOP"])
    assert answer["content"][0]["text"] == "one two " and answer["stop_reason"] == "stop_sequence"
    assert answer["stop_sequence"] == "STOP" and h.engine.requests[0].sampling["stop"] == ["STOP"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/messages", b"{", 400, "not JSON"),
        ("/v1/messages", [], 400, "JSON object"),
        ("/v1/messages", {"model": "m"}, 400, "messages"),
        ("/v1/messages", {"model": "m", "messages": []}, 400, "messages"),
        ("/v1/messages", {"model": "m", "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        ("/v1/messages", {"model": "m", "messages": [user("a"), {"role": "assistant", "content": "b"}]}, 400, "prefill"),
        ("/v1/messages", {"model": "m", "messages": [user([{"type": "image", "source": {}}])]}, 400, "text only"),
        ("/v1/messages", {"model": "m", "messages": [user([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}])]}, 400, "text only"),
        ("/v1/messages", {"model": "m", "messages": [user([{"type": "tool_use", "id": "x", "name": "n", "input": {}}])]}, 400, "cannot stand"),
        ("/v1/messages", {"model": "m", "max_tokens": 0, "messages": [user("x")]}, 400, "max_tokens"),
        ("/v1/chat/completions", {"model": "m", "n": 2, "messages": [user("x")]}, 400, "n:"),
        ("/v1/chat/completions", {"model": "m", "messages": [user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])]}, 400, "text only"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}, 400, "tool_call_id"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "system", "content": "x"}]}, 400, "user message"),
        ("/v1/embeddings", {}, 404, "no such route"),
        ("/v1/messages/batches", {}, 404, "no such route"),
    ],
)  # fmt: skip
def test_bad_requests_get_the_apis_own_errors(start, path, body, status, text):
    h = start(lambda request: Turn("x"))
    answer = h.raw(path, body)
    assert answer.status == status and text in answer.json["error"]["message"]
    if "chat" in path:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    else:
        assert answer.json["type"] == "error"
    assert h.records() == [] and not h.engine.requests


def test_context_overflow_is_worded_so_that_claude_code_compacts(start):
    h = start(lambda request: Turn("x"), max_context_tokens=200)
    long = " ".join(["word"] * 400)
    answer = h.raw("/v1/messages", {"model": "m", "max_tokens": 10, "messages": [user(long)]})
    assert answer.status == 400 and answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"].startswith("prompt is too long: ") and answer.json["error"]["message"].endswith("> 199 maximum")
    chat = h.raw("/v1/chat/completions", {"model": "m", "messages": [user(long)]})
    assert chat.status == 400 and chat.json["error"]["code"] == "context_length_exceeded"
    assert chat.json["error"]["message"].startswith("This model's maximum context length is 199 tokens")
    fits = h.messages([user("word " * 40)], max_tokens=4000)
    assert fits["content"] and h.engine.requests[0].sampling["max_new_tokens"] + len(h.engine.requests[0].ids) == 200


def test_keys_and_their_ends(start, proxy):
    h = start(lambda request: Turn("x"))
    body = {"model": "m", "max_tokens": 5, "messages": [user("q")]}
    assert http(f"{proxy.url}/v1/messages", body).status == 401
    assert http(f"{proxy.url}/v1/messages", body, {"x-api-key": "wrong"}).status == 401
    assert http(f"{proxy.url}/v1/messages", body, {"authorization": f"Bearer {h.token}"}).status == 200
    assert proxy.control("close", {"execution_id": h.execution_id})["requests"] == 1
    ended = h.raw("/v1/messages", body)
    assert ended.status == 403 and ended.headers["x-should-retry"] == "false"
    assert http(f"{proxy.url}/control/stats", headers={"x-gyre-control": "test-control-secret"}).status == 404
    assert http(f"http://127.0.0.1:{proxy.control_port}/control/stats").status == 403
    assert http(f"{proxy.url}/api/hello", method="HEAD").status == 200


def test_closing_ends_a_call_in_flight(start, proxy):
    h = start(lambda request: Turn("never", delay_s=30))
    out = {}
    thread = threading.Thread(
        target=lambda: out.update(answer=h.raw("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [user("q")]}))
    )
    thread.start()
    while not h.engine.requests:
        time.sleep(0.01)
    assert proxy.control("close", {"execution_id": h.execution_id}) == {"requests": 0, "output_tokens": 0}
    thread.join(10)
    assert out["answer"].status == 403
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not h.engine.aborted:
        time.sleep(0.02)
    assert h.engine.aborted == [h.engine.requests[0].rid]


def test_the_unix_socket_serves_the_same(start, proxy):
    h = start(lambda request: Turn("over the socket"))
    body = json.dumps({"model": "m", "max_tokens": 50, "messages": [user("q")]}).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(proxy.uds))
        client.sendall(
            b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: "
            + h.token.encode()
            + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        raw = b""
        while piece := client.recv(65536):
            raw += piece
    assert b" 200 " in raw.split(b"\r\n")[0] and b"over the socket" in raw


def test_limits_of_heads_and_bodies(start, proxy):
    h = start(lambda request: Turn("x"))
    assert h.raw("/v1/messages", b" " * (33 * 2**20)).status == 413
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(300):
                client.sendall(b"x-filler: " + b"y" * 1000 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"431" in client.recv(4096)
    assert http(f"{proxy.url}/health").status == 200


def test_small_streams_do_not_stall(start, proxy):
    """Writes of a response leave at once (TCP_NODELAY): 20 in a row on one connection take far less than 20 delayed ACKs."""
    h = start(lambda request: Turn("x"))
    client = anthropic.Anthropic(base_url=proxy.url, api_key=h.token, max_retries=0)
    for n in range(3):
        with client.messages.stream(model="m", max_tokens=50, messages=[user(f"warm {n}")]) as stream:
            stream.get_final_message()
    assert all(r.ended_s >= r.started_s for r in h.records())
