"""One rank's trainer: joins a batch, trains on its stream, takes part in the update. The process and its groups live for the whole run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import ModelConfig, TrainingConfig
from gyre_lib.models.hf_weights import export_hf, load_hf
from gyre_lib.models.policy_model import build_policy
from gyre_lib.models.policy_shape import read_shape
from gyre_lib.training import checkpoint
from gyre_lib.training.micro_step_stream import MicroStepStream
from gyre_lib.training.micro_steps import MicroStepSource
from gyre_lib.training.objective import Bounds
from gyre_lib.training.pipeline import ContinuousPipeline, Neighbours, StreamReport
from gyre_lib.training.policy_stage import PolicyStage
from gyre_lib.training.prefix_groups import build_groups
from gyre_lib.training.rank_layout import RankLayout
from gyre_lib.training.update import CoreOptimizer, broadcast_from_core, reduce_to_core
from gyre_lib.training.weight_slab import WeightSlab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer update, as the core's first rank reports it; see step_metrics for `metrics`."""

    step: int
    cells: int
    executions: int
    """E; 0: nothing was updated."""
    grad_norm: float
    """Before the clip."""
    forward_backward_s: float
    reduce_s: float
    update_s: float
    broadcast_s: float
    metrics: dict[str, float | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Flat: metrics beside the rest."""
        flat = asdict(self)
        return flat | flat.pop("metrics")


class CellTrainer:
    """Call on every rank of a cell, the same calls in the same order; only prefix cells take part in reduce_and_update.

    An error in the middle of a stream leaves a cell of several ranks with messages nobody will receive: it then refuses further streams,
    and its processes are to be replaced.

    torch.distributed must be initialised over all ranks of all cells, with rank = layout.rank. Raises InputError for a model or a
    layout that cannot be trained.
    """

    def __init__(self, model_dir: str | Path, model: ModelConfig, training: TrainingConfig, layout: RankLayout, device: str = "cpu"):
        self.model_dir, self.layout, self.settings = Path(model_dir), layout, training
        self.device, self.dtype = torch.device(device), DTYPES[model.dtype]
        shape = read_shape(self.model_dir)
        place = (dist.get_rank(), dist.get_world_size())
        if place != (layout.rank, layout.world):
            raise InputError(f"rank layout: rank {layout.rank} of {layout.world} expected, the process group has {place[0]} of {place[1]}")
        self.groups = build_groups(layout, training.stall_limit_s)
        self.model = build_policy(shape, self.groups.model, self.dtype, self.device, layout.ep)
        self.model.train()
        load_hf(self.model, self.model_dir)
        self._slab = WeightSlab(self.model, self.dtype)
        self._optimizer = CoreOptimizer(self.model, self._slab, self.groups, layout, training) if layout.is_core else None
        bounds = Bounds(training.ratio_low, training.ratio_high, training.token_weight_cap)
        self.stage = PolicyStage(self.model, self.groups, layout, bounds, self.device)
        self.step: int | None = None
        """The open batch's step."""
        self.broken = ""
        """Why this cell's ranks are out of step with each other; empty while they are not."""
        self.version = 0
        """Steps taken: what the weights are after the last update or restore seen by this rank."""
        self._streams = 0
        self._executions = 0
        self._forward_backward_s = 0.0

    @property
    def weight_slab(self) -> Tensor:
        """This rank's parameters: flat contiguous float32. Whoever writes it needs nothing else before the next begin_batch."""
        return self._slab.weights

    @property
    def gradient_slab(self) -> Tensor:
        """Accumulated unnormalised gradients, in the layout of weight_slab."""
        return self._slab.grads

    def begin_batch(self, step: int) -> None:
        """Open the batch of `step`; without effect when it is open already (gradients stay)."""
        if self.step == step:
            return
        self.drop_gradients()
        self._slab.refresh()
        self.step = step

    def train_stream(self, source: MicroStepSource | None) -> StreamReport:
        """Forward and backward over the open batch's stream until it is closed and done on all cells; gradients accumulate.

        Only the cell's first rank needs a source. May be called again in the same batch, when another cell's work came back.
        """
        if self.step is None:
            raise RuntimeError("train_stream without begin_batch")
        if self.broken:
            raise RuntimeError(f"cell {self.layout.cell} must be restarted, its pipeline broke: {self.broken}")
        name = f"cell{self.layout.cell}/stream{self._streams}"
        self._streams += 1
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        stream = MicroStepStream(self.layout, store, source if self.layout.is_leader else None, self.settings.stall_limit_s)
        neighbours = Neighbours(self.groups.forward, self.groups.backward, self.settings.stall_limit_s, self.device)
        try:
            report = ContinuousPipeline(self.stage, neighbours, stream, self.dtype).run()
        except Exception as error:
            if self.layout.ranks_per_cell > 1:
                self.broken = f"{type(error).__name__}: {error}"
            raise
        self._executions = report.executions
        self._forward_backward_s += report.compute_s
        return report

    def reduce_and_update(self, cells: int, final: bool, executions: int | None = None) -> UpdateReport | None:
        """Over cells 0..cells-1: gradients to the core, one update there, and unless `final` the new parameters to all of them.

        E is what the closed stream said, unless given. Returns the report on the core's first rank, None elsewhere. A RuntimeError
        from a dead satellite leaves the core's own gradients as they were and the batch open.
        """
        if self.step is None:
            raise RuntimeError("reduce_and_update without an open batch")
        if self.layout.cell >= cells:
            raise RuntimeError(f"cell {self.layout.cell} is not among the first {cells}")
        total_executions = self._executions if executions is None else executions
        prefix = self.groups.prefix[cells] if cells > 1 else None
        marks = [time.monotonic()]
        grads, metrics = self._slab.grads, self.stage.metrics.copy(counts=self.layout.tensor_rank == 0)
        if prefix is not None:
            grads = reduce_to_core(grads, prefix, self.layout.is_core)
            metrics.all_reduce(prefix)
        marks.append(time.monotonic())
        norm = 0.0
        if self._optimizer is not None:
            metrics.all_reduce(self.groups.cell)
            if total_executions > 0:
                norm = self._optimizer.step(grads, total_executions)
        marks.append(time.monotonic())
        if prefix is not None and not final:
            broadcast_from_core(self._slab.weights, prefix)
        self._slab.refresh()
        marks.append(time.monotonic())
        report = None
        if self.layout.is_core and self.layout.is_leader:
            reduce_s, update_s, broadcast_s = (b - a for a, b in pairwise(marks))
            means, train_s = metrics.report(total_executions), self._forward_backward_s
            report = UpdateReport(self.step, cells, total_executions, norm, train_s, reduce_s, update_s, broadcast_s, means)
        if self.layout.is_core or not final:
            self.version = self.step + 1
        self.drop_gradients()
        return report

    def drop_gradients(self) -> None:
        """Leave the open batch without an update: this cell's share of it is forgotten."""
        self._slab.grads.zero_()
        self.stage.metrics.reset()
        self._executions, self._forward_backward_s = 0, 0.0
        self.step = None

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor) one by one. Collective over the cell: every rank must exhaust it; the first rank
        of each data-parallel copy is given the tensors."""
        return export_hf(self.model, self._views(self._slab.weights))

    def last_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """As hf_weights: the gradient of the core's last update, normalised and clipped."""
        if self._optimizer is None:
            raise RuntimeError(f"cell {self.layout.cell} is a satellite: it makes no updates")
        return export_hf(self.model, self._views(self._optimizer.gradient))

    def save_checkpoint(self, directory: str | Path, journal_position: dict[str, Any], step: int | None = None) -> None:
        """Write the core's state to `directory`, complete in one rename. `step` is the policy version, else the one tracked here.

        Collective over the core, which alone has the state.
        """
        if self._optimizer is None:
            raise RuntimeError(f"cell {self.layout.cell} is a satellite: it has no optimizer state to save")
        final = Path(directory)
        temporary = final.with_name(final.name + ".partial")
        first, second, updates = self._optimizer.moments()
        flats = (self._slab.weights, first, second)
        if self.layout.is_leader:
            checkpoint.remove(temporary)
        for part, flat in zip(checkpoint.PARTS, flats, strict=True):
            tensors = export_hf(self.model, self._views(flat))
            if self.layout.is_leader:
                checkpoint.write_tensors(temporary / part, tensors)
            else:
                for _ in tensors:
                    pass
        if self.layout.is_leader:
            checkpoint.copy_model_files(self.model_dir, temporary / "weights")
            state = {"step": self.version if step is None else step, "updates": updates, "journal_position": journal_position}
            checkpoint.commit(temporary, final, state)
        dist.barrier(group=self.groups.cell)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore the state of a checkpoint, of any layout; returns {"step", "updates", "journal_position"}.

        A satellite restores weights only. Raises InputError naming what is missing.
        """
        folder = Path(directory)
        state = checkpoint.read_state(folder)
        load_hf(self.model, folder / "weights", self._views(self._slab.weights))
        if self._optimizer is not None:
            first, second = torch.zeros_like(self._slab.weights), torch.zeros_like(self._slab.weights)
            load_hf(self.model, folder / "first_moment", self._views(first))
            load_hf(self.model, folder / "second_moment", self._views(second))
            self._optimizer.set_moments(first, second, state["updates"])
        self.version = state["step"]
        self.drop_gradients()
        self._slab.refresh()
        return state

    def _views(self, flat: Tensor) -> Callable[[str], Tensor]:
        """The part of a flat buffer that belongs to a parameter, by its name."""
        return lambda name: self._slab.view(flat, name)
