"""Training cells of one machine, driven from this process without a coordinator: for tests and benchmarks of the trainer.

Each rank is a forked process with a CellTrainer and a pipe. The driver holds the packing buffer and answers claims, so that cells are
real processes that share one queue; satellites join when told, pull the core's weights, and can be killed.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from gyre_lib.config.run_config import ModelConfig, TrainingConfig
from gyre_lib.training import checkpoint
from gyre_lib.training.cell_trainer import CellTrainer, UpdateReport
from gyre_lib.training.local_ranks import LocalRanks
from gyre_lib.training.micro_steps import Closed, MicroStep, Wait, from_arrow, to_arrow
from gyre_lib.training.packing import PackingBuffer, ReadyGroup
from gyre_lib.training.pipeline import StreamReport
from gyre_lib.training.rank_layout import RankLayout


class RankFailed(RuntimeError):
    """A rank answered a command with an error."""


class PipeSource:
    """MicroStepSource over a pipe to the driver."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def claim(self) -> MicroStep | Wait | Closed:
        self.pipe.send(("claim", None))
        answer = self.pipe.recv()
        return from_arrow(answer) if isinstance(answer, bytes) else answer

    def done(self, micro_step: MicroStep, stats: Mapping[str, Any]) -> None:
        self.pipe.send(("done", (micro_step.micro_step_id, dict(stats))))


class RankCommands:
    """What a rank process can be told; each method is a command."""

    def __init__(self, trainer: CellTrainer, pipe: Connection):
        self.trainer, self.source = trainer, PipeSource(pipe)

    def train(self, step: int) -> StreamReport:
        self.trainer.begin_batch(step)
        return self.trainer.train_stream(self.source if self.trainer.layout.is_leader else None)

    def update(self, cells: int, final: bool) -> UpdateReport | None:
        return self.trainer.reduce_and_update(cells, final)

    def drop(self) -> None:
        self.trainer.drop_gradients()

    def read_slab(self) -> Any:
        return self.trainer.weight_slab.clone().numpy()

    def write_slab(self, values: Any) -> None:
        self.trainer.weight_slab.copy_(torch.from_numpy(values))

    def weights(self) -> dict[str, Any]:
        return {name: tensor.clone().numpy() for name, tensor in self.trainer.hf_weights()}

    def gradients(self) -> dict[str, Any]:
        """Of the last update, after normalisation and clip, under Hugging Face names."""
        return {name: tensor.clone().numpy() for name, tensor in self.trainer.last_gradients()}

    def export(self, folder: str) -> None:
        """Write a model folder that an engine can load."""
        weights = self.trainer.hf_weights()
        if self.trainer.layout.is_leader:
            checkpoint.write_tensors(Path(folder), weights)
            checkpoint.copy_model_files(self.trainer.model_dir, Path(folder))
        else:
            deque(weights, maxlen=0)

    def save(self, directory: str, journal_position: dict[str, Any]) -> None:
        self.trainer.save_checkpoint(directory, journal_position)

    def load(self, directory: str) -> dict[str, Any]:
        return self.trainer.load_checkpoint(directory)


def _rank(rank: int, pipes: list[Connection], sizes: dict[str, int], model_dir: Path, model: ModelConfig, training: TrainingConfig) -> None:
    n = sizes["tp"] * sizes["pp"] * sizes["dp"]
    layout = RankLayout(cell=rank // n, cells=len(pipes) // n, shard=rank % n, **sizes)
    pipe = pipes[rank]
    for other in pipes:
        if other is not pipe:
            other.close()
    try:
        commands = RankCommands(CellTrainer(model_dir, model, training, layout), pipe)
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    pipe.send(("reply", None))
    while True:
        name, arguments = pipe.recv()
        if name == "stop":
            return
        try:
            pipe.send(("reply", getattr(commands, name)(*arguments)))
        except Exception as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


class LocalCells:
    """`cells` cells of tp * pp * dp rank processes each. Use as a context manager."""

    def __init__(
        self,
        model_dir: Path,
        buffer: PackingBuffer,
        training: TrainingConfig,
        cells: int = 1,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        model: ModelConfig | None = None,
    ):
        self.buffer, self.cells, self.n = buffer, cells, tp * pp * dp
        pairs = [Pipe() for _ in range(cells * self.n)]
        self.pipes = [ours for ours, _ in pairs]
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
        theirs = [theirs for _, theirs in pairs]
        self.ranks = LocalRanks(len(pairs), _rank, theirs, sizes, model_dir, model or ModelConfig(), training)
        for pipe in theirs:
            pipe.close()
        self.busy: set[int] = set(range(len(pairs)))
        self.replies: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        self.dead: set[int] = set()
        self.claims = 0
        """Micro-steps given out in this batch."""
        self.waits = 0
        """Claims answered with Wait since the last micro-step."""
        self.collect(range(cells))

    def __enter__(self) -> "LocalCells":
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.stop()

    def ranks_of(self, cell: int) -> range:
        return range(cell * self.n, (cell + 1) * self.n)

    def send(self, cell: int, command: str, *arguments: Any) -> None:
        """Start a command on every rank of a cell."""
        for rank in self.ranks_of(cell):
            self.pipes[rank].send((command, arguments))
            self.busy.add(rank)

    def collect(self, cells: Any, tick: Callable[[], None] | None = None, limit_s: float = 120.0) -> dict[int, list[Any]]:
        """Serve claims until these cells have replied; {cell: reply of each rank}. `tick` is called between messages.

        Raises RankFailed, or TimeoutError after `limit_s` without an end.
        """
        wanted, deadline = list(cells), time.monotonic() + limit_s
        while any(rank in self.busy for cell in wanted for rank in self.ranks_of(cell)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"cells {wanted} did not answer in {limit_s:g} s; buffer: {self.buffer.progress()}")
            if tick is not None:
                tick()
            alive = [pipe for rank, pipe in enumerate(self.pipes) if rank not in self.dead]
            speaking = wait(alive, 0.01)
            for rank, pipe in enumerate(self.pipes):
                if pipe in speaking:
                    self._serve(rank)
        failed = {rank: self.errors.pop(rank) for cell in wanted for rank in self.ranks_of(cell) if rank in self.errors}
        if failed:
            raise RankFailed("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return {cell: [self.replies.get(rank) for rank in self.ranks_of(cell)] for cell in wanted}

    def call(self, cell: int, command: str, *arguments: Any) -> Any:
        """Run a command on a cell; the reply of its first rank."""
        self.send(cell, command, *arguments)
        return self.collect([cell])[cell][0]

    def kill(self, cell: int) -> None:
        """Kill a cell's processes and give back what it holds of the batch."""
        for rank in self.ranks_of(cell):
            self.ranks.kill(rank)
            self.dead.add(rank)
            self.busy.discard(rank)
        self.buffer.hand_back(cell)

    def _serve(self, rank: int) -> None:
        cell, pipe = rank // self.n, self.pipes[rank]
        try:
            kind, value = pipe.recv()
        except EOFError:
            self.dead.add(rank)
            self.busy.discard(rank)
            self.errors[rank] = "ended"
            return
        now = time.monotonic()
        if kind == "claim":
            answer = self.buffer.claim(cell, now)
            if isinstance(answer, MicroStep):
                self.claims, self.waits = self.claims + 1, 0
                pipe.send(to_arrow(answer))
            else:
                self.waits += isinstance(answer, Wait)
                pipe.send(Wait(0.005) if isinstance(answer, Wait) else answer)
        elif kind == "done":
            self.buffer.done(value[0], cell, now, value[1])
        else:
            self.busy.discard(rank)
            (self.replies if kind == "reply" else self.errors)[rank] = value


def train_batch(
    cells: LocalCells,
    step: int,
    groups: list[ReadyGroup],
    *,
    pauses: Mapping[int, int] | None = None,
    joins: Mapping[int, int] | None = None,
    kills: Mapping[int, int] | None = None,
    final: bool = False,
) -> tuple[UpdateReport, dict[int, list[StreamReport]]]:
    """One step: stream `groups`, let cells join and die as scheduled, update over the cells that are in. Returns report and streams.

    `pauses[i]`: group i is withheld until that many claims have found nothing. `joins[c]`: satellite c joins once that many micro-steps
    are given out (0: at once; absent: never); a joiner pulls the weights that the core had when the batch began. `kills[c]`: satellite c
    is killed at that count, and with it every later cell leaves.
    """
    buffer, pauses, joins, kills = cells.buffer, dict(pauses or {}), dict(joins or {}), dict(kills or {})
    cells.send(0, "read_slab")
    core_slabs = cells.collect([0])[0]
    cells.claims = cells.waits = 0
    buffer.open_batch(step, len(groups))
    waiting, training, left = list(enumerate(groups)), [0], set()
    cells.send(0, "train", step)

    def tick() -> None:
        while waiting and buffer.want_group() and cells.waits >= pauses.get(waiting[0][0], 0):
            cells.waits = 0
            buffer.add_group(waiting.pop(0)[1])
        for cell, count in sorted(joins.items()):
            if cells.claims >= count or (buffer.closed and not waiting):
                del joins[cell]
                for rank in cells.ranks_of(cell):
                    cells.pipes[rank].send(("write_slab", (core_slabs[rank % cells.n],)))
                    cells.busy.add(rank)
                cells.collect([cell])
                cells.send(cell, "train", step)
                training.append(cell)
        for cell, count in list(kills.items()):
            if cell in training and cells.claims >= count:
                del kills[cell]
                cells.kill(cell)
                for other in [c for c in training if c >= cell]:
                    training.remove(other)
                    left.add(other)
                    buffer.hand_back(other)

    cells.collect([0], tick)
    streams = cells.collect(training)
    for cell in [cell for cell in left if not set(cells.ranks_of(cell)) & cells.dead]:
        cells.collect([cell])
        cells.call(cell, "drop")
    for cell in training:
        cells.send(cell, "update", len(training), final)
    report = cells.collect(training)[0][0]
    return report, streams
