"""The coordinator around the scheduler: every execution ends once, failures are told apart from zeros, a crash loses nothing."""

import asyncio
from pathlib import Path

import pytest

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import load_config
from gyre_lib.coordination.coordinator import Coordinator
from gyre_lib.coordination.recovery import Recovery
from gyre_lib.scheduling import events as ev


class NoProxies:
    """Stands in for the proxies, which are other processes: acknowledges everything at once."""

    registered = ("proxy-0",)

    async def push(self):
        return 0

    async def close(self, execution_id):
        return {"requests": 0, "output_tokens": 0}


@pytest.fixture
def coordinator(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    made = Coordinator(layout, load_config(Path("data/configs/demo.yaml"), ["cells.count=1", "cells.capacity=80"]), "secret")
    made.proxies = NoProxies()
    return made


async def launched(coordinator):
    await Recovery(coordinator).restore()
    await coordinator.apply(ev.RunStarted())
    await coordinator.apply(ev.EngineReady(0))
    return await coordinator.claim("worker", 80, 0.1)


def test_c29_run_stops_asking_after_a_bound_and_says_why(coordinator):
    async def scenario():
        executions = await launched(coordinator)
        for execution in executions[:7]:
            await coordinator.ended(execution.execution_id, "InfrastructureFailed", "bwrap: no permissions", "")
        assert coordinator.problem == ""
        await coordinator.ended(executions[7].execution_id, "InfrastructureFailed", "bwrap: no permissions", "")
        assert "bwrap: no permissions" in coordinator.problem
        coordinator.launch_orders.put_nowait(executions[8].execution_id)
        assert await coordinator.claim("worker", 8, 0.01) == []
        coordinator.sandboxes.reset()
        assert coordinator.problem == ""

    asyncio.run(scenario())


def test_c25_failed_executions_are_placeholders_and_their_group_is_lost_once(coordinator):
    async def scenario():
        executions = await launched(coordinator)
        group = [execution for execution in executions if execution.group_id == "g00001"]
        for execution in group:
            await coordinator.ended(execution.execution_id, "InfrastructureFailed", "image pull failed", "")
            await coordinator.ended(execution.execution_id, "Completed", "a late answer counts nothing", "")
        assert {execution.validity for execution in group} == {"placeholder"}
        assert coordinator.scheduler.terminated == len(group)
        assert coordinator.scheduler.ready + coordinator.scheduler.assigned == 1
        assert coordinator.buffer.training_executions("g00001") == []

    asyncio.run(scenario())


def test_c20_after_a_crash_every_execution_is_where_it_was(coordinator):
    async def scenario():
        executions = await launched(coordinator)
        scored, ended, running = (execution.execution_id for execution in executions[:3])
        await coordinator.ended(scored, "Completed", "", scored)
        await coordinator.settle(scored, 1.0, "valid")
        await coordinator.ended(ended, "HarnessTimeout", "", ended)
        before = coordinator.scheduler.snapshot()
        coordinator.tables.close()
        again = Coordinator(coordinator.layout, coordinator.config, "secret")
        again.proxies = NoProxies()
        await Recovery(again).restore()
        assert again.scheduler.snapshot() == before
        assert (again.buffer.executions[scored].score, again.buffer.executions[scored].stage) == (1.0, "settled")
        assert again.buffer.executions[running].worker_id == "worker"
        assert [entry.entry_id for entry in again.feed.pending() if entry.kind == "Evaluate"] == [f"evaluate-{ended}"]
        assert again.token(running) == coordinator.token(running)
        await again.ended(scored, "Completed", "", scored)
        assert again.scheduler.terminated == before["terminated"]

    asyncio.run(scenario())


def test_overall_budget_without_a_valid_score_discards_the_execution(coordinator):
    async def scenario():
        executions = await launched(coordinator)
        execution = executions[0]
        await coordinator.ended(execution.execution_id, "Completed", "", execution.execution_id)
        await coordinator.assessed(execution.execution_id, {"score": None, "validity": "unresolved", "detail": "evaluator crashed"})
        assert not execution.reached("settled")
        execution.deadline_s = 0.0
        await coordinator.tick()
        assert (execution.outcome, execution.score, execution.validity) == ("OverallTimeout", None, "unresolved")

    asyncio.run(scenario())


def test_lost_worker_ends_its_executions_once_as_infrastructure_failures(coordinator):
    async def scenario():
        executions = await launched(coordinator)
        coordinator.workers["worker"].seen_s = 0.0
        await coordinator.tick()
        assert {execution.outcome for execution in executions} == {"InfrastructureFailed"}
        assert coordinator.scheduler.terminated == len(executions)

    asyncio.run(scenario())


def test_infrastructure_failure_is_never_a_zero_even_if_it_left_an_artifact(coordinator):
    async def scenario():
        execution, *_ = await launched(coordinator)
        await coordinator.ended(execution.execution_id, "InfrastructureFailed", "the proxy was gone", execution.execution_id)
        assert execution.validity == "placeholder" and execution.artifact_ref == execution.execution_id
        assert not any(entry.kind == "Evaluate" for entry in coordinator.feed.pending())

    asyncio.run(scenario())
