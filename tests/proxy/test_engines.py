"""Reading engines' answers, joining what a move left behind, and the routing table."""

import asyncio
import hashlib

import orjson
import pytest

from gyre_lib.engines.generation import EngineError, Generated, checked, ids_as_json, joined
from gyre_lib.trajectories.tito_record import VersionSpan
from proxy_app.routing import Attempt, Engine, ExecutionEnded, RoutingTable, UnknownToken, bearer


def answer(ids=(5, 6), finish=None, **meta):
    body = {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": finish or {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "default",
            **meta,
        },
    }
    return orjson.dumps(body)


def test_a_sound_answer():
    found = checked(answer(cached_tokens=3), 10, 4)
    assert (found.ids, found.logprobs, found.finish, found.cached_tokens) == ([5, 6], [-0.5, -0.5], "stop", 3)
    assert found.spans == [VersionSpan(4, 0, 2)]


def test_an_aborted_request_in_the_queue_has_nothing():
    raw = orjson.dumps({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}})
    found = checked(raw, 10, 0)
    assert found.ids == [] and found.finish == "abort" and found.spans == []


@pytest.mark.parametrize(
    "raw",
    [
        b"not json",
        b"[]",
        b"{}",
        answer(output_token_logprobs=[[-0.5, 5, None]]),
        answer(output_token_logprobs=[[-0.5, 5, None], [-0.5, 7, None]]),
        answer(output_token_logprobs=[[None, 5, None], [-0.5, 6, None]]),
        answer(output_token_logprobs=[["-0.5", 5, None], [-0.5, 6, None]]),
        answer(output_token_logprobs=[[1e308, 5, None], [1e308, 6, None]]),
        answer(ids=(5, 10)),
        answer(ids=(-1, 5)),
        answer(ids=(5.0, 6)),
        answer(ids=(True, 6)),
        answer(weight_version="seven"),
        answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        answer(weight_versions=[{"version": "1", "start": 1, "end": 2}]),
        answer(weight_versions=[{"version": "1", "start": 0, "end": 3}]),
        answer(weight_versions=[{"version": None, "start": "x", "end": 2}]),
        b'{"output_ids":[5],"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[NaN,5,null]]}}',
    ],
)
def test_answers_that_contradict_themselves_are_refused(raw):
    with pytest.raises(EngineError):
        checked(raw, 10, 0)


def test_joining_keeps_tokens_and_merges_equal_versions():
    first = Generated([1, 2], [-1.0, -2.0], [VersionSpan(3, 0, 2)], "abort", cached_tokens=7)
    same = joined(first, Generated([3], [-3.0], [VersionSpan(3, 0, 1)], "stop", cached_tokens=9))
    other = joined(first, Generated([3], [-3.0], [VersionSpan(4, 0, 1)], "length"))
    assert same.ids == [1, 2, 3] and same.spans == [VersionSpan(3, 0, 3)] and same.finish == "stop" and same.cached_tokens == 7
    assert other.spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)] and other.logprobs == [-1.0, -2.0, -3.0]
    assert ids_as_json([1, 22, 3]) == b"1,22,3" and ids_as_json([]) == b""


def push(version, full=False, engines=(("e0", True), ("e1", True)), executions=(("x", "e0"),), closed=()):
    return {
        "version": version,
        "full": full,
        "published_version": 0,
        "engines": [{"engine_id": name, "url": f"http://{name}/", "serving": serving, "weight_version": 0} for name, serving in engines],
        "executions": [
            {
                "execution_id": name,
                "token_sha256": hashlib.sha256(f"token-{name}".encode()).hexdigest(),
                "engine_id": engine,
                "max_context_tokens": 100,
                "max_output_tokens": 10,
                "temperature": 1.0,
                "train": True,
            }
            for name, engine in executions
        ],
        "closed": list(closed),
    }


def test_the_table_takes_deltas_and_forgets_what_a_full_push_lacks():
    table = RoutingTable()
    assert not table.ready
    assert table.apply(push(3, full=True, executions=[("x", "e0"), ("y", "e1")])) == []
    assert table.apply(push(2, executions=[("old", "e0")])) == [] and "old" not in table.executions
    assert table.apply(push(4, executions=[("z", "e1")], closed=["y"])) == ["y"]
    assert set(table.executions) == {"x", "z"}
    assert table.authenticate(b"token-x").execution_id == "x"
    with pytest.raises(ExecutionEnded):
        table.authenticate(b"token-y")
    with pytest.raises(UnknownToken):
        table.authenticate(b"token-q")
    assert sorted(table.apply(push(1, full=True, executions=[("z", "e0")]))) == ["x"] and table.version == 1
    with pytest.raises((KeyError, ValueError)):
        table.apply({"version": 9, "executions": [{"execution_id": "bad"}]})
    assert table.version == 1


def test_where_a_request_goes():
    table = RoutingTable()
    table.apply(push(1, full=True, engines=[("e0", True), ("e1", True), ("e2", False)]))
    own = table.choose("x", frozenset())
    assert own is not None and own.engine_id == "e0" and own.url == "http://e0"
    assert table.choose("x", frozenset({"e0"})).engine_id == "e1"
    assert table.choose("x", frozenset({"e0", "e1"})) is None
    table.apply(push(2, engines=[("e0", False)]))
    assert table.choose("x", frozenset()) is None
    with pytest.raises(ExecutionEnded):
        table.choose("gone", frozenset())


def test_a_push_moves_the_requests_it_takes_an_engine_from():
    async def play():
        table = RoutingTable()
        table.apply(push(1, full=True, executions=[("x", "e0"), ("y", "e0"), ("f", "e0")]))
        e0, e1 = Engine("e0", "http://e0", True, 0), Engine("e1", "http://e1", True, 0)
        x, y, fallback = Attempt("x", e0, "r1"), Attempt("y", e0, "r2"), Attempt("f", e1, "r3", fallback=True)
        for attempt in (x, y, fallback):
            table.begin(attempt)
        assert table.inflight["e0"] == 2
        table.apply(push(2, executions=[("x", "e1")]))
        assert (x.moved.done(), y.moved.done(), fallback.moved.done()) == (True, False, False)
        table.apply(push(3, engines=[("e1", False)], executions=[]))
        assert fallback.moved.done() and not y.moved.done()
        table.apply(push(4, engines=[], executions=[], closed=["y"]))
        assert y.moved.done()
        for attempt in (x, y, fallback):
            table.end(attempt)
        assert table.inflight["e0"] == 0

    asyncio.run(play())


def test_both_kinds_of_key_header():
    assert bearer({b"x-api-key": b" k "}) == b"k"
    assert bearer({b"authorization": b"Bearer t"}) == b"t" == bearer({b"authorization": b"bearer  t"})
    assert bearer({b"authorization": b"Basic t"}) == b"" == bearer({})
