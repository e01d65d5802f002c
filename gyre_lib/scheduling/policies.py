"""The scheduling policies: when a cell may join training, and what stays there after a publication.

They decide over the scheduler's counters only; transitions, the prefix, the join window and dispatch are the same for all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gyre_lib.scheduling.settings import SchedulerSettings

if TYPE_CHECKING:
    from gyre_lib.scheduling.scheduler import Scheduler


class Policy(Protocol):
    """What a policy decides."""

    always_training: int
    """Cells 0..n-1 that never serve rollout."""
    whole_pool: bool
    """All elastic cells stop serving as soon as the first of them leaves."""
    needs_supply: bool
    """Joins wait for the supply check."""

    def join_level(self, scheduler: "Scheduler", cell: int) -> int:
        """The largest w at which this cell, the next of the prefix, may leave rollout; -1: at none."""

    def supply_sufficient(self, scheduler: "Scheduler") -> bool:
        """What the supply check watches."""

    def core_stays(self, scheduler: "Scheduler") -> bool:
        """Asked at a publication, before its dispatch: the core goes on training."""


class Elastic:
    """Cells join one by one as the water level falls: the paper's policy at a headroom of 100 %.

    More headroom lets cells join later, when the rest has room to spare, so that the executions left behind share their engines with fewer
    others; training then catches up in the tail of the burst, where engines are worth little to rollout.
    """

    always_training = 0
    whole_pool = False
    needs_supply = True

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._batch = settings.groups_per_batch
        self._streaming = settings.streaming
        self._needed = settings.supply_groups if settings.streaming else settings.groups_per_batch

    def join_level(self, scheduler: "Scheduler", cell: int) -> int:
        return 100 * scheduler.capacity_without(cell) // self._settings.join_headroom_percent

    def supply_sufficient(self, scheduler: "Scheduler") -> bool:
        if scheduler.prefix == 0 or not self._streaming:
            return min(scheduler.ready + scheduler.assigned, self._batch) >= self._needed
        return min(scheduler.ready, self._batch - scheduler.assigned) >= self._needed

    def core_stays(self, scheduler: "Scheduler") -> bool:
        if min(scheduler.ready, self._batch) < self._needed:
            return False
        s = self._settings
        return scheduler.level.covered_by(scheduler.capacity, pending=s.refill_groups * s.executions_dispatched_per_group)


class Colocate(Elastic):
    """The whole pool switches together once the standalone pool covers what is outstanding; with C_s = 0, once everything has ended.

    Without streaming it also waits until the whole burst is ready, as the original Colocate does.
    """

    whole_pool = True

    def join_level(self, scheduler: "Scheduler", cell: int) -> int:
        return scheduler.level.dispatched if scheduler.pool_out else scheduler.standalone_capacity

    def supply_sufficient(self, scheduler: "Scheduler") -> bool:
        if scheduler.pool_out:
            return True
        if self._streaming:
            return super().supply_sufficient(scheduler)
        s = self._settings
        consumed = scheduler.step % s.steps_per_burst * self._batch
        return consumed + scheduler.assigned + scheduler.ready >= s.refill_groups

    def core_stays(self, scheduler: "Scheduler") -> bool:
        return False


class Async:
    """Cells 0..training_cells-1 always train, the others never do."""

    whole_pool = False
    needs_supply = False

    def __init__(self, settings: SchedulerSettings) -> None:
        self.always_training = settings.training_cells

    def join_level(self, scheduler: "Scheduler", cell: int) -> int:
        return scheduler.level.dispatched if cell < self.always_training else -1

    def supply_sufficient(self, scheduler: "Scheduler") -> bool:
        return True

    def core_stays(self, scheduler: "Scheduler") -> bool:
        return True


def policy_of(settings: SchedulerSettings) -> Policy:
    """The policy that the settings name."""
    kinds: dict[str, Callable[[SchedulerSettings], Policy]] = {"elastic": Elastic, "colocate": Colocate, "async": Async}
    return kinds[settings.policy](settings)
