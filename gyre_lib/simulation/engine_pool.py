"""Engines of a simulated run: processor sharing in virtual time, one clock per engine.

Virtual time of an engine advances at rate(x) = 1 / (1 - share + share * x^exponent), x = load/capacity, 1 at full load. An execution with
work w that starts at virtual time v leaves at v + w; so a change of load moves one number per engine, not one per execution.
"""

from heapq import heappop, heappush
from math import inf

from gyre_lib.simulation.executions import Execution


class EnginePool:
    """Engines 0..n-1; index n-1 may be the standalone pool. `next_finish` holds each engine's next completion time."""

    def __init__(self, capacities: list[int], load_share: float, load_exponent: float = 1.0) -> None:
        self.capacities = capacities
        self.load = [0] * len(capacities)
        self.next_finish = [inf] * len(capacities)
        self._rates = [_rates(capacity, load_share, load_exponent) for capacity in capacities]
        self._virtual = [0.0] * len(capacities)
        self._rate = [1.0 / (1.0 - load_share)] * len(capacities)
        self._since = [0.0] * len(capacities)
        self._heaps: list[list[tuple[float, int, Execution]]] = [[] for _ in capacities]
        self._sequence = 0

    def add(self, engine: int, execution: Execution, work_s: float, now: float) -> None:
        """The execution begins (or continues) on this engine with so much work left."""
        virtual = self._virtual[engine] + self._rate[engine] * (now - self._since[engine])
        self._virtual[engine] = virtual
        self._since[engine] = now
        execution.engine = engine
        self._sequence += 1
        heappush(self._heaps[engine], (virtual + work_s, self._sequence, execution))
        self._set_load(engine, self.load[engine] + 1, now)

    def remove(self, execution: Execution, now: float) -> None:
        """The execution's harness was stopped (time limit, cancellation)."""
        engine = execution.engine
        assert engine is not None
        self._virtual[engine] += self._rate[engine] * (now - self._since[engine])
        self._since[engine] = now
        execution.engine = None
        self._set_load(engine, self.load[engine] - 1, now)

    def finish(self, engine: int, now: float) -> Execution:
        """Take the execution whose work is done at `next_finish[engine]`."""
        execution = self._heaps[engine][0][2]
        self._virtual[engine] += self._rate[engine] * (now - self._since[engine])
        self._since[engine] = now
        execution.engine = None
        self._set_load(engine, self.load[engine] - 1, now)
        return execution

    def drain(self, engine: int, now: float) -> list[tuple[float, Execution]]:
        """All executions of this engine with the work each has left, nearest to its end first; the engine is empty afterwards."""
        virtual = self._virtual[engine] + self._rate[engine] * (now - self._since[engine])
        left = [(end - virtual, execution) for end, _, execution in sorted(self._heaps[engine]) if execution.engine == engine]
        for _, execution in left:
            execution.engine = None
        self._heaps[engine] = []
        self._virtual[engine] = 0.0
        self._since[engine] = now
        self._set_load(engine, 0, now)
        return left

    def _set_load(self, engine: int, load: int, now: float) -> None:
        self.load[engine] = load
        rates = self._rates[engine]
        rate = self._rate[engine] = rates[load] if load < len(rates) else rates[-1] * (len(rates) - 1) / load
        heap = self._heaps[engine]
        while heap and heap[0][2].engine != engine:
            heappop(heap)
        self.next_finish[engine] = now + max(0.0, heap[0][0] - self._virtual[engine]) / rate if heap else inf


def _rates(capacity: int, share: float, exponent: float) -> list[float]:
    """Rate at each load from 0 to the capacity; an engine above its capacity shares its full speed among more."""
    return [1.0 / (1.0 - share + share * (load / capacity) ** exponent) if capacity else 1.0 for load in range(capacity + 1)]
