"""One execution: a fresh workspace, the harness in a sandbox over it within its budget, and the preserved artifact.

Scoring is not done here (`evaluation/`). Whatever ends the harness, the work it left behind is preserved; only a failure of sandbox,
environment, model endpoint or artifact copy is an infrastructure failure.
"""

import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.artifacts import preserve
from gyre_lib.rollout.harnesses.choice import harness_named
from gyre_lib.rollout.harnesses.protocol import INSTRUCTION_INSIDE, Harness, HarnessSettings
from gyre_lib.rollout.outcomes import Cancelled, Completed, HarnessTimeout, InfrastructureFailed, Outcome, OverallTimeout
from gyre_lib.rollout.sandboxes.choice import sandbox_named
from gyre_lib.rollout.sandboxes.protocol import Sandbox, SandboxCommand, SandboxExit, SandboxUnavailable
from gyre_lib.rollout.tasks import Task, load_task


@dataclass(frozen=True)
class LaunchOrder:
    """Everything a worker needs to run one execution; plain values, so that it travels as JSON."""

    execution_id: str
    group_id: str
    task_path: str
    token: str
    """The execution's key at the proxy."""
    proxy_socket: str
    task_format: str = "harbor"
    harness: str = "builtin"
    sandbox: str = "bubblewrap"
    harness_budget_s: float = 120.0
    overall_budget_s: float = 300.0
    max_turns: int = 8
    max_output_tokens: int = 256
    max_context_tokens: int = 2048
    temperature: float = 1.0
    model_name: str = "policy"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LaunchOrder":
        """Raises InputError naming an unknown or missing field."""
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"launch order: {error}") from error


@dataclass(frozen=True)
class ExecutionResult:
    """How it ended and what it left."""

    outcome: Outcome
    artifact_ref: str | None
    """The artifact's folder, if something was preserved."""
    artifact_digest: str
    """sha256 of its content; empty without an artifact."""
    started_s: float
    ended_s: float
    """Unix times."""

    @property
    def detail(self) -> str:
        return self.outcome.detail


def run_execution(order: LaunchOrder, work_dir: Path, artifact_dir: Path, cancelled: threading.Event) -> ExecutionResult:
    """Run it to its end. `work_dir` is scratch space (emptied first, removed afterwards but for harness.log); `artifact_dir` is the
    folder that the artifact becomes (replaced if it exists). Raises InputError for a harness, sandbox or task that does not exist."""
    task = load_task(Path(order.task_path), order.task_format)
    harness, sandbox = harness_named(order.harness), sandbox_named(order.sandbox)
    harness.check()
    started = time.time()
    workspace = work_dir / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    digest = ""
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        image = sandbox.image_of(task)
        sandbox.prepare(task, image, workspace)
        outcome = _run_harness(order, task, harness, sandbox, image, work_dir, cancelled)
        if not isinstance(outcome, Cancelled):
            digest = preserve(workspace, artifact_dir).digest
        if time.time() - started > order.overall_budget_s and isinstance(outcome, Completed | HarnessTimeout):
            outcome = OverallTimeout(f"after {time.time() - started:.0f} s, before any evaluation")
    except (OSError, SandboxUnavailable) as error:
        outcome = InfrastructureFailed(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return ExecutionResult(outcome, str(artifact_dir) if digest else None, digest, started, time.time())


def _run_harness(
    order: LaunchOrder, task: Task, harness: Harness, sandbox: Sandbox, image: str, work_dir: Path, cancelled: threading.Event
) -> Outcome:
    if cancelled.is_set():
        return Cancelled("before the start")
    socket = Path(order.proxy_socket)
    if not socket.is_socket():
        raise SandboxUnavailable(f"{socket}: the proxy's socket is not there")
    instruction = work_dir / "instruction.md"
    instruction.write_text(task.instruction + "\n")
    budget = min(order.harness_budget_s, order.overall_budget_s)
    launch = harness.command(
        HarnessSettings(order.token, order.model_name, order.max_turns, order.max_output_tokens, order.max_context_tokens, budget),
        task.instruction,
    )
    command = SandboxCommand(
        argv=launch.argv,
        workspace=work_dir / "workspace",
        output=work_dir / "harness.log",
        workdir=task.workdir,
        env=launch.env,
        read_only={**launch.read_only, INSTRUCTION_INSIDE: instruction},
        proxy_socket=socket,
        image=image,
    )
    return _outcome(sandbox.run(command, budget, cancelled), harness, command.output, budget)


def _outcome(end: SandboxExit, harness: Harness, output: Path, budget_s: float) -> Outcome:
    if end.kind == "cancelled":
        return Cancelled("stopped by the run")
    if end.kind == "timeout":
        return HarnessTimeout(f"after {budget_s:g} s")
    report = harness.read_end(end.code, output)
    if report.endpoint_failed:
        return InfrastructureFailed(report.detail)
    return Completed(report.detail)
