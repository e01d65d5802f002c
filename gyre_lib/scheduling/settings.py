"""What the scheduler must know about a run, as plain integers; impossible settings are refused here with the reason."""

from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import ceil
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import RunConfig

POLICIES = ("elastic", "async", "colocate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Counts and switches of one run. Groups and executions are counted in integers; only `supply_hold_s` is a time, in seconds.

    Raises InputError, one line that names the field and says why.
    """

    policy: str = "elastic"
    dispatch: str = "boundary"
    """`boundary`: refill after each publication; `continuous` (async only): refill as soon as a group is ready."""
    streaming: bool = True
    """False: a step begins when its whole batch is ready."""
    cells: int
    """K; cell 0 is the core."""
    cell_capacity: int
    """C_e, concurrent executions of one cell in rollout."""
    standalone_capacity: int = 0
    """C_s."""
    training_cells: int = 1
    """Cells that always train (async)."""
    groups_per_batch: int
    """B."""
    executions_per_group: int
    """N, without oversampling."""
    oversampling: int = 0
    """Surplus executions per group."""
    steps_per_burst: int
    """mu."""
    extra_groups: int = 0
    """phi * B."""
    supply_groups: int = 1
    """ceil(rho_min * B): ready groups that must be there before a cell joins training."""
    supply_hold_s: float = 60.0
    """tau."""
    join_headroom_percent: int = 100
    """A cell joins only if the capacity left is at least this share of w; above 100 the executions left behind run faster (elastic)."""
    spread_reroutes: bool = False
    """Executions of a leaving cell go to the least loaded engines, not to the longest-lived first (elastic)."""
    bursts: int = 1
    lost_groups: str = "placeholder"
    """`placeholder`: a lost group is consumed empty; `requeue`: its query runs again as a new group (at most `requeue_limit` times)."""
    requeue_limit: int = 2

    def __post_init__(self) -> None:
        self._refuse_wrong_words()
        self._refuse_wrong_counts()
        self._refuse_impossible()

    def _refuse_wrong_words(self) -> None:
        if self.policy not in POLICIES:
            raise InputError(f"policy: one of {', '.join(POLICIES)}, got {self.policy}")
        if self.dispatch not in ("boundary", "continuous"):
            raise InputError(f"dispatch: boundary or continuous, got {self.dispatch}")
        if self.dispatch == "continuous" and self.policy != "async":
            raise InputError(f"dispatch: continuous dispatch exists for policy async only, not {self.policy}")
        if self.lost_groups not in ("placeholder", "requeue"):
            raise InputError(f"lost_groups: placeholder or requeue, got {self.lost_groups}")

    def _refuse_wrong_counts(self) -> None:
        at_least = {
            "cells": 1, "cell_capacity": 0, "standalone_capacity": 0, "training_cells": 1, "groups_per_batch": 1, "executions_per_group": 1,
            "oversampling": 0, "steps_per_burst": 1, "extra_groups": 0, "supply_groups": 1, "bursts": 1, "requeue_limit": 0,
            "join_headroom_percent": 100,
        }  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: an integer of at least {least}, got {value}")
        if self.supply_groups > self.groups_per_batch:
            raise InputError(
                f"supply_groups: at most B = {self.groups_per_batch}, got {self.supply_groups}:"
                " a batch never needs more, so no cell could ever join"
            )
        if not self.supply_hold_s >= 0:
            raise InputError(f"supply_hold_s: zero or more seconds, got {self.supply_hold_s}")

    def _refuse_impossible(self) -> None:
        """The only way a burst can never finish is that no execution can ever run.

        With at least one slot while no cell trains, everything dispatched ends in time, so w falls to 0 and every join condition
        (w <= C(k)) comes true; a batch needs at most the groups that are already dispatched. A small capacity is slow, not impossible.
        """
        rollout_cells = self.cells - self.training_cells if self.policy == "async" else self.cells
        if rollout_cells < 0:
            raise InputError(f"training_cells: at most K = {self.cells}, got {self.training_cells}")
        if self.standalone_capacity + rollout_cells * self.cell_capacity < 1:
            why = (
                f"all {self.cells} cells always train and the standalone pool has no capacity"
                if self.policy == "async" and rollout_cells == 0
                else "neither the cells in rollout nor the standalone pool have capacity"
            )
            raise InputError(f"cell_capacity: {why}, so no execution could ever run and the first burst would never finish")

    @property
    def executions_dispatched_per_group(self) -> int:
        """N plus oversampling."""
        return self.executions_per_group + self.oversampling

    @property
    def depth_groups(self) -> int:
        """Q = (phi + mu) B."""
        return self.extra_groups + self.steps_per_burst * self.groups_per_batch

    @property
    def refill_groups(self) -> int:
        """mu B: what one burst consumes and each publication admits."""
        return self.steps_per_burst * self.groups_per_batch

    @property
    def mean_staleness(self) -> Fraction:
        """Steady-state E[d] of boundary dispatch, phi + (mu - 1)/2."""
        return Fraction(self.extra_groups, self.groups_per_batch) + Fraction(self.steps_per_burst - 1, 2)

    @classmethod
    def from_config(cls, config: RunConfig) -> "SchedulerSettings":
        """Of a run's configuration. Raises InputError."""
        s, c = config.scheduling, config.cells
        return cls(
            policy=s.policy,
            dispatch=s.dispatch,
            streaming=s.streaming,
            cells=c.count,
            cell_capacity=c.capacity,
            standalone_capacity=c.standalone_capacity,
            training_cells=min(c.training_cells, c.count),
            groups_per_batch=s.groups_per_batch,
            executions_per_group=s.executions_per_group,
            oversampling=s.oversampling,
            steps_per_burst=s.steps_per_burst,
            extra_groups=extra_groups(s.phi, s.groups_per_batch),
            supply_groups=supply_groups(s.supply_fraction, s.groups_per_batch),
            supply_hold_s=s.supply_hold_s,
            join_headroom_percent=round(100 * s.join_headroom),
            spread_reroutes=s.spread_reroutes,
            bursts=s.bursts,
            lost_groups=s.lost_groups,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with one entry per field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SchedulerSettings":
        """The inverse of to_json. Raises InputError for a missing or unknown field."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise InputError(f"settings: unknown field {unknown[0]}")
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"settings: {error}") from error


def extra_groups(phi: Fraction | float | str, groups_per_batch: int) -> int:
    """phi * B. Raises InputError where it is not an integer (phi as written: 0.1 is 1/10)."""
    groups = (phi if isinstance(phi, Fraction) else Fraction(str(phi))) * groups_per_batch
    if groups.denominator != 1:
        raise InputError(
            f"extra_dispatch: phi*B must be an integer, got {float(Fraction(str(phi))):g} * {groups_per_batch} = {float(groups):g}"
        )
    return int(groups)


def supply_groups(rho_min: float, groups_per_batch: int) -> int:
    """ceil(rho_min * B), with rho_min as written. Raises InputError outside (0, 1]."""
    rho = Fraction(str(rho_min))
    if not 0 < rho <= 1:
        raise InputError(f"supply_fraction: in (0, 1], got {rho_min}")
    return ceil(rho * groups_per_batch)
