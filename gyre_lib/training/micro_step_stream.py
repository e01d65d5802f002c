"""One cell's stream of micro-steps: its first rank claims them, every rank of the cell sees the same sequence and the same stops.

The stream's state is one record that only the leader writes: how many micro-steps there are, after which ones the pipeline is to drain,
and whether the stream has ended. A micro-step's content is written before the state that counts it, so any rank that reads the state can
read the content. Ranks need no barrier: they only eventually see the same state, and act on it in the same order (`pipeline`).
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gyre_lib.training.micro_steps import Closed, MicroStep, MicroStepSource, from_arrow, to_arrow
from gyre_lib.training.rank_layout import RankLayout


class StreamFailed(RuntimeError):
    """The cell's leader could not go on; its reason is the text."""


@dataclass(frozen=True)
class StreamState:
    """`count` micro-steps so far; `drains` are the counts at which the pipeline finishes all backwards before going on."""

    count: int = 0
    drains: tuple[int, ...] = ()
    ended: bool = False
    executions: int = 0
    """E, once ended."""
    failed: str = ""


class MicroStepStream:
    """This rank's end of the stream. `store` is shared by all ranks and names are prefixed by the caller.

    Only the leader has a source. A micro-step is reported done when every rank of the cell is through with it.
    """

    def __init__(self, layout: RankLayout, store: dist.Store, source: MicroStepSource | None, wait_limit_s: float):
        self.layout, self.store, self.source = layout, store, source
        self.alone = layout.ranks_per_cell == 1
        self.state = StreamState()
        self._content: dict[int, MicroStep] = {}
        self._unfinished: dict[int, float] = {}
        self._next_claim_s = 0.0
        if layout.is_leader != (source is not None):
            raise ValueError(f"cell {layout.cell}, shard {layout.shard}: the cell's first rank, and no other, needs a source")
        if layout.is_leader:
            self._write_state(self.state)
        else:
            store.wait(["state"], timedelta(seconds=wait_limit_s))

    # --- every rank --------------------------------------------------------------------------------------------------------------

    def poll(self, position: int) -> StreamState:
        """The state now; the leader claims another micro-step when this rank has begun all there are. Raises StreamFailed."""
        if self.source is not None:
            try:
                self._report_finished(self.source)
                self._claim(self.source, position)
            except Exception as error:
                self._write_state(StreamState(**{**asdict(self.state), "failed": f"{type(error).__name__}: {error}"}))
                raise
        else:
            record = json.loads(self.store.get("state"))
            self.state = StreamState(**{**record, "drains": tuple(record["drains"])})
            if self.state.failed:
                raise StreamFailed(f"cell {self.layout.cell}: its leader failed: {self.state.failed}")
        return self.state

    def get(self, number: int) -> MicroStep:
        """Micro-step `number` < count."""
        if number not in self._content:
            self._content[number] = from_arrow(self.store.get(f"content/{number}"))
        return self._content[number]

    def finished(self, number: int, scores: Mapping[str, tuple[float, int]] | None = None) -> None:
        """This rank is through with a micro-step: its backward pass, or the forward pass of a scoring one, whose `scores` for its copy
        the last stage has."""
        if not self.layout.is_leader:
            self._content.pop(number, None)
        if scores is not None and self.layout.tensor_rank == 0:
            self.store.set(f"scores/{number}/{self.layout.data_rank}", json.dumps(scores))
        self.store.add(f"finished/{number}", 1)

    # --- the leader --------------------------------------------------------------------------------------------------------------

    def _claim(self, source: MicroStepSource, position: int) -> None:
        count = self.state.count
        draining = bool(self._unfinished) and count in self.state.drains
        if self.state.ended or position < count or draining or time.monotonic() < self._next_claim_s:
            return
        answer = source.claim()
        if isinstance(answer, MicroStep):
            self._content[count] = answer
            self._unfinished[count] = time.monotonic()
            if not self.alone:
                self.store.set(f"content/{count}", to_arrow(answer))  # type: ignore[arg-type]
            self._write_state(StreamState(count + 1, self.state.drains))
        elif isinstance(answer, Closed) and self._unfinished:
            self._write_state(StreamState(count, (*self.state.drains, count)))
        elif isinstance(answer, Closed):
            self._write_state(StreamState(count, self.state.drains, ended=True, executions=answer.executions))
        else:
            self._next_claim_s = time.monotonic() + answer.after_s

    def _report_finished(self, source: MicroStepSource) -> None:
        """Tell the source what every rank is through with, and free it: all have read it by then."""
        for number, begun_s in list(self._unfinished.items()):
            if self.store.add(f"finished/{number}", 0) < self.layout.ranks_per_cell:
                continue
            micro_step, used = self._content[number], [f"finished/{number}"]
            stats: dict[str, Any] = {}
            if micro_step.kind == "score":
                keys = [f"scores/{number}/{rank}" for rank in range(self.layout.dp)]
                stats["scores"] = _added([json.loads(self.store.get(key)) for key in keys])
                used += keys
            if not self.alone:
                used.append(f"content/{number}")
            source.done(micro_step, stats | {"forward_backward_s": time.monotonic() - begun_s} | micro_step.sizes())
            del self._unfinished[number], self._content[number]
            for key in used:
                self.store.delete_key(key)

    def _write_state(self, state: StreamState) -> None:
        self.state = state
        if not self.alone:
            self.store.set("state", json.dumps(asdict(state)))


def _added(parts: list[dict[str, list]]) -> dict[str, tuple[float, int]]:
    total: dict[str, tuple[float, int]] = {}
    for part in parts:
        for execution, (log_ratio_sum, count) in part.items():
            before = total.get(execution, (0.0, 0))
            total[execution] = (before[0] + log_ratio_sum, before[1] + count)
    return total
