"""The trajectory buffer: what is known of every execution, by group, and when a group's rewards are settled. Pure; the coordinator owns it.

Life of an execution: queued -> launched -> claimed (a worker runs it) -> ended -> settled. Each step is taken once; a repeat is refused by
returning False, so that a retried message counts nothing twice.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Stage = Literal["queued", "launched", "claimed", "ended", "settled"]
_ORDER: dict[str, int] = {"queued": 0, "launched": 1, "claimed": 2, "ended": 3, "settled": 4}

PLACEHOLDER = "placeholder"
"""Validity of an execution that left nothing to assess: zero reward, no trainable token, no part in its group's baseline."""


@dataclass
class Execution:
    execution_id: str
    group_id: str
    task_path: str
    task_id: str
    dispatch_version: int
    train: bool = True
    stage: Stage = "queued"
    worker_id: str = ""
    outcome: str = ""
    outcome_detail: str = ""
    artifact_ref: str = ""
    score: float | None = None
    validity: str = ""
    dispatched_s: float = 0.0
    launched_s: float = 0.0
    claimed_s: float = 0.0
    ended_s: float = 0.0
    settled_s: float = 0.0
    deadline_s: float = 0.0
    """Unix time at which the overall budget ends."""
    requests: int = 0
    output_tokens: int = 0
    evaluation_attempts: int = 0

    def reached(self, stage: Stage) -> bool:
        return _ORDER[self.stage] >= _ORDER[stage]

    @property
    def valid(self) -> bool:
        return self.validity == "valid" and self.score is not None


@dataclass
class Group:
    group_id: str
    task_path: str
    task_id: str
    dispatch_version: int
    executions: list[str] = field(default_factory=list)
    keep: int = 0
    """N: with oversampling, the first N valid executions count and the rest is surplus."""
    status: Literal["rolling", "ready", "lost", "assigned", "consumed", "requeued"] = "rolling"
    step: int | None = None
    dispatched_s: float = 0.0
    ready_s: float = 0.0


class TrajectoryBuffer:
    """Executions and rewards by group."""

    def __init__(self) -> None:
        self.executions: dict[str, Execution] = {}
        self.groups: dict[str, Group] = {}

    def dispatch(self, group: Group, executions: list[Execution]) -> bool:
        if group.group_id in self.groups:
            return False
        group.executions = [execution.execution_id for execution in executions]
        self.groups[group.group_id] = group
        for execution in executions:
            self.executions[execution.execution_id] = execution
        return True

    def add_benchmark_execution(self, execution: Execution) -> None:
        """An execution of evaluate-policy: it belongs to no group and never enters training."""
        execution.train = False
        self.executions[execution.execution_id] = execution

    def launch(self, execution_id: str, now: float) -> bool:
        execution = self.executions[execution_id]
        if execution.reached("launched"):
            return False
        execution.stage, execution.launched_s = "launched", now
        return True

    def claim(self, execution_id: str, worker_id: str, now: float, overall_budget_s: float) -> bool:
        """A worker runs it from now on, and its overall budget begins: waiting for a worker's slot is not the execution's time."""
        execution = self.executions[execution_id]
        if execution.reached("claimed"):
            return False
        execution.stage, execution.worker_id = "claimed", worker_id
        execution.claimed_s, execution.deadline_s = now, now + overall_budget_s
        return True

    def end(self, execution_id: str, now: float, outcome: str, detail: str, artifact_ref: str) -> bool:
        execution = self.executions[execution_id]
        if execution.reached("ended"):
            return False
        execution.stage, execution.ended_s = "ended", now
        execution.outcome, execution.outcome_detail, execution.artifact_ref = outcome, detail, artifact_ref
        return True

    def settle(self, execution_id: str, now: float, score: float | None, validity: str, outcome: str | None = None) -> bool:
        """Fix the execution's reward (or that it has none). `outcome` replaces the harness's where the evaluation decides it."""
        execution = self.executions[execution_id]
        if execution.reached("settled"):
            return False
        execution.stage, execution.settled_s = "settled", now
        execution.score, execution.validity = score, validity
        execution.outcome = outcome or execution.outcome
        return True

    def surplus(self, group_id: str) -> list[str]:
        """Executions that oversampling no longer needs, because N valid ones are there."""
        members = [self.executions[e] for e in self.groups[group_id].executions]
        if sum(member.valid for member in members) < self.groups[group_id].keep:
            return []
        return [member.execution_id for member in members if not member.reached("ended")]

    def settled_group(self, group_id: str, now: float) -> Literal["ready", "lost"] | None:
        """Once all rewards are settled: ready with two or more valid rewards, else lost. None before, and on a repeat."""
        group = self.groups[group_id]
        members = [self.executions[e] for e in group.executions]
        if group.status != "rolling" or not all(member.reached("settled") for member in members):
            return None
        group.status = "ready" if self.training_executions(group_id) else "lost"
        group.ready_s = now
        return group.status

    def training_executions(self, group_id: str) -> list[Execution]:
        """The executions that train: a single valid reward has no baseline, so it takes two."""
        valid = self.valid_executions(group_id)
        return valid if len(valid) >= 2 else []

    def valid_executions(self, group_id: str) -> list[Execution]:
        """Executions with a valid reward, the first N of them by settlement."""
        group = self.groups[group_id]
        valid = [self.executions[e] for e in group.executions if self.executions[e].valid]
        return sorted(valid, key=lambda e: (e.settled_s, e.execution_id))[: group.keep]

    def ready_groups(self) -> list[Group]:
        """Ready, unassigned groups, oldest policy version first."""
        ready = [group for group in self.groups.values() if group.status == "ready"]
        return sorted(ready, key=lambda group: (group.dispatch_version, group.ready_s, group.group_id))

    def outstanding_groups(self) -> list[Group]:
        return [group for group in self.groups.values() if group.status == "rolling"]

    def summary(self, group_id: str) -> dict[str, Any]:
        group = self.groups[group_id]
        members = [self.executions[e] for e in group.executions]
        stages = [member.stage for member in members]
        return {
            **asdict(group),
            "settled": stages.count("settled"),
            "running": stages.count("launched") + stages.count("claimed"),
            "scores": [member.score for member in members if member.valid],
        }
