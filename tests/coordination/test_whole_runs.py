"""Whole runs of the coordinator, undisturbed and with crashes at random moments: nothing lost, nothing twice, the identity exact."""

import asyncio
import collections
from pathlib import Path

import pytest
from one_process_run import OneProcessRun

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import load_config
from gyre_lib.coordination.journal import read_entries
from gyre_lib.coordination.run_figures import run_figures
from gyre_lib.engines.control import EngineError
from gyre_lib.training.micro_steps import Closed
from gyre_lib.trajectories.store import connect

OVERRIDES = ["scheduling.bursts=3", "scheduling.groups_per_batch=2", "scheduling.executions_per_group=4", "scheduling.supply_hold_s=0.01",
             "cells.count=3", "cells.capacity=10", "training.row_tokens=16"]  # fmt: skip
STEPS, GROUPS = 6, 2


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path / "run")
    made.root.mkdir()
    return made


def config():
    return load_config(Path("data/configs/demo.yaml"), OVERRIDES)


def check(layout):
    events = [entry for path in sorted(layout.journal.glob("burst-*.jsonl")) for entry in read_entries(path) if "event" in entry]
    assert [entry["seq"] for entry in events] == list(range(1, len(events) + 1))
    dispatched = [e for entry in events for a in entry["actions"] if a["kind"] == "Dispatch" for group in a["executions"] for e in group]
    assert len(dispatched) == len(set(dispatched))
    assigned = [entry["event"]["group"] for entry in events if entry["event"]["kind"] == "GroupAssigned"]
    assert len(assigned) == len(set(assigned)) == STEPS * GROUPS
    ended = collections.Counter(entry["event"]["execution"] for entry in events if entry["event"]["kind"] == "ExecutionEnded")
    assert set(ended) <= set(dispatched)
    (layout.root / "config.yaml").write_text("name: run\n")
    figures = run_figures(layout)
    assert figures.scheduler["phase"] == "done"
    assert figures.scheduler["identity_ok"]
    with connect(layout.root) as database:
        steps = database.execute(
            "SELECT step, count(*), any_value(groups), any_value(executions) FROM train_steps GROUP BY 1 ORDER BY 1"
        ).fetchall()
        consumed = database.execute("SELECT count(*) FROM groups WHERE status = 'consumed'").fetchone()
        valid = dict(
            database.execute("SELECT consumed_step, sum(valid_executions) FROM groups WHERE valid_executions > 1 GROUP BY 1").fetchall()
        )
        scored = database.execute("SELECT count(*), count(DISTINCT execution_id) FROM executions WHERE validity = 'valid'").fetchone()
    assert [(step, rows, groups) for step, rows, groups, _ in steps] == [(step, 1, GROUPS) for step in range(STEPS)]
    assert all(executions == valid.get(step, 0) for step, *_, executions in steps)
    assert consumed == (STEPS * GROUPS,)
    assert scored[0] == scored[1]
    return figures


def test_undisturbed_run_trains_several_cells_and_ends(layout):
    async def scenario():
        run = OneProcessRun(layout, config(), seed=0)
        await run.start()
        await run.until_done(60)
        await run.crash()
        assert run.updates == list(range(STEPS))

    asyncio.run(scenario())
    figures = check(layout)
    assert max(row["cells"] for row in figures.steps) > 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_run_with_crashes_at_random_moments_ends_the_same(layout, seed):
    async def scenario():
        run = OneProcessRun(layout, config(), seed)
        await run.start()
        for _ in range(5):
            await run._pause(0.6)
            if run.coordinator.run_done:
                break
            await run.crash()
            await run.start()
        await run.until_done(60)
        await run.crash()

    asyncio.run(scenario())
    check(layout)


class SatelliteThatDiesInTheUpdate(OneProcessRun):
    """Cell 1 is killed once, when it has done its work and is asked to reduce."""

    died = False

    async def _execute(self, cell, command):
        if command["kind"] == "update" and cell == 1 and not self.died:
            self.died = True
            self._tasks.append(asyncio.create_task(self._die()))
            await asyncio.sleep(3600)
        return await super()._execute(cell, command)

    async def _die(self):
        self.coordinator.cells.memory_released.discard(1)
        await self.coordinator.cells.down(1, "killed")
        await self.reestablish.lost_satellite(1)


def test_satellite_killed_between_its_work_and_the_update_leaves_the_step_whole(layout):
    async def scenario():
        run = SatelliteThatDiesInTheUpdate(layout, config(), seed=0)
        await run.start()
        await run.until_done(60)
        await run.crash()
        assert run.died, "cell 1 joined no batch"

    asyncio.run(scenario())
    check(layout)


class EngineThatDiesInTheStepIn(OneProcessRun):
    """The core's engine is gone when its memory is asked for, and not back yet when the cell is to serve again."""

    absent = 2

    async def _execute(self, cell, command):
        if cell == 0 and command["kind"] in ("join", "leave") and self.absent:
            self.absent -= 1
            raise EngineError("connection refused")
        return await super()._execute(cell, command)


@pytest.mark.parametrize("crashed", [False, True])
def test_engine_that_dies_in_the_step_in_comes_back_and_the_core_steps_in_again(layout, monkeypatch, crashed):
    monkeypatch.setattr("gyre_lib.coordination.operations.RETRY_S", 0.2)

    async def scenario():
        run = EngineThatDiesInTheStepIn(layout, config(), seed=0)
        await run.start()
        if crashed:
            async with asyncio.timeout(30):
                while run.absent:
                    await asyncio.sleep(0.001)
            assert run.coordinator.scheduler.roles[0] == "to_rollout"
            await run.crash()
            await run.start()
        await run.until_done(60)
        await run.crash()
        assert run.absent == 0

    asyncio.run(scenario())
    check(layout)


def test_what_an_earlier_train_command_claims_or_reports_counts_for_nothing(layout):
    """Its gradients are dropped: a micro-step given to it, or taken for done from it, would be missing in the update."""

    async def scenario():
        run = OneProcessRun(layout, config(), seed=0)
        await run.start()
        feeder, stale = None, "train-0-0-of-an-earlier-life"
        async with asyncio.timeout(30):
            while feeder is None or not feeder.packing._claimed:
                feeder = run.coordinator.batches
                await asyncio.sleep(0)
        (micro_step_id, cell), *_ = feeder.packing._claimed.items()
        step, done = feeder.step, len(feeder.stats)
        await feeder.done(cell, step, stale, micro_step_id, {})
        assert feeder.packing._claimed[micro_step_id] == cell and len(feeder.stats) == done
        assert isinstance(await feeder.claim(cell, step, stale), Closed)
        await run.until_done(60)
        await run.crash()

    asyncio.run(scenario())
    check(layout)
