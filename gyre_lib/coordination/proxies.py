"""The coordinator's side of the proxies' control interface: push tables, wait for acknowledgements, close executions."""

import asyncio
import zlib
from dataclasses import dataclass
from typing import Any

import httpx

from gyre_lib.coordination.routing_table import RoutingTable

WHOLE_TABLE_TRIES = 3


@dataclass(frozen=True)
class Proxy:
    proxy_id: str
    url: str
    control_url: str
    uds: str


class Proxies:
    """Every registered proxy holds the whole table; a change is in force once all have acknowledged it."""

    def __init__(self, table: RoutingTable, secret: str) -> None:
        self._table = table
        self._http = httpx.AsyncClient(headers={"x-gyre-control": secret}, timeout=30.0)
        self._proxies: dict[str, Proxy] = {}
        self._push = asyncio.Lock()

    @property
    def registered(self) -> list[Proxy]:
        return list(self._proxies.values())

    def of(self, execution_id: str) -> Proxy:
        """The proxy that an execution talks to: always the same one while it lives. Raises LookupError while none is registered."""
        if not self._proxies:
            raise LookupError("no proxy has registered yet")
        names = sorted(self._proxies)
        return self._proxies[names[zlib.crc32(execution_id.encode()) % len(names)]]

    async def register(self, proxy: Proxy) -> None:
        """A proxy has started (or restarted): it gets the full table before it is used."""
        async with self._push:
            await self._post(proxy, "/control/table", self._table.full())
            self._proxies[proxy.proxy_id] = proxy

    async def push(self) -> int:
        """Send the table's changes to all proxies; returns the version that all of them have acknowledged.

        A proxy that is gone is left out: when it comes back it registers again and gets the full table.
        """
        async with self._push:
            if not self._proxies:
                return self._table.version
            delta = self._table.delta()
            answers = await asyncio.gather(
                *(self._post(proxy, "/control/table", delta) for proxy in self._proxies.values()), return_exceptions=True
            )
            for proxy, answer in zip(list(self._proxies.values()), answers, strict=True):
                if isinstance(answer, httpx.HTTPError):
                    await self._push_whole(proxy)
                elif isinstance(answer, BaseException):
                    raise answer
            return delta["version"]

    async def _push_whole(self, proxy: Proxy) -> None:
        """A proxy that missed a change gets everything. One that is gone, or stays silent, is left out until it registers again."""
        for _ in range(WHOLE_TABLE_TRIES):
            try:
                await self._post(proxy, "/control/table", self._table.full())
                return
            except httpx.ConnectError:
                break
            except httpx.HTTPError:
                await asyncio.sleep(1.0)
        del self._proxies[proxy.proxy_id]

    async def in_flight(self, engine_ids: set[str]) -> int:
        """Requests that proxies still have on these engines."""
        answers = await asyncio.gather(*(self._get(proxy, "/control/inflight") for proxy in self._proxies.values()))
        return sum(count for answer in answers for engine, count in answer["engines"].items() if engine in engine_ids)

    async def close(self, execution_id: str) -> dict[str, int]:
        """Revoke the execution's key everywhere; its records are durable when this returns.

        Raises LookupError while no proxy is registered: its records could not be told to be complete.
        """
        if not self._proxies:
            raise LookupError("no proxy is registered at the moment")
        answers = await asyncio.gather(
            *(self._post(proxy, "/control/close", {"execution_id": execution_id}) for proxy in self._proxies.values())
        )
        return {name: sum(answer.get(name, 0) for answer in answers) for name in ("requests", "output_tokens")}

    async def stats(self) -> dict[str, int]:
        """Counters summed over proxies."""
        answers = await asyncio.gather(*(self._get(proxy, "/control/stats") for proxy in self._proxies.values()))
        names = {name for answer in answers for name, value in answer.items() if isinstance(value, int)}
        return {name: sum(answer.get(name, 0) for answer in answers) for name in sorted(names)}

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _post(self, proxy: Proxy, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post(proxy.control_url + path, json=body)
        response.raise_for_status()
        return response.json()

    async def _get(self, proxy: Proxy, path: str) -> dict[str, Any]:
        response = await self._http.get(proxy.control_url + path)
        response.raise_for_status()
        return response.json()
