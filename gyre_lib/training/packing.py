"""The packing buffer: ready groups in, micro-steps out, claimed by cells until the batch is done. Pure; time is passed in.

How an execution's ratio stays exact. `s_i` is over all targets of an execution, so they must be known together before any backward:

- rows that fit one microbatch (or are one over-long row) stay in one microbatch;
- rows that fit one microbatch per data-parallel rank stay in one micro-step, whose ranks sum their parts;
- anything longer is *scored* first: forward-only micro-steps, of any packing, on any cell, bring back each execution's log-ratio sum;
  only when it is complete are the rows released for training, each carrying that sum. Weights do not change within a batch, so the
  score is what the training forward sees.

Invariants, after every call:

- every trained row of the batch is in exactly one of: waiting for its score, pooled, queued, claimed by a cell, done on a cell;
- an execution with zero advantage, or without targets, has no rows here, and counts in E;
- a micro-step is claimed by one cell at a time; one that is done counts only as long as the cell that holds its gradients is in;
- `finished` iff all B groups were taken and every trained row is done on a cell that is in.

A lease is a cell's: each claim or done renews it. A silent cell (`expire`) loses everything it did in this batch, done micro-steps
included, because they are in gradients that will not arrive; it gets no more work before the next batch. Giving just the late
micro-step to another cell would count it twice when the first is merely slow.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import RunConfig
from gyre_lib.training.advantages import advantages
from gyre_lib.training.bin_packing import best_fit_decreasing
from gyre_lib.training.micro_steps import Closed, Kind, MicroStep, PlacedRow, Wait
from gyre_lib.training.packing_pool import PackingPool, PoolItem
from gyre_lib.training.row_checks import check_row
from gyre_lib.trajectories.materialisation import TrajectoryRow


@dataclass(frozen=True, slots=True)
class ReadyExecution:
    """An execution with a valid reward."""

    execution_id: str
    reward: float
    rows: list[TrajectoryRow]
    """Its admitted trajectories; empty when nothing of it can be trained."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group all of whose rewards are settled. Without executions it is the placeholder of a lost group: it counts, and trains nothing."""

    group_id: str
    version: int
    """v_d, the published version at dispatch."""
    executions: list[ReadyExecution]


@dataclass(frozen=True, slots=True)
class GroupTaken:
    """What the buffer made of a group."""

    group_id: str
    executions: int
    trained_executions: int
    """Those with a nonzero advantage and targets."""
    trained_tokens: int
    trained_targets: int
    scored_executions: int
    """Those too long for one micro-step."""
    signal: bool
    """False when no advantage is nonzero: fewer than two valid rewards, or all equal."""


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Token budgets in tokens, lease in seconds."""

    row_tokens: int
    data_parallel: int = 1
    lease_s: float = 120.0
    row_limit_tokens: int | None = None
    """Longest row accepted; None: four budgets. A row between budget and limit gets a microbatch of its own."""
    advantage_std: bool = True
    lookahead: int = 16
    """Micro-steps' worth of rows kept pooled; another group is wanted below it."""
    starved_fill: float = 0.5
    """While no group is ready, a micro-step filled at least so far is given out rather than left waiting."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "PackingSettings":
        """The settings of a run; no row that a rollout can make is over the limit."""
        training = config.training
        return cls(
            row_tokens=training.row_tokens,
            data_parallel=config.cells.data_parallel,
            lease_s=training.lease_s,
            row_limit_tokens=max(4 * training.row_tokens, config.rollout.max_context_tokens),
            advantage_std=training.advantage_std,
            lookahead=training.lookahead,
        )

    @property
    def limit(self) -> int:
        return self.row_limit_tokens or 4 * self.row_tokens


def oldest_first(groups: Iterable[ReadyGroup]) -> list[ReadyGroup]:
    """The order in which ready groups are to be taken: oldest dispatch version first, then by id."""
    return sorted(groups, key=lambda group: (group.version, group.group_id))


@dataclass
class _Scoring:
    """An execution whose log-ratio sum is being collected."""

    rows: list[PlacedRow]
    targets: int
    counted: int = 0
    log_ratio_sum: float = 0.0


class PackingBuffer:
    """One batch at a time: open_batch, then add_group and claim in any order until `finished`."""

    def __init__(self, settings: PackingSettings):
        self.settings = settings
        self._serial = 0
        self._reset(step=-1, groups=0)

    def _reset(self, step: int, groups: int) -> None:
        self.step, self.groups = step, groups
        self.taken: list[GroupTaken] = []
        self._train = PackingPool(self.settings.row_tokens)
        self._score = PackingPool(self.settings.row_tokens)
        self._spread: deque[list[list[PlacedRow]]] = deque()
        self._queue: deque[MicroStep] = deque()
        self._scoring: dict[str, _Scoring] = {}
        self._issued: dict[str, MicroStep] = {}
        self._claimed: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._contact: dict[int, float] = {}
        self._out: set[int] = set()

    # --- filling -----------------------------------------------------------------------------------------------------------------

    def open_batch(self, step: int, groups: int) -> None:
        """Begin the batch of `step`, of `groups` groups. Raises RuntimeError while another batch is unfinished."""
        if self.step >= 0 and not self.finished:
            raise RuntimeError(f"batch {step} opened while batch {self.step} is unfinished")
        self._reset(step, groups)

    def abandon(self) -> None:
        """Forget the current batch: the core restarts and the batch will be opened and filled anew."""
        self._reset(step=-1, groups=0)

    def want_group(self) -> bool:
        """Whether another ready group should be taken now: the batch is not full and buffered rows run low."""
        room = self.settings.row_tokens * self.settings.data_parallel * self.settings.lookahead
        return not self.closed and self._buffered_tokens() < room

    def add_group(self, group: ReadyGroup) -> GroupTaken:
        """Take a group into the batch. Raises InputError, and takes nothing, for a row that cannot be trained; it names the row."""
        if self.closed:
            raise RuntimeError(f"batch {self.step} holds its {self.groups} groups already; {group.group_id} refused")
        if any(taken.group_id == group.group_id for taken in self.taken):
            raise RuntimeError(f"group {group.group_id} is in batch {self.step} already")
        for execution in group.executions:
            if not math.isfinite(execution.reward):
                raise InputError(f"execution {execution.execution_id}: reward {execution.reward} is not a number")
            for row in execution.rows:
                check_row(row, execution.execution_id, group.group_id, self.settings.limit)
        values = advantages([execution.reward for execution in group.executions], self.settings.advantage_std)
        trained = tokens = targets = scored = 0
        for execution, advantage in zip(group.executions, values, strict=True):
            rows = [row for row in execution.rows if row.targets.any()]
            if advantage == 0.0 or not rows:
                continue
            total = sum(int(row.targets.sum()) for row in rows)
            scored += self._place([PlacedRow(row, advantage, total) for row in rows], total)
            trained, targets = trained + 1, targets + total
            tokens += sum(len(row.token_ids) for row in rows)
        taken = GroupTaken(group.group_id, len(values), trained, tokens, targets, scored, any(values))
        self.taken.append(taken)
        return taken

    def _place(self, rows: list[PlacedRow], targets: int) -> bool:
        """Route one execution's rows; True when it has to be scored first."""
        lengths = [len(placed.row.token_ids) for placed in rows]
        bins = best_fit_decreasing(lengths, self.settings.row_tokens)
        if len(bins) == 1:
            self._train.add(PoolItem(tuple(rows), sum(lengths)))
            return False
        if len(bins) <= self.settings.data_parallel:
            self._spread.append([[rows[number] for number in numbers] for numbers in bins])
            return False
        self._scoring[rows[0].row.execution_id] = _Scoring(rows, targets)
        for placed, length in zip(rows, lengths, strict=True):
            self._score.add(PoolItem((placed,), length))
        return True

    # --- claiming ----------------------------------------------------------------------------------------------------------------

    def claim(self, cell: int, now: float) -> MicroStep | Wait | Closed:
        """Work for `cell`, which renews its lease; see Wait and Closed for the other answers."""
        if self.step < 0 or cell in self._out or self.finished:
            return Closed(self.executions)
        self._contact[cell] = now
        if not self._queue:
            self._fill_queue()
        if self._queue:
            micro_step = self._queue.popleft()
            self._claimed[micro_step.micro_step_id] = cell
            return micro_step
        if self.closed and not self._scoring and cell in self._claimed.values():
            return Closed(self.executions)
        return Wait()

    def done(self, micro_step_id: str, cell: int, now: float, stats: Mapping[str, Any] | None = None) -> bool:
        """`cell` has accumulated this micro-step. False, and no effect, when the cell does not hold it (any more).

        Raises InputError when a scoring micro-step comes back without the scores of its executions.
        """
        if self._claimed.get(micro_step_id) != cell:
            return False
        micro_step = self._issued[micro_step_id]
        if micro_step.kind == "score":
            self._take_scores(micro_step, (stats or {}).get("scores", {}))
        self._contact[cell] = now
        del self._claimed[micro_step_id]
        self._done[micro_step_id] = cell
        return True

    def hand_back(self, cell: int) -> list[str]:
        """`cell` has left the batch: all it claimed and all it trained returns to the queue (scores stay: they are not gradients)."""
        self._out.add(cell)
        self._contact.pop(cell, None)
        lost = [ms for ms, owner in self._claimed.items() if owner == cell]
        lost += [ms for ms, owner in self._done.items() if owner == cell and self._issued[ms].kind == "train"]
        for micro_step_id in lost:
            self._claimed.pop(micro_step_id, None)
            self._done.pop(micro_step_id, None)
            self._queue.appendleft(self._issued[micro_step_id])
        return lost

    def readmit(self, cell: int) -> None:
        """New ranks of a cell that had left begin with this batch again (a restarted core)."""
        self._out.discard(cell)

    def expire(self, now: float) -> list[int]:
        """Hand back for every cell that holds work and has been silent longer than the lease; returns those cells.

        The caller must take them out of the collective prefix.
        """
        holding = set(self._claimed.values())
        silent = [cell for cell in holding if now - self._contact[cell] > self.settings.lease_s]
        for cell in sorted(silent):
            self.hand_back(cell)
        return sorted(silent)

    # --- state -------------------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """All B groups are in: no new rows will come."""
        return len(self.taken) == self.groups

    @property
    def finished(self) -> bool:
        """The stream is closed and all its work is done on cells that are in."""
        pooled = self._train.items or self._score.items or self._spread or self._queue
        return self.step >= 0 and self.closed and not pooled and not self._claimed and not self._scoring

    @property
    def executions(self) -> int:
        """E so far: executions with a valid reward in the groups taken."""
        return sum(taken.executions for taken in self.taken)

    def progress(self) -> dict[str, int]:
        """Counts for people: groups taken, micro-steps queued, claimed and done, rows still pooled."""
        pooled = len(self._train.items) + len(self._score.items) + len(self._spread)
        counts = {"groups": len(self.taken), "of": self.groups, "pooled": pooled, "queued": len(self._queue)}
        return counts | {"claimed": len(self._claimed), "done": len(self._done)}

    # --- packing -----------------------------------------------------------------------------------------------------------------

    def _buffered_tokens(self) -> int:
        spread = sum(len(placed.row.token_ids) for bins in self._spread for rows in bins for placed in rows)
        return self._train.tokens + self._score.tokens + spread + sum(micro_step.tokens for micro_step in self._queue)

    def _fill_queue(self) -> None:
        """Queue at least one micro-step if there is one to give: from the fuller pool, as it packs better, or, once the batch is closed,
        scores first, as training rows wait for them."""
        whole = self.settings.row_tokens * self.settings.data_parallel
        enough = math.ceil(whole * self.settings.starved_fill) if self.want_group() else 1
        if self._score.tokens >= enough and (self.closed or self._score.tokens >= self._train.tokens):
            self._queue_bins("score", self._score.take(self.settings.data_parallel))
        elif self._spread:
            self._queue_spread(self._spread.popleft())
        elif self._train.tokens >= enough:
            bins = self._train.take_all() if self.closed and not self._scoring else self._train.take(self.settings.data_parallel)
            for start in range(0, len(bins), self.settings.data_parallel):
                self._queue_bins("train", bins[start : start + self.settings.data_parallel])

    def _queue_spread(self, bins: list[list[PlacedRow]]) -> None:
        """A micro-step for an execution that needs several of its microbatches, their free space and the others filled from the pool."""
        room = tuple(max(0, self.settings.row_tokens - sum(len(placed.row.token_ids) for placed in rows)) for rows in bins)
        filled = self._train.take(self.settings.data_parallel - len(bins), room)
        for rows, items in zip(bins, filled, strict=False):
            items.append(PoolItem(tuple(rows), 0))
        self._queue_bins("train", filled)

    def _queue_bins(self, kind: Kind, bins: list[list[PoolItem]]) -> None:
        microbatches = [tuple(placed for item in items for placed in item.rows) for items in bins]
        microbatches += [()] * (self.settings.data_parallel - len(microbatches))
        micro_step = MicroStep(f"{self.step}-{self._serial}", self.step, kind, tuple(microbatches))
        self._serial += 1
        self._issued[micro_step.micro_step_id] = micro_step
        self._queue.append(micro_step)

    def _take_scores(self, micro_step: MicroStep, scores: Mapping[str, tuple[float, int]]) -> None:
        wanted = {placed.row.execution_id for rows in micro_step.microbatches for placed in rows}
        if set(scores) != wanted:
            raise InputError(f"micro-step {micro_step.micro_step_id}: scores of {sorted(scores)}, expected {sorted(wanted)}")
        for execution_id, (log_ratio_sum, count) in scores.items():
            scoring = self._scoring[execution_id]
            scoring.log_ratio_sum += log_ratio_sum
            scoring.counted += count
            if scoring.counted == scoring.targets:
                del self._scoring[execution_id]
                for placed in scoring.rows:
                    released = replace(placed, log_ratio_sum=scoring.log_ratio_sum)
                    self._train.add(PoolItem((released,), len(placed.row.token_ids)))
