"""What each command of the coordinator does on one rank of a cell.

Rollout to training (`join`): the engines give their memory away, the rank pulls the core's weights. Routes have moved and no request is
left by then; that is the coordinator's and the proxy's part. Training to rollout (`leave`): gradients are dropped, the engines take their
memory back and prove that they generate. The process and its communication groups stay. Training buffers stay in place too: on CPU there
is nothing to gain by moving them.

Every rank of the cell runs the same command; the first one alone talks to engines. Each function returns its part of the report's result
and adds to `phases`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gyre_lib.cells.coordinator_link import CoordinatorLink, HttpMicroStepSource
from gyre_lib.cells.engine_memory import EngineMemory
from gyre_lib.cells.phases import Phases
from gyre_lib.cells.publication import export_weights, is_exported, publish
from gyre_lib.config.layout import RunLayout
from gyre_lib.engines.control import EngineControl
from gyre_lib.training import checkpoint
from gyre_lib.training.cell_trainer import CellTrainer
from gyre_lib.transfer.transport import Transport
from gyre_lib.transfer.weight_exposure import WeightExposure, WeightPull

PULL_TIMEOUT_S = 120.0
CHECKPOINTS_KEPT = 2

Command = dict[str, Any]
Result = dict[str, Any]


class CellFault(RuntimeError):
    """The cell's first rank failed at something that all its ranks depend on."""


@dataclass
class CellRank:
    """One training rank and what it needs for its commands."""

    trainer: CellTrainer
    run: RunLayout
    link: CoordinatorLink
    open_transport: Callable[[], Transport]
    memory: EngineMemory = field(default_factory=EngineMemory)
    _transport: Transport | None = None
    _exposure: WeightExposure | None = None
    _pull: WeightPull | None = None

    def execute(self, command: Command, phases: Phases) -> Result:
        """Perform a command; raises whatever went wrong, or CellFault for an unknown kind."""
        kinds: dict[str, Callable[[Command, Phases], Result]] = {
            "join": self.join,
            "expose": self.expose,
            "train": self.train,
            "update": self.update,
            "leave": self.leave,
            "publish": self.publish,
            "checkpoint": self.checkpoint,
        }
        if command["kind"] not in kinds:
            raise CellFault(f"{command['kind']}: no such command")
        return kinds[command["kind"]](command, phases)

    # -- transitions

    def join(self, command: Command, phases: Phases) -> Result:
        """{step | None, version, manifest | None, engines}: become a training cell whose weights are `version`.

        The core has them (or reads its checkpoint of that step, in a new process); a satellite pulls them.
        """
        with phases.timed("release"):
            self._first_rank_alone(lambda: self.memory.release(_urls(command)))
        if self.trainer.layout.is_core:
            with phases.timed("restore"):
                self._restore(command["version"])
            weight_bytes = 0
        else:
            weight_bytes = self._pull_weights(command, phases)
        if command["step"] is not None:
            self.trainer.begin_batch(command["step"])
        return {"weight_bytes": weight_bytes}

    def leave(self, command: Command, phases: Phases) -> Result:
        """{version, engines}: become a rollout cell. `version` is the published one; engines that hold an older one load it from disk.

        The result tells which version each engine serves. The core's open batch, if any, is forgotten on this cell.
        """
        self.trainer.drop_gradients()
        versions: dict[str, int] = {}

        def restore_engines() -> None:
            with phases.timed("resume"):
                self.memory.resume(_urls(command))
            for engine in command["engines"]:
                with EngineControl(engine["url"]) as control:
                    with phases.timed("load"):
                        if control.weight_version() < command["version"] and is_exported(
                            self._published(command["version"]), command["version"]
                        ):
                            control.load_folder(self._published(command["version"]), command["version"])
                    with phases.timed("health"):
                        control.prove_health()
                    versions[engine["engine_id"]] = control.weight_version()

        self._first_rank_alone(restore_engines)
        return {"versions": versions}

    # -- the batch

    def train(self, command: Command, phases: Phases) -> Result:
        """{step}: claim and train micro-steps until the batch is closed. Every train command begins with empty gradients: a second one
        for the same step comes from a coordinator that counts nothing of the first."""
        self.trainer.drop_gradients()
        self.trainer.begin_batch(command["step"])
        source = HttpMicroStepSource(self.link, command["step"], command["id"]) if self.trainer.layout.is_leader else None
        with phases.timed("stream"):
            report = self.trainer.train_stream(source)
        if source is not None and source.superseded:
            self.trainer.drop_gradients()
            raise CellFault(f"the coordinator restarted during step {command['step']}; its gradients are dropped")
        phases |= {"compute": report.compute_s, "neighbour": report.neighbour_s, "idle": report.idle_s}
        names = ("micro_steps", "scored", "tokens", "pauses", "startups", "drains", "executions")
        return {name: getattr(report, name) for name in names}

    def update(self, command: Command, phases: Phases) -> Result:
        """{step, cells, final, executions}: reduce the gradients of cells 0..cells-1 to the core, one optimizer step over `executions`
        (absent: as many as the stream ended with), broadcast unless final."""
        started = time.monotonic()
        report = self.trainer.reduce_and_update(command["cells"], command["final"], command.get("executions"))
        if report is None:
            phases["update"] = time.monotonic() - started
            return {}
        phases |= {"reduce": report.reduce_s, "optimizer": report.update_s, "broadcast": report.broadcast_s}
        return report.as_json()

    # -- the core's weights

    def expose(self, command: Command, phases: Phases) -> Result:
        """{version} (core): show the weights as `version`. The result's manifest is what `join` is given; it covers all ranks."""
        if self.trainer.layout.is_core:
            self._restore(command["version"])
        if self._exposure is None:
            self._exposure = WeightExposure(self.trainer.weight_slab, self.transport)
        with phases.timed("expose"):
            self._exposure.publish(command["version"])
        return {"manifest": {"shards": self._gathered(self._exposure.manifest())}}

    def publish(self, command: Command, phases: Phases) -> Result:
        """{version, engines} (core): write the published folder and bring it to the engines; see publication.publish for the result."""
        version, folder = command["version"], self._published(command["version"])
        with phases.timed("export"):
            if not self._agreed(lambda: is_exported(folder, version)):
                self._restore(version)
                self._export(folder, version)
        if not self.trainer.layout.is_leader:
            return {}
        return publish(folder, version, command["engines"], phases)

    def checkpoint(self, command: Command, phases: Phases) -> Result:
        """{step, journal_position} (core): make the state after `step` steps durable; the two latest are kept."""
        folder = self._checkpoint(command["step"])
        with phases.timed("save"):
            self.trainer.save_checkpoint(folder, command["journal_position"], command["step"])
            if self.trainer.layout.is_leader:
                for old in sorted(path for path in self.run.checkpoints.iterdir() if path.suffix != ".partial")[:-CHECKPOINTS_KEPT]:
                    checkpoint.remove(old)
        return {"checkpoint": str(folder)}

    # -- parts

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = self.open_transport()
        return self._transport

    def _restore(self, version: int) -> None:
        """In a core process that was started anew, or is asked to go back, bring the trainer to `version` from its checkpoint."""
        if self.trainer.version != version:
            self.trainer.load_checkpoint(self._checkpoint(version))

    def _pull_weights(self, command: Command, phases: Phases) -> int:
        if command["manifest"] is None:
            raise CellFault("join: the core has exposed no weights")
        if self._pull is None:
            self._pull = WeightPull(self.transport)
        manifest = command["manifest"]["shards"][self.trainer.layout.shard]
        report = self._pull.pull_into(self.trainer.weight_slab, manifest, command["version"], PULL_TIMEOUT_S)
        self.trainer.version = command["version"]
        phases |= {f"pull_{name}": seconds for name, seconds in report.phases.items()}
        return report.nbytes

    def _export(self, folder: Path, version: int) -> None:
        weights = self.trainer.hf_weights()
        if self.trainer.layout.is_leader:
            export_weights(weights, self.trainer.model_dir, folder, version)
        else:
            for _ in weights:
                pass

    def _first_rank_alone(self, act: Callable[[], None]) -> None:
        """Do it on the first rank; no rank goes on before it is done, or after it failed. Raises CellFault on all of them."""
        problem = ""
        if self.trainer.layout.is_leader:
            try:
                act()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        problem = self._agreed(lambda: problem)
        if problem:
            raise CellFault(problem)

    def _agreed(self, ask: Callable[[], Any]) -> Any:
        """The first rank's answer, on every rank of the cell."""
        if self.trainer.layout.ranks_per_cell == 1:
            return ask()
        answer = [ask() if self.trainer.layout.is_leader else None]
        dist.broadcast_object_list(answer, group=self.trainer.groups.cell, group_src=0)
        return answer[0]

    def _gathered(self, mine: Any) -> list[Any]:
        """Every rank's value, by shard."""
        n = self.trainer.layout.ranks_per_cell
        if n == 1:
            return [mine]
        values: list[Any] = [None] * n
        dist.all_gather_object(values, mine, group=self.trainer.groups.cell)
        return values

    def _published(self, version: int) -> Path:
        return self.run.published / str(version)

    def _checkpoint(self, step: int) -> Path:
        return self.run.checkpoints / f"{step:08d}"


def _urls(command: Command) -> list[str]:
    return [engine["url"] for engine in command["engines"]]
