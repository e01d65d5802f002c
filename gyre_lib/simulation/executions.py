"""Executions and groups as the simulator follows them."""


class SimulatedGroup:
    """A group on its way through the run."""

    __slots__ = ("first_launch_s", "longest", "longest_s", "name", "open", "query", "settled", "training_work", "valid", "version")

    def __init__(self, name: str, query: int, version: int, size: int, training_work: float) -> None:
        self.name = name
        self.query = query
        self.version = version
        self.open = size
        self.valid = 0
        self.settled = False
        self.training_work = training_work
        self.first_launch_s = -1.0
        self.longest_s = 0.0
        self.longest = ""


class Execution:
    """A simulated execution. `engine` is None while it is queued and after its harness has ended."""

    __slots__ = ("ended_s", "engine", "evaluation_s", "failed", "group", "launched_s", "name", "stuck", "timed_out", "work_s")

    def __init__(self, name: str, group: SimulatedGroup, work_s: float, evaluation_s: float, stuck: bool, failed: bool) -> None:
        self.name = name
        self.group = group
        self.work_s = work_s
        self.evaluation_s = evaluation_s
        self.stuck = stuck
        self.failed = failed
        self.engine: int | None = None
        self.launched_s = -1.0
        self.ended_s = -1.0
        self.timed_out = ""
