"""The dispatch queue: admitted groups keep their slot until a batch consumes them; their executions wait, run and end (section 2.2).

It moves the counters d, p and f and knows nothing of cells, steps or policies.
"""

from collections import deque

from gyre_lib.scheduling.events import Dispatch
from gyre_lib.scheduling.water_level import WaterLevel


class AdmittedGroup:
    """A group that no batch has consumed yet. `settled`: ready, or lost and kept as a placeholder."""

    __slots__ = ("executions", "requeues", "settled")

    def __init__(self, executions: tuple[str, ...], requeues: int) -> None:
        self.executions = executions
        self.requeues = requeues
        self.settled = False


class DispatchQueue:
    """Executions by id, in order of dispatch; every one ends once."""

    __slots__ = ("_open", "_waiting", "groups", "level")

    def __init__(self) -> None:
        self.level = WaterLevel()
        self.groups: dict[str, AdmittedGroup] = {}
        self._open: dict[str, bool] = {}
        self._waiting: deque[str] = deque()

    def enter(self, dispatch: Dispatch, requeues: int = 0) -> None:
        """Admit the groups; their executions wait for a slot."""
        for group, executions in zip(dispatch.groups, dispatch.executions, strict=True):
            self.groups[group] = AdmittedGroup(executions, requeues)
            self._waiting.extend(executions)
            self._open.update(dict.fromkeys(executions, False))
            self.level.dispatched += len(executions)

    def launch(self, count: int) -> tuple[str, ...]:
        """The next `count` waiting executions, now running; there must be as many."""
        started: list[str] = []
        while len(started) < count:
            execution = self._waiting.popleft()
            if execution in self._open:
                self._open[execution] = True
                started.append(execution)
        self.level.launched += count
        return tuple(started)

    def end(self, execution: str) -> bool:
        """Count an end; False where it is not open (unknown, or ended before). One that never launched counts as launched now."""
        launched = self._open.pop(execution, None)
        if launched is None:
            return False
        level = self.level
        if not launched:
            level.launched += 1
        level.terminated += 1
        return True

    def cancel(self, group: AdmittedGroup) -> tuple[str, ...]:
        """The group's executions that have not ended. Those still waiting end at once; the running ones end when they are stopped."""
        unfinished = tuple(execution for execution in group.executions if execution in self._open)
        for execution in unfinished:
            if not self._open[execution]:
                self.end(execution)
        return unfinished

    def running(self) -> tuple[str, ...]:
        """Executions launched and not ended, in order of dispatch."""
        return tuple(execution for execution, launched in self._open.items() if launched)
