"""The training side of a simulated run: one batch at a time, micro-steps claimed by the cells that train.

A cell is one server whose speed counts its lock-step ranks. Groups are pulled when the queue of micro-steps runs dry (streaming) or all
at once. Work is in node-seconds.
"""

from collections import deque

from gyre_lib.simulation.workload import Workload


class Trainer:
    """Micro-steps of the current batch and the cells that work on them."""

    def __init__(self, workload: Workload, streaming: bool, nodes_per_cell: float) -> None:
        training = workload.training
        packing = 1.0 if streaming else training.static_packing_factor
        batch = workload.batch.groups_per_batch
        ranks = max(1.0, nodes_per_cell / workload.cluster.nodes_per_rank)
        self.speed = nodes_per_cell / (1 + training.lock_step_loss * (1 - 1 / ranks))
        """Nodes' worth of work that one cell does per second."""
        self._micro_step = training.node_seconds_per_step * packing / batch / training.micro_steps_per_group
        self._pieces = training.micro_steps_per_group
        self.queue: deque[float] = deque()
        self.idle: list[int] = []
        """Cells in training without a micro-step."""
        self.working = 0
        """Micro-steps being computed."""

    def add_group(self, training_work: float) -> None:
        """Queue a group's micro-steps; `training_work` is its work relative to the mean."""
        seconds = self._micro_step * training_work / self.speed
        self.queue.extend([seconds] * self._pieces)

    def claim(self) -> tuple[int, float] | None:
        """A free cell takes a micro-step: (cell, seconds)."""
        if not self.idle or not self.queue:
            return None
        self.working += 1
        return self.idle.pop(), self.queue.popleft()

    def done(self, cell: int) -> None:
        """The cell finished its micro-step."""
        self.working -= 1
        self.idle.append(cell)
