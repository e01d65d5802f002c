"""Scheduling staleness d = v_t - v_d of every consumed group, and the identities that it obeys exactly.

Let S steps be done, B groups consumed by each, U = sum over the unconsumed groups of (S - v_d).

1. Boundary identity, at each publication (S = J mu), before the next groups are dispatched:
       sum of d over consumed groups = B S (phi + (mu - 1)/2) - U - Delta,
   where Delta = sum over re-queued groups of (v_d of the replacement - v_d of the lost one). It needs no order of consumption, no
   law of durations and no steady state: sum of v_t is B S (S - 1)/2, and the admitted groups' v_d are fixed by the dispatch rule.
2. Counting identity, for every kind of dispatch:
       sum of d over consumed + U = sum over updates of (groups unconsumed after the batch was removed) + sum over admitted of (v_a - v_d),
   with v_a the number of steps done at admission: every version increment that finds a group unconsumed makes it one step staler.
   Removed (re-queued) groups are taken out with what they had gathered.

All sums are integers, so both are compared with rational equality.
"""

from fractions import Fraction

from gyre_lib.scheduling.settings import SchedulerSettings


class StalenessLedger:
    """Accounting by group; O(1) for each group and each update."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._admitted: dict[str, int] = {}
        self._unconsumed_versions = 0
        self._steps = 0
        self._counted = 0
        self._moved = 0
        self.consumed_groups = 0
        self.consumed_sum = 0

    def admit(self, group: str, version: int) -> None:
        """A group enters the queue under published version `version`."""
        self._admitted[group] = version
        self._unconsumed_versions += version
        self._counted += self._steps - version

    def replace(self, lost: str, replacement: str, version: int) -> None:
        """A lost group's place is taken by a new one, admitted now."""
        lost_version = self._admitted.pop(lost)
        self._unconsumed_versions -= lost_version
        self._counted -= self._steps - lost_version
        self._moved += version - lost_version
        self.admit(replacement, version)

    def consume(self, group: str) -> int:
        """A group is assigned to the batch of the step under way; returns its d."""
        version = self._admitted.pop(group)
        self._unconsumed_versions -= version
        staleness = self._steps - version
        self.consumed_groups += 1
        self.consumed_sum += staleness
        return staleness

    def step_done(self) -> None:
        """An optimizer update is complete: the policy version advances by one."""
        self._counted += len(self._admitted)
        self._steps += 1

    @property
    def mean(self) -> Fraction | None:
        """Mean d over the groups consumed so far."""
        return Fraction(self.consumed_sum, self.consumed_groups) if self.consumed_groups else None

    @property
    def outstanding(self) -> int:
        """U."""
        return self._steps * len(self._admitted) - self._unconsumed_versions

    @property
    def expected_sum(self) -> Fraction:
        """Right side of the boundary identity; meaningful at a publication, before its dispatch."""
        steady = self._settings.groups_per_batch * self._steps * self._settings.mean_staleness
        return steady - self.outstanding - self._moved

    def counting_identity_holds(self) -> bool:
        """Identity 2, at any moment between updates."""
        return self.consumed_sum + self.outstanding == self._counted

    def boundary_identity_holds(self) -> bool:
        """Identity 1, at a publication before its dispatch (boundary dispatch only)."""
        return self.consumed_sum == self.expected_sum
