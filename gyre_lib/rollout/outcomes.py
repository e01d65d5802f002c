"""How an execution ended: one explicit type for each way. Only `InfrastructureFailed` and `Cancelled` may leave nothing to assess."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Completed:
    """The harness ended by itself, whatever its exit code; its work is scored and trained."""

    detail: str = ""


@dataclass(frozen=True)
class HarnessTimeout:
    """The harness budget ran out; the work left behind is scored and trained."""

    detail: str = ""


@dataclass(frozen=True)
class OverallTimeout:
    """The overall budget ran out without a valid score; discarded from training."""

    detail: str = ""


@dataclass(frozen=True)
class InfrastructureFailed:
    """Sandbox, environment copy, model endpoint or artifact copy failed: no reward, never a zero; the artifact is kept if there is one."""

    detail: str


@dataclass(frozen=True)
class Cancelled:
    """Stopped from outside (surplus of oversampling, a closed run)."""

    reason: str

    @property
    def detail(self) -> str:
        return self.reason


Outcome = Completed | HarnessTimeout | OverallTimeout | InfrastructureFailed | Cancelled
OUTCOMES: dict[str, type[Outcome]] = {
    kind.__name__: kind for kind in (Completed, HarnessTimeout, OverallTimeout, InfrastructureFailed, Cancelled)
}


def outcome_name(outcome: Outcome) -> str:
    """The name under which tables and JSON hold it; `OUTCOMES` leads back."""
    return type(outcome).__name__
