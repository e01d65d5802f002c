"""Which groups enter the queue, and when (section 2.2 of the paper; continuous dispatch: its appendix).

Boundary dispatch keeps (phi + mu) B groups admitted and not yet consumed: the queue is filled to that depth at the start, and the
mu B slots that a burst freed are refilled together after its publication. Continuous dispatch keeps as many groups *unfinished*:
a group that is ready frees its slot, and a replacement enters at once.
"""

from gyre_lib.scheduling.events import Dispatch
from gyre_lib.scheduling.settings import SchedulerSettings


class BoundaryDispatch:
    """Numbers groups `g00001`… and their executions `g00001-01`… in order of dispatch."""

    __slots__ = ("_continuous", "_settings", "groups_dispatched")

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._continuous = settings.dispatch == "continuous"
        self.groups_dispatched = 0

    def at_start(self) -> Dispatch:
        """The queue filled to its target depth with version 0."""
        return self._next(self._settings.depth_groups, 0)

    def after_publication(self, version: int) -> Dispatch | None:
        """mu B groups under the version just published; nothing with continuous dispatch, whose slots were refilled before."""
        return None if self._continuous else self._next(self._settings.refill_groups, version)

    def after_group_ready(self, version: int) -> Dispatch | None:
        """The replacement of a finished group under the latest published version (continuous dispatch only)."""
        return self._next(1, version) if self._continuous else None

    def again(self, version: int) -> Dispatch:
        """One group that takes a lost group's place."""
        return self._next(1, version)

    def knows(self, group: str) -> bool:
        """Whether this group id has been dispatched."""
        number = group[1:]
        return (
            group.startswith("g") and number.isdecimal() and group == _group_id(int(number)) and 1 <= int(number) <= self.groups_dispatched
        )

    def knows_execution(self, execution: str) -> bool:
        """Whether this execution id has been dispatched."""
        group, _, number = execution.rpartition("-")
        return number.isdecimal() and 1 <= int(number) <= self._settings.executions_dispatched_per_group and self.knows(group)

    def _next(self, count: int, version: int) -> Dispatch:
        first = self.groups_dispatched + 1
        self.groups_dispatched += count
        groups = tuple(_group_id(number) for number in range(first, first + count))
        size = self._settings.executions_dispatched_per_group
        return Dispatch(groups, tuple(tuple(f"{group}-{i:02d}" for i in range(1, size + 1)) for group in groups), version)


def _group_id(number: int) -> str:
    return f"g{number:05d}"
