"""What a simulated cluster does: a data file of `data/workloads/`, read into one pydantic model. All times are in seconds.

An execution is harness work (its duration alone on engines at full load), then an evaluation; both are bounded by wall-clock limits.
Durations are lognormal with a part shared by the executions of one query, or drawn from recorded queries (`recorded`).
"""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gyre_lib.config.errors import InputError

WORKLOADS = Path(__file__).resolve().parents[2] / "data" / "workloads"

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterPart(Part):
    """The machines."""

    nodes: Annotated[int, Field(ge=1)]
    """All nodes of the run."""
    nodes_per_cell: Annotated[int, Field(ge=1)]
    """Default cell size."""
    nodes_per_rank: Annotated[int, Field(ge=1)]
    """Smallest set of nodes that holds one training replica; a larger cell runs several in lock-step."""
    concurrency_per_node: Positive
    """Executions in rollout that one node may serve."""
    to_training_s: NotNegative
    to_rollout_s: NotNegative
    publication_s: NotNegative


class ExecutionPart(Part):
    """One execution: harness work, evaluation, limits."""

    median_s: Positive
    """Median harness work at full engine load."""
    query_sigma: NotNegative
    """Spread of log work between queries."""
    execution_sigma: NotNegative
    """Spread of log work between the executions of one query."""
    harness_limit_s: Positive
    overall_limit_s: Positive
    evaluation_mean_s: Positive
    evaluation_cv: NotNegative
    stuck_rate: Share
    """Share of executions whose evaluation never answers, so that they end at the overall limit."""
    stuck_query_share: Annotated[float, Field(gt=0, le=1)]
    """Share of queries in which those are concentrated."""
    evaluation_failure_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance that one evaluation fails and is run again on the same artifact."""
    infrastructure_failure_rate: Share = 0.0
    """Share of executions that fail before the harness does any work."""
    infrastructure_failure_s: NotNegative = 60.0
    recorded: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Recorded queries, each a list of (harness seconds, evaluation seconds); where given, they replace the lognormal laws."""

    @model_validator(mode="after")
    def _possible(self) -> "ExecutionPart":
        if self.harness_limit_s >= self.overall_limit_s:
            raise ValueError("harness_limit_s: must be below overall_limit_s")
        if self.stuck_rate > self.stuck_query_share:
            raise ValueError("stuck_rate: at most stuck_query_share (a query's executions cannot all be stuck more than once)")
        return self


class EnginePart(Part):
    """How fast harness work proceeds: rate 1/(1 - load_share + load_share * (load/capacity)^load_exponent), 1 at full load."""

    load_share: Annotated[float, Field(ge=0, lt=1)]
    load_exponent: Positive = 1.0
    reroute_s: NotNegative
    """Work lost when a live execution moves to another engine (prefill)."""


class TrainingPart(Part):
    """What one training step costs."""

    node_seconds_per_step: Positive
    group_cv: NotNegative
    """Spread of training work between groups of equal harness work."""
    work_exponent: NotNegative = 0.0
    """A group's training work grows with its harness work to this power (0: independent, 1: tokens grow with time)."""
    micro_steps_per_group: Annotated[int, Field(ge=1)]
    update_s: NotNegative
    drain_s: NotNegative
    lock_step_loss: NotNegative
    """A cell of r ranks works at r / (1 + loss (1 - 1/r)) of one rank's speed."""
    static_packing_factor: Annotated[float, Field(ge=1)]
    """More work per step without streaming."""


class BatchPart(Part):
    groups_per_batch: Annotated[int, Field(ge=1)]
    executions_per_group: Annotated[int, Field(ge=1)]
    supply_fraction: Annotated[float, Field(gt=0, le=1)]
    supply_hold_s: NotNegative


class Workload(Part):
    """One cluster with one workload."""

    name: str
    reading: str = ""
    """Where the numbers come from, and which reading of the source was chosen."""
    cluster: ClusterPart
    execution: ExecutionPart
    engine: EnginePart
    training: TrainingPart
    batch: BatchPart

    def capacity(self, nodes: int) -> int:
        """Concurrent executions of so many nodes in rollout."""
        return round(nodes * self.cluster.concurrency_per_node)


def load_workload(name: str | Path) -> Workload:
    """A shipped workload by name, or a file by path. Raises InputError that names the file and the field."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = WORKLOADS / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        shipped = ", ".join(sorted(file.stem for file in WORKLOADS.glob("*.yaml")))
        raise InputError(f"{name}: no such workload file; shipped ones: {shipped}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {field}: {first['msg'].removeprefix('Value error, ')}") from error


def save_workload(workload: Workload, path: Path) -> None:
    """Write a workload file that `load_workload` reads."""
    path.write_text(yaml.safe_dump(workload.model_dump(mode="json"), sort_keys=False, width=140))
