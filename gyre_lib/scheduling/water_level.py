"""The execution counters d, p, f and the water level w = d - f (section 4.2 of the paper).

Always 0 <= f <= p <= d. `d` counts executions entered into the queue, `p` launched, `f` terminated.
"""


class WaterLevel:
    """Plain counters; who may move them is the scheduler's business."""

    __slots__ = ("dispatched", "launched", "terminated")

    def __init__(self) -> None:
        self.dispatched = 0
        self.launched = 0
        self.terminated = 0

    @property
    def level(self) -> int:
        """w: executions queued or running."""
        return self.dispatched - self.terminated

    @property
    def queued(self) -> int:
        """d - p."""
        return self.dispatched - self.launched

    @property
    def running(self) -> int:
        """p - f."""
        return self.launched - self.terminated

    def launchable(self, capacity: int) -> int:
        """Equation 4: min(d - p, max(0, capacity - (p - f)))."""
        return min(self.dispatched - self.launched, max(0, capacity - self.launched + self.terminated))

    def covered_by(self, capacity: int, pending: int = 0) -> bool:
        """Equations 5 and 6: this capacity holds all outstanding executions and `pending` new ones."""
        return capacity >= self.dispatched - self.terminated + pending
