"""A burst: the executor of the scheduler's actions. It reads the coordinator's feed and gives every entry a task run, in the feed's order.

The coordinator decides and remembers; this flow makes what happens visible and retries what fails. Killed and run again, it finds in the feed
what is not done yet, and attaches to what is still going on: nothing is dispatched twice.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture, wait
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from gyre_lib.config.run_config import load_config
from tasks.connection import coordinator_of, layout_of
from tasks.evaluation import evaluate_execution
from tasks.publication import publish
from tasks.reporting import report_burst
from tasks.rollouts import dispatch, roll_out_group
from tasks.training import train_step
from tasks.transitions import return_to_rollout, switch_to_training

FEED_WAIT_S = 5.0
EVALUATION = "evaluate-"
MAX_FAILURES = 50
EVALUATION_PAUSE_S = 10.0
"""An evaluation that stayed unresolved is tried again after this long, until the execution's overall budget ends."""
Entry = dict[str, Any]


def _name() -> str:
    parameters = flow_run.parameters
    return f"{parameters['run']} burst {parameters['burst']}"


@flow(name="burst", flow_run_name=_name, task_runner=ThreadPoolTaskRunner())
def burst(
    run: Annotated[str, Field(title="Run", description="Name of a run whose services are up.")],
    burst: Annotated[int, Field(ge=0, title="Burst", description="Number of the burst, from 0; an unfinished burst is continued.")],
) -> dict[str, Any]:
    """Carry out one burst: its training steps, the cells' changes of role, its evaluations, and the publication at its end."""
    client = coordinator_of(run)
    client.start_run()
    work = _Work(run, burst)
    for group in client.outstanding_groups():
        work.follow_group(group["group_id"])
    after, life = 0, ""
    over = False
    while not over:
        state = client.state()
        if state["problem"]:
            raise RuntimeError(f"burst {burst} stands still: {state['problem']}")
        # Everything that belongs to a burst is in the feed before the burst counts as over: one more look finds it.
        over = state["burst"] > burst or state["run_done"]
        feed = client.feed(after, timeout_s=0.0 if over else FEED_WAIT_S)
        for entry in feed["entries"]:
            after = max(after, entry["seq"])
            work.start(entry)
        if work.has_failed() or feed["life"] != life:
            # A restarted coordinator numbers its feed anew.
            after, life = 0, feed["life"]
    wait(work.futures)
    if any(future.state.is_failed() for future in work.futures):
        get_run_logger().warning("some task runs failed; their work stays in the feed and the next burst takes it up")
    return report_burst(run, burst)


class _Work:
    """The task runs of one burst."""

    def __init__(self, run: str, burst: int) -> None:
        self._run = run
        self._burst = burst
        config = load_config(layout_of(run).config)
        self._evaluate = evaluate_execution.with_options(retries=config.evaluation.retries, retry_delay_seconds=1.0)
        self._steps_per_burst = config.scheduling.steps_per_burst
        self._groups: set[str] = set()
        # The last task run of each kind: the edges of the graph in the UI.
        self._last: dict[str, PrefectFuture[Any]] = {}
        self.futures: list[PrefectFuture[Any]] = []
        self._started: set[str] = set()
        self._entry_of: dict[UUID, str] = {}
        self._again_at: dict[str, float] = {}
        self._failures = 0
        self._start: dict[str, Callable[[str, Entry], None]] = {
            "Dispatch": self._dispatch,
            "OpenBatch": self._open_batch,
            "ToTraining": self._to_training,
            "ToRollout": self._to_rollout,
            "Update": lambda entry_id, arguments: None,
            "Publish": self._publish,
            "Evaluate": self._evaluate_execution,
            "BurstDone": self._acknowledge,
            "RunDone": self._acknowledge,
        }

    def start(self, entry: Entry) -> None:
        """Submit the entry's task run, unless it has one that goes on. An Update is taken by its step's task run."""
        if entry["entry_id"] not in self._started:
            self._started.add(entry["entry_id"])
            self._start[entry["kind"]](entry["entry_id"], entry["arguments"])

    def has_failed(self) -> bool:
        """Whether a task run has failed since the last call; what it had to do is still in the feed and may be started again.

        Raises RuntimeError when that has happened too often.
        """
        now = time.monotonic()
        for future in [future for future in self.futures if future.state.is_failed()]:
            self.futures.remove(future)
            entry_id = self._entry_of.get(future.task_run_id, "")
            if entry_id.startswith(EVALUATION):
                # An evaluator that fails is the task's trouble, not the burst's.
                self._again_at[entry_id] = now + EVALUATION_PAUSE_S
                continue
            self._failures += 1
            if self._failures > MAX_FAILURES:
                raise RuntimeError(f"{self._failures} task runs of this burst failed; the last: {future.state.message}")
            self._again_at[entry_id] = now
        due = {entry_id for entry_id, at in self._again_at.items() if at <= now}
        for entry_id in due:
            del self._again_at[entry_id]
        self._started -= due
        return bool(due)

    def follow_group(self, group_id: str) -> None:
        if group_id not in self._groups:
            self._groups.add(group_id)
            self._submit(roll_out_group, group_id, self._burst, after=["dispatch"])

    def _submit(self, verb: Any, *arguments: Any, entry_id: str = "", kind: str = "", after: list[str] | None = None) -> None:
        before = [self._last[name] for name in after or [] if name in self._last]
        upstream = [future for future in before if not future.state.is_failed()]
        future = verb.submit(self._run, *arguments, wait_for=upstream)
        self.futures.append(future)
        if entry_id:
            self._entry_of[future.task_run_id] = entry_id
        if kind:
            self._last[kind] = future

    def _dispatch(self, entry_id: str, arguments: Entry) -> None:
        self._submit(
            dispatch, entry_id, len(arguments["groups"]), arguments["version"], entry_id=entry_id, kind="dispatch", after=["publish"]
        )
        for group_id in arguments["groups"]:
            self.follow_group(group_id)

    def _open_batch(self, entry_id: str, arguments: Entry) -> None:
        if arguments["step"] // self._steps_per_burst <= self._burst:
            self._submit(train_step, entry_id, arguments["step"], entry_id=entry_id, kind="step", after=["step"])

    def _to_training(self, entry_id: str, arguments: Entry) -> None:
        self._submit(switch_to_training, entry_id, arguments["cell"], entry_id=entry_id, kind="transition", after=["transition"])

    def _to_rollout(self, entry_id: str, arguments: Entry) -> None:
        self._submit(return_to_rollout, entry_id, arguments["cell"], entry_id=entry_id, kind="return", after=["step", "transition"])

    def _publish(self, entry_id: str, arguments: Entry) -> None:
        self._submit(publish, entry_id, arguments["version"], entry_id=entry_id, kind="publish", after=["step", "return"])

    def _evaluate_execution(self, entry_id: str, arguments: Entry) -> None:
        self._submit(self._evaluate, arguments["execution_id"], entry_id=entry_id)

    def _acknowledge(self, entry_id: str, arguments: Entry) -> None:
        coordinator_of(self._run).perform(entry_id)
