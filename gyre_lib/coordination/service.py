"""The coordinator's control API (FastAPI). It is for our own processes only: every call carries the run's control secret, and sandboxes
have no route to it. `python -m gyre_lib.coordination.service --run-dir DIR --port N`."""

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from gyre_lib.config.layout import RunLayout
from gyre_lib.config.process_log import configure_logging
from gyre_lib.config.run_config import load_config
from gyre_lib.coordination.command_queue import CellFailed
from gyre_lib.coordination.coordinator import Coordinator
from gyre_lib.coordination.operations import Operations
from gyre_lib.coordination.proxies import Proxy
from gyre_lib.coordination.recovery import Recovery
from gyre_lib.coordination.reestablish import Reestablish
from gyre_lib.coordination.routing_table import Engine
from gyre_lib.coordination.trajectory_buffer import Execution
from gyre_lib.scheduling import events as ev
from gyre_lib.training.micro_steps import Closed, Wait, to_arrow

LONG_POLL_S = 20.0
Timeout = Annotated[float, Query(ge=0, le=60)]
log = logging.getLogger("gyre.coordinator")


class ProxyHello(BaseModel):
    proxy_id: str
    url: str
    control_url: str
    uds: str


class EngineUp(BaseModel):
    engine_id: str
    url: str
    cell: int
    capacity: int
    weight_version: int


class CellDown(BaseModel):
    reason: str


class RankHello(BaseModel):
    shard: int
    pid: int


class RankReport(BaseModel):
    shard: int
    command_id: str
    ok: bool
    error: str = ""
    phases: dict[str, float] = {}
    result: dict[str, Any] = {}


class Claim(BaseModel):
    cell: int
    step: int
    command_id: str


class Done(BaseModel):
    cell: int
    step: int
    command_id: str
    micro_step_id: str
    stats: dict[str, Any] = {}


class WorkerClaim(BaseModel):
    slots: int


class WorkerHeartbeat(BaseModel):
    running: list[str]


class Ended(BaseModel):
    outcome: str
    detail: str = ""
    artifact_ref: str = ""
    artifact_digest: str = ""


class Assessed(BaseModel):
    score: float | None
    validity: str
    detail: str = ""
    assessed_digest: str = ""
    evaluator: str = "tests"
    started_s: float
    ended_s: float


class Benchmark(BaseModel):
    benchmark_id: str
    task_paths: list[str]
    samples: int


def create_app(coordinator: Coordinator, secret: str) -> FastAPI:
    operations = Operations(coordinator)
    reestablish = Reestablish(coordinator, operations)
    c = coordinator

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await Recovery(c).restore()
        await reestablish.after_restart()
        ticking = asyncio.create_task(_tick_every_second(c))
        yield
        ticking.cancel()
        await c.proxies.aclose()
        c.tables.close()

    app = FastAPI(title="QwenGyre coordinator", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        if request.url.path != "/health" and not hmac.compare_digest(request.headers.get("x-gyre-control", ""), secret):
            return JSONResponse({"error": "x-gyre-control: missing or wrong"}, status_code=401)
        response = await call_next(request)
        # Ranks notice a restart by it: the open batch is then handed out anew, and gradients of the earlier life do not count.
        response.headers["x-gyre-life"] = str(c.started_s)
        return response

    @app.exception_handler(CellFailed)
    async def cell_failed(_: Request, error: CellFailed) -> Response:
        return JSONResponse({"error": str(error)}, status_code=409)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"run_id": c.layout.run_id}

    # -- people and flows

    @app.get("/state")
    async def state() -> dict[str, Any]:
        engines = [{**asdict(engine), "routes": c.table.load(engine.engine_id)} for engine in c.table.engines.values()]
        return {
            **c.scheduler.snapshot(),
            "run_id": c.layout.run_id,
            "run_done": c.run_done,
            "problem": c.problem,
            "engines": engines,
            "cells_ready": {cell: sorted(ranks) for cell, ranks in c.cells.ready.items()},
            "workers": sorted(c.workers),
            "proxies": [asdict(proxy) for proxy in c.proxies.registered],
        }

    @app.get("/stats")
    async def stats() -> dict[str, int]:
        return await c.proxies.stats()

    @app.post("/run/start")
    async def start_run() -> dict[str, Any]:
        """Begin, or go on: whoever launches the run again has looked at what stopped it."""
        c.sandboxes.reset()
        if c.scheduler.dispatched == 0:
            await c.apply(ev.RunStarted())
        return {"burst": c.burst, "run_done": c.run_done}

    @app.get("/feed")
    async def feed(after: int = 0, timeout_s: Timeout = LONG_POLL_S) -> dict[str, Any]:
        return {"entries": [asdict(entry) for entry in await c.feed.after(after, timeout_s)], "life": c.life}

    @app.post("/actions/{entry_id}/perform")
    async def perform(entry_id: str, timeout_s: Timeout = LONG_POLL_S) -> dict[str, Any]:
        entry = c.feed.get(entry_id)
        if entry is None:
            raise HTTPException(404, f"action {entry_id}: unknown")
        result = await operations.perform(entry, timeout_s)
        return {"done": result is not None, "result": result}

    @app.get("/steps/{step}")
    async def step_progress(step: int) -> dict[str, Any]:
        return c.batches.progress(step)

    @app.get("/groups")
    async def groups() -> dict[str, Any]:
        return {"groups": [c.buffer.summary(group.group_id) for group in c.buffer.outstanding_groups()]}

    @app.get("/groups/{group_id}")
    async def group(group_id: str) -> dict[str, Any]:
        if group_id not in c.buffer.groups:
            raise HTTPException(404, f"group {group_id}: unknown")
        return c.buffer.summary(group_id)

    # -- executions and evaluations

    @app.post("/workers/{worker_id}/claim")
    async def claim_executions(worker_id: str, body: WorkerClaim, timeout_s: Timeout = LONG_POLL_S) -> dict[str, Any]:
        executions = await c.claim(worker_id, body.slots, timeout_s)
        return {"orders": [c.launch_order(execution) for execution in executions]}

    @app.post("/workers/{worker_id}/heartbeat")
    async def heartbeat(worker_id: str, body: WorkerHeartbeat) -> dict[str, Any]:
        return {"cancel": sorted(await c.heartbeat(worker_id, set(body.running)))}

    @app.post("/executions/{execution_id}/ended")
    async def ended(execution_id: str, body: Ended) -> dict[str, Any]:
        _known(execution_id)
        await c.ended(execution_id, body.outcome, body.detail, body.artifact_ref, body.artifact_digest)
        return {}

    @app.get("/executions/{execution_id}")
    async def execution(execution_id: str) -> dict[str, Any]:
        return asdict(_known(execution_id))

    @app.post("/executions/{execution_id}/assessment")
    async def assessment(execution_id: str, body: Assessed) -> dict[str, Any]:
        _known(execution_id)
        await c.assessed(execution_id, body.model_dump())
        return {}

    @app.post("/benchmarks")
    async def benchmark(body: Benchmark) -> dict[str, Any]:
        executions = c.benchmark_executions(body.benchmark_id, body.task_paths, body.samples)
        new = [execution for execution in executions if execution.execution_id not in c.buffer.executions]
        await c.launch_benchmark(new)
        return {"executions": [execution.execution_id for execution in executions], "version": c.table.published_version}

    def _known(execution_id: str) -> Execution:
        if execution_id not in c.buffer.executions:
            raise HTTPException(404, f"execution {execution_id}: unknown")
        return c.buffer.executions[execution_id]

    # -- proxies, engines, cells

    @app.post("/proxies")
    async def proxy_hello(body: ProxyHello) -> dict[str, Any]:
        await c.register_proxy(Proxy(**body.model_dump()))
        return {}

    @app.post("/engines")
    async def engine_hello(body: EngineUp) -> dict[str, Any]:
        """An engine process is up and healthy; it serves unless its cell is in training."""
        c.add_engine(Engine(body.engine_id, body.url, body.cell, body.capacity, False, body.weight_version))
        await reestablish.engine(body.cell, body.weight_version)
        return {}

    @app.post("/engines/{engine_id}/down")
    async def engine_down(engine_id: str, body: CellDown) -> dict[str, Any]:
        await c.engine_down(c.table.engines[engine_id].cell, body.reason)
        return {}

    @app.post("/cells/{cell}/ready")
    async def rank_hello(cell: int, body: RankHello) -> dict[str, Any]:
        if await c.cells.up(cell, body.shard, body.pid):
            c.spawn(reestablish.cells())
        return {}

    @app.post("/cells/{cell}/down")
    async def cell_down(cell: int, body: CellDown) -> dict[str, Any]:
        await c.cells.down(cell, body.reason)
        await reestablish.lost_satellite(cell)
        return {}

    @app.get("/cells/{cell}/commands")
    async def commands(cell: int, after: int = 0, timeout_s: Timeout = LONG_POLL_S) -> dict[str, Any]:
        return {"commands": await c.commands.after(cell, after, timeout_s)}

    @app.post("/cells/{cell}/reports")
    async def report(cell: int, body: RankReport) -> dict[str, Any]:
        await c.commands.report(cell, body.model_dump())
        return {}

    @app.post("/micro_steps/claim")
    async def claim_micro_step(body: Claim) -> Response:
        claimed = await c.batches.claim(body.cell, body.step, body.command_id)
        if isinstance(claimed, Closed):
            return JSONResponse({"executions": claimed.executions}, status_code=410)
        if isinstance(claimed, Wait):
            return Response(status_code=204, headers={"x-gyre-wait-s": f"{claimed.after_s:g}"})
        return Response(to_arrow(claimed), media_type="application/vnd.apache.arrow.stream")

    @app.post("/micro_steps/done")
    async def micro_step_done(body: Done) -> dict[str, Any]:
        await c.batches.done(body.cell, body.step, body.command_id, body.micro_step_id, body.stats)
        return {}

    return app


async def _tick_every_second(coordinator: Coordinator) -> None:
    while True:
        await asyncio.sleep(1.0)
        try:
            await coordinator.tick()
        except Exception:
            log.exception("tick failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    configure_logging()
    layout = RunLayout(arguments.run_dir.resolve())
    secret = os.environ["GYRE_CONTROL_SECRET"]
    coordinator = Coordinator(layout, load_config(layout.config), secret)
    uvicorn.run(create_app(coordinator, secret), host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
