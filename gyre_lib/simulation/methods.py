"""The scheduling methods that experiments compare, as (settings, cell size) for a workload's cluster.

Every method uses all nodes of the cluster. Async: one trainer of fixed size, the other nodes always in rollout. Colocate: one pool that
switches as a unit, and optionally standalone nodes. Elastic: equal cells.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.scheduling.settings import SchedulerSettings, extra_groups, supply_groups
from gyre_lib.simulation.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to run a workload; `nodes` is the trainer (async), the switching pool (colocate) or one cell (elastic)."""

    policy: str
    phi: Fraction
    mu: int
    nodes: int
    streaming: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    """SchedulerSettings fields that differ from the workload's."""

    @property
    def mean_staleness(self) -> Fraction:
        return self.phi + Fraction(self.mu - 1, 2)

    @property
    def label(self) -> str:
        """For tables: policy, nodes, (phi, mu)."""
        what = {"async": f"{self.nodes} train", "colocate": f"{self.nodes} switch", "elastic": f"{self.nodes}-node cells"}[self.policy]
        return f"{self.policy} {what} ({float(self.phi):g},{self.mu}){'' if self.streaming else ' no streaming'}"

    def settings(self, workload: Workload, steps: int) -> SchedulerSettings:
        """The scheduler's settings for `steps` training steps. Raises InputError where the cluster or the steps do not fit."""
        nodes, batch = workload.cluster.nodes, workload.batch
        if not 1 <= self.nodes <= nodes:
            raise InputError(f"nodes: {self.label} needs {self.nodes} of the cluster's {nodes} nodes")
        if steps % self.mu:
            raise InputError(f"steps: {steps} is not a multiple of mu = {self.mu}")
        if self.policy == "elastic" and nodes % self.nodes:
            raise InputError(f"nodes_per_cell: {nodes} nodes are no whole number of {self.nodes}-node cells")
        cells = nodes // self.nodes if self.policy == "elastic" else 1
        fields: dict[str, Any] = {
            "policy": self.policy,
            "streaming": self.streaming,
            "cells": cells,
            "cell_capacity": workload.capacity(self.nodes),
            "standalone_capacity": workload.capacity(nodes - cells * self.nodes),
            "training_cells": 1,
            "groups_per_batch": batch.groups_per_batch,
            "executions_per_group": batch.executions_per_group,
            "steps_per_burst": self.mu,
            "extra_groups": extra_groups(self.phi, batch.groups_per_batch),
            "supply_groups": supply_groups(batch.supply_fraction, batch.groups_per_batch),
            "supply_hold_s": batch.supply_hold_s,
            "bursts": steps // self.mu,
        }
        return SchedulerSettings(**{**fields, **dict(self.options)})


def method(policy: str, phi: Fraction | float, mu: int, nodes: int, streaming: bool = True, **options: Any) -> Method:
    """A Method with phi as written (0.5 is 1/2)."""
    return Method(
        policy=policy,
        phi=phi if isinstance(phi, Fraction) else Fraction(str(phi)),
        mu=mu,
        nodes=nodes,
        streaming=streaming,
        options=tuple(sorted(options.items())),
    )


METHODS_122B = {
    "E0": method("elastic", 0.5, 3, 4),
    "E1": method("elastic", 1.5, 1, 4),
    "E2": method("elastic", 0.5, 3, 8),
    "C0": method("colocate", 0, 4, 32, streaming=False),
    "C1": method("colocate", 0.5, 3, 28, streaming=False),
    "C2": method("colocate", 0.5, 3, 28),
    "C3": method("colocate", 0.5, 3, 16),
    "A0": method("async", 1.5, 1, 16, streaming=False),
    "A1": method("async", 1.5, 1, 8, streaming=False),
    "A2": method("async", 0, 4, 16, streaming=False),
    "A3": method("async", 1.5, 1, 16),
}
"""The paper's ablation (E[d] = 1.5). Chosen here because the text does not give them: the splits of A0 and A1, (phi, mu) of A2, C3's pools."""

METHODS_24T = {
    "elastic": method("elastic", 0.5, 3, 48),
    "async": method("async", 1.5, 1, 48, streaming=False),
    "colocate": method("colocate", 0, 4, 192, streaming=False),
}
"""The 2.4T comparison; its (phi, mu) and Async's split are not in the text and are those of the 122B comparison with one training cell."""
