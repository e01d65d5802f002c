"""The feed: what is done is not offered again, and a re-run flow finds what is left."""

import asyncio

from gyre_lib.coordination.feed import Entry, Feed


def test_follower_waits_for_new_entries_and_a_new_follower_sees_only_open_ones():
    async def scenario():
        feed = Feed()
        waiting = asyncio.create_task(feed.after(0, 5.0))
        await asyncio.sleep(0.01)
        await feed.put(Entry("000001-0", "Dispatch", 0, {}))
        await feed.put(Entry("000001-0", "Dispatch", 0, {}))
        assert [entry.entry_id for entry in await waiting] == ["000001-0"]
        await feed.put(Entry("000002-0", "OpenBatch", 0, {"step": 0}))
        await feed.finish("000001-0", {"groups": []})
        assert [entry.entry_id for entry in await feed.after(0, 0.0)] == ["000002-0"]
        assert [entry.entry_id for entry in feed.pending()] == ["000002-0"]
        assert await feed.after(2, 0.01) == []
        await feed.finish_if_there("evaluate-nothing", {})

    asyncio.run(scenario())
