"""The routing table: which engine serves which execution. Pure; every change raises the version that proxies acknowledge."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

STANDALONE = -1
"""The cell number under which the standalone pool appears."""


@dataclass
class Engine:
    engine_id: str
    url: str
    cell: int
    """Cell index, or STANDALONE."""
    capacity: int
    """Concurrent executions."""
    serving: bool = False
    weight_version: int = 0


@dataclass
class Route:
    execution_id: str
    token_sha256: str
    engine_id: str
    max_context_tokens: int
    max_output_tokens: int
    temperature: float
    train: bool


class RoutingTable:
    """Engines and routes, with the changes since the last delta."""

    def __init__(self, published_version: int = 0, first_version: int = 0) -> None:
        self.version = first_version
        self.published_version = published_version
        self.engines: dict[str, Engine] = {}
        self.routes: dict[str, Route] = {}
        self._load: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._closed: set[str] = set()

    def set_engine(self, engine: Engine) -> None:
        self.engines[engine.engine_id] = engine

    def open(self, route: Route) -> None:
        """Give the execution an engine (route.engine_id is ignored)."""
        route.engine_id = self._least_loaded(self.engines.values())
        self.routes[route.execution_id] = route
        self._load[route.engine_id] += 1
        self._changed.add(route.execution_id)

    def close(self, execution_id: str) -> None:
        route = self.routes.pop(execution_id, None)
        if route is not None:
            self._load[route.engine_id] -= 1
            self._changed.discard(execution_id)
            self._closed.add(execution_id)

    def move_away(self, engine_ids: Iterable[str], destinations: Iterable[int] | None = None, spread: bool = False) -> int:
        """Stop serving on these engines and move their executions. `destinations` are cells (or STANDALONE), best first: each is filled
        to its capacity before the next, or with `spread` all evenly. Returns how many executions moved; those that found no serving
        engine stay and wait."""
        leaving = set(engine_ids)
        for engine_id in leaving:
            self.engines[engine_id].serving = False
        return self._place([r for r in self.routes.values() if r.engine_id in leaving], destinations if not spread else None)

    def serve(self, engine_ids: Iterable[str], weight_version: int) -> int:
        """Start serving; executions that waited on an engine that does not serve move here. Returns how many did."""
        for engine_id in engine_ids:
            self.engines[engine_id].serving = True
            self.engines[engine_id].weight_version = weight_version
        return self._place([r for r in self.routes.values() if not self._serves(r.engine_id)], None)

    def load(self, engine_id: str) -> int:
        """Executions routed to the engine."""
        return self._load[engine_id]

    def engines_of(self, cell: int) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.cell == cell]

    def delta(self) -> dict[str, Any]:
        """What changed since the last delta, under a new version."""
        self.version += 1
        changed, closed = sorted(self._changed), sorted(self._closed)
        self._changed, self._closed = set(), set()
        return {**self._head(), "full": False, "executions": [asdict(self.routes[e]) for e in changed], "closed": closed}

    def full(self) -> dict[str, Any]:
        """The whole table, at the current version."""
        return {**self._head(), "full": True, "executions": [asdict(r) for r in self.routes.values()], "closed": []}

    def _head(self) -> dict[str, Any]:
        engines = [
            {k: v for k, v in asdict(e).items() if k in ("engine_id", "url", "serving", "weight_version")} for e in self.engines.values()
        ]
        return {"version": self.version, "published_version": self.published_version, "engines": engines}

    def _serves(self, engine_id: str) -> bool:
        return engine_id in self.engines and self.engines[engine_id].serving

    def _place(self, routes: list[Route], destinations: Iterable[int] | None) -> int:
        moved = 0
        order = list(destinations) if destinations is not None else None
        for route in routes:
            target = self._first_with_room(order) if order is not None else self._least_loaded(self.engines.values())
            if not self._serves(target) or target == route.engine_id:
                continue
            self._load[route.engine_id] -= 1
            self._load[target] += 1
            route.engine_id = target
            self._changed.add(route.execution_id)
            moved += 1
        return moved

    def _first_with_room(self, cells: list[int]) -> str:
        for cell in cells:
            free = [e for e in self.engines_of(cell) if e.serving and self._load[e.engine_id] < e.capacity]
            if free:
                return self._least_loaded(free)
        # Benchmark executions are outside the scheduler's reservation: they share whatever serves.
        return self._least_loaded(self.engines.values())

    def _least_loaded(self, engines: Iterable[Engine]) -> str:
        """Relative to capacity; an engine that does not serve only when none does (the execution then waits for one)."""
        best = min(engines, key=lambda e: (not e.serving, self._load[e.engine_id] / e.capacity, e.engine_id), default=None)
        return best.engine_id if best else ""
