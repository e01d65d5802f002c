"""What a simulated run leaves behind."""

from dataclasses import dataclass, field


@dataclass
class Durations:
    """What Figure 5 shows: wall-clock seconds of ended executions and groups, and how executions ended."""

    executions_s: list[float] = field(default_factory=list)
    queries_s: list[float] = field(default_factory=list)
    harness_timeouts: int = 0
    overall_timeouts: int = 0
    failures: int = 0
    queries_of_4_h_timed_out: int = 0
    """Queries of four hours and more whose longest execution ended at the overall limit."""


@dataclass
class SimulatedRun:
    """The outcome of one simulated run."""

    total_s: float
    """From the start to the last publication."""
    step_ends_s: list[float]
    durations: Durations
    mean_staleness: float
    training_node_s: float
    """Node-seconds in the training role, transitions included."""
    busy_node_s: float
    """Of these, computing micro-steps or updates."""
    rollout_node_s: float
    cell_joins: int
    mean_prefix: float
    """Cells in training at an update, averaged over updates."""
    roles: list[tuple[float, int, str]]
    """(time, cell, role) changes, where recorded."""
    levels: list[tuple[float, int, int, int]]
    """(time, water level, running, capacity) where recorded."""
    publications_s: list[float]
    events: int

    @property
    def slack(self) -> float:
        """Idle share of the training role's node time."""
        return 1 - self.busy_node_s / self.training_node_s if self.training_node_s else 0.0
