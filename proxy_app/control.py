"""The control listener: the coordinator's side of the proxy. Never on the socket that sandboxes reach."""

import hmac
from dataclasses import asdict
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel

from proxy_app.generating import Counters
from proxy_app.routing import RoutingTable
from proxy_app.turns import Turns

SECRET_HEADER = "x-gyre-control"


class EngineRow(BaseModel):
    engine_id: str
    url: str
    serving: bool
    weight_version: int


class ExecutionRow(BaseModel):
    execution_id: str
    token_sha256: str
    engine_id: str
    max_context_tokens: int
    max_output_tokens: int
    temperature: float
    train: bool = True


class TablePush(BaseModel):
    """A version of the routing table; a delta unless `full`."""

    version: int
    full: bool = False
    published_version: int
    engines: list[EngineRow] = []
    executions: list[ExecutionRow] = []
    closed: list[str] = []


class CloseOrder(BaseModel):
    execution_id: str


def control_app(table: RoutingTable, turns: Turns, counters: Counters, secret: str) -> FastAPI:
    """Routes of the control listener; every one needs the secret header."""

    def authorised(request: Request) -> None:
        given = request.headers.get(SECRET_HEADER, "")
        if not hmac.compare_digest(given.encode(), secret.encode()):
            raise HTTPException(403, "wrong control secret")

    app = FastAPI(title="QwenGyre proxy control", dependencies=[Depends(authorised)], openapi_url=None)

    @app.post("/control/table")
    async def push(body: TablePush) -> dict[str, int]:
        """Apply a table; the answer is the acknowledgement."""
        try:
            closed = table.apply(body.model_dump())
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPException(422, str(error)) from error
        for execution_id in closed:
            await turns.drop(execution_id)
        return {"version": table.version}

    @app.get("/control/inflight")
    async def inflight() -> dict[str, dict[str, int]]:
        return {"engines": {name: table.inflight[name] for name in {*table.engines, *table.inflight}}}

    @app.post("/control/close")
    async def close(order: CloseOrder) -> dict[str, int]:
        """Revoke an execution's key; all its records are durable when this answers."""
        table.close(order.execution_id)
        return await turns.close(order.execution_id)

    @app.get("/control/stats")
    async def stats() -> dict[str, Any]:
        return {**asdict(counters), "in_flight": turns.open_calls, "table_version": table.version, "executions": len(table.executions)}

    return app
