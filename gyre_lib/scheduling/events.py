"""What the scheduler is told (events) and what it orders (actions).

Every one is a frozen dataclass of plain values, so that the journal, the live coordinator and the simulator speak the same words.
Cells are numbered 0..K-1 (0 is the core). Ids: groups `g00001`, executions `g00001-03`, in order of dispatch.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run begins: the queue is filled to its target depth with version 0."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engines of a cell (or, with cell -1, the standalone pool) serve the published version."""

    cell: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engines of a cell (or of the standalone pool, -1) died; no capacity until EngineReady."""

    cell: int


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """A launched execution terminated, whatever the outcome; counted exactly once, a repeat is ignored."""

    execution: str


@dataclass(frozen=True, slots=True)
class GroupReady:
    """All rewards of a group are settled and it has a training signal or at least valid rewards."""

    group: str


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A group has ended without anything to train on. It still counts once: as an empty placeholder, or re-queued under a new id."""

    group: str


@dataclass(frozen=True, slots=True)
class GroupAssigned:
    """The packing buffer took a ready group into the current batch."""

    group: str


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The stream of this step is closed and every micro-step of it has been processed: the joining window may close."""

    step: int


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """The optimizer update of this step is complete (nonfinal: the new parameters are on every cell of the prefix)."""

    step: int


@dataclass(frozen=True, slots=True)
class InTraining:
    """A cell finished its transition to training: its routes have moved, its weights are the core's."""

    cell: int


@dataclass(frozen=True, slots=True)
class InRollout:
    """A cell finished its transition to rollout: its engines are restored and prove health."""

    cell: int


@dataclass(frozen=True, slots=True)
class TransitionFailed:
    """A cell could not join training; it is on its way back to rollout (InRollout follows)."""

    cell: int


@dataclass(frozen=True, slots=True)
class SatelliteLost:
    """A training satellite's ranks died in mid-batch. Its leases return; it leaves the prefix with every later cell."""

    cell: int


@dataclass(frozen=True, slots=True)
class Published:
    """Every serving engine now serves this version."""

    version: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that SetTimer asked for has run out; stale tokens are ignored."""

    token: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Enter groups into the queue; `executions` holds each group's execution ids. `version` is the latest published one (v_d)."""

    groups: tuple[str, ...]
    executions: tuple[tuple[str, ...], ...]
    version: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Create harness and sandbox of these executions now."""

    executions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelExecutions:
    """Surplus executions of oversampling: stop those that run, never launch those queued. Each still ends once."""

    executions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired(token) after this many seconds."""

    token: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """The batch of this step becomes current: the packing buffer may take ready groups (streaming) or waits for B of them."""

    step: int


@dataclass(frozen=True, slots=True)
class ToTraining:
    """Move a cell to training. Destinations of its executions, best first: -1 the standalone pool, else cells in descending order.

    With `spread` they go to whichever destination is least loaded, instead of filling the first before the second.
    """

    cell: int
    destinations: tuple[int, ...]
    spread: bool = False


@dataclass(frozen=True, slots=True)
class ToRollout:
    """Move a cell back to rollout and restore its engines (they load the published weights before they serve)."""

    cell: int


@dataclass(frozen=True, slots=True)
class Update:
    """Joining is closed: reduce gradients over cells 0..cells-1, normalise, clip, one optimizer step; if not final, broadcast to them."""

    step: int
    cells: int
    final: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the core's weights, as this version, to every engine."""

    version: int


@dataclass(frozen=True, slots=True)
class BurstDone:
    """The burst's weights are published and its accounting is complete."""

    burst: int


@dataclass(frozen=True, slots=True)
class RunDone:
    """The last burst is done."""


Event = (
    RunStarted
    | EngineReady
    | EngineLost
    | ExecutionEnded
    | GroupReady
    | GroupLost
    | GroupAssigned
    | BatchTrained
    | UpdateDone
    | InTraining
    | InRollout
    | TransitionFailed
    | SatelliteLost
    | Published
    | TimerFired
)
Action = Dispatch | Launch | CancelExecutions | SetTimer | OpenBatch | ToTraining | ToRollout | Update | Publish | BurstDone | RunDone

_BY_NAME = {kind.__name__: kind for kind in (*Event.__args__, *Action.__args__)}


def to_json(item: Event | Action) -> dict[str, Any]:
    """As a JSON object whose `kind` names the class."""
    return {"kind": type(item).__name__, **asdict(item)}


def from_json(data: dict[str, Any]) -> Event | Action:
    """The inverse of to_json; lists become tuples again. A field that an older journal lacks has its default.

    Raises KeyError for an unknown kind, TypeError for a field that must be there.
    """
    kind = _BY_NAME[data["kind"]]
    return kind(**{field.name: _tuples(data[field.name]) for field in fields(kind) if field.name in data})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
