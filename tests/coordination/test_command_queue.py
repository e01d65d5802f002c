"""Commands for ranks: executed in order, once per id, and a dead cell answers instead of hanging."""

import asyncio

import pytest

from gyre_lib.coordination.command_queue import CellFailed, CommandQueue


def report(command_id, shard, ok=True, error=""):
    return {"command_id": command_id, "shard": shard, "ok": ok, "error": error, "phases": {}, "result": {"shard": shard}}


def test_result_comes_when_every_rank_has_reported():
    async def scenario():
        queue = CommandQueue(ranks_per_cell=2)
        running = asyncio.create_task(queue.run(1, "join-1", "join", step=0))
        [command] = await queue.after(1, 0, 1.0)
        assert (command["id"], command["kind"], command["step"]) == ("join-1", "join", 0)
        await queue.report(1, report("join-1", 1))
        await asyncio.sleep(0.01)
        assert not running.done()
        await queue.report(1, report("join-1", 0))
        assert (await running)["result"] == {"shard": 0}

    asyncio.run(scenario())


def test_repeated_id_is_not_queued_again_and_ranks_read_on_from_their_number():
    async def scenario():
        queue = CommandQueue(ranks_per_cell=1)
        await queue.send(0, "a", "expose")
        await queue.send(0, "a", "expose")
        await queue.send(0, "b", "train")
        commands = await queue.after(0, 0, 1.0)
        assert [command["id"] for command in commands] == ["a", "b"]
        assert [command["id"] for command in await queue.after(0, commands[0]["seq"], 1.0)] == ["b"]
        assert await queue.after(0, commands[1]["seq"], 0.01) == []

    asyncio.run(scenario())


def test_commands_of_a_restarted_coordinator_are_seen_by_ranks_that_remember_a_number():
    async def scenario():
        before = CommandQueue(ranks_per_cell=1)
        before._first_seq -= 1
        await before.send(0, "a", "expose")
        [old] = await before.after(0, 0, 1.0)
        after = CommandQueue(ranks_per_cell=1)
        await after.send(0, "b", "train")
        assert [command["id"] for command in await after.after(0, old["seq"], 1.0)] == ["b"]

    asyncio.run(scenario())


def test_failure_of_any_rank_and_a_dead_cell_raise():
    async def scenario():
        queue = CommandQueue(ranks_per_cell=2)
        await queue.send(0, "a", "train")
        await queue.report(0, report("a", 0))
        await queue.report(0, report("a", 1, ok=False, error="out of memory"))
        with pytest.raises(CellFailed, match="cell 0 rank 1: out of memory"):
            await queue.result(0, "a")
        waiting = asyncio.create_task(queue.run(2, "b", "train"))
        await asyncio.sleep(0.01)
        await queue.down(2, "its ranks died")
        with pytest.raises(CellFailed, match="cell 2: its ranks died"):
            await waiting
        await queue.up(2)
        assert not queue.is_down(2)

    asyncio.run(scenario())
