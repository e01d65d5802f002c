"""How fast the scheduler decides, how long a simulated 48-step run takes, and a million adversarial events with every invariant checked.

Times are processor seconds of this process, so that neighbours on the machine do not count.
"""

import random
from time import process_time

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.scheduling.events import Event
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.simulation.adversary import AdversarialWorld, Broken, random_settings
from gyre_lib.simulation.methods import METHODS_122B
from gyre_lib.simulation.runs import simulate
from gyre_lib.simulation.simulator import Simulation
from gyre_lib.simulation.workload import load_workload

STEPS = 48
REPEATS = 3


def run(quick: bool = False) -> list[BenchRow]:
    """Rows of this benchmark; `quick` simulates 12 steps and a twentieth of the adversarial events."""
    steps = 12 if quick else STEPS
    run_s, events_per_s = _simulated_run_s(steps), _scheduler_events_per_s(steps)
    adversarial, broken = _adversarial_events_per_s(50_000 if quick else 1_000_000)
    return [
        BenchRow(f"simulated elastic run, 122B, {steps} steps", run_s, "s", "<= 1 (48 steps)", run_s <= 1.0),
        BenchRow("scheduler alone", events_per_s, "events/s", ">= 200000", events_per_s >= 200_000),
        BenchRow("adversarial events, every invariant checked", adversarial, "events/s"),
        BenchRow("adversarial runs that broke an invariant", broken, "runs", "0", broken == 0),
    ]


def _simulated_run_s(steps: int) -> float:
    workload, method = load_workload("nl2repo-122b"), METHODS_122B["E0"]
    return min(_seconds(lambda: simulate(workload, method, steps, seed=1)) for _ in range(REPEATS))


def _scheduler_events_per_s(steps: int) -> float:
    events = _events_of_a_run(steps)
    settings = METHODS_122B["E0"].settings(load_workload("nl2repo-122b"), steps)

    def play() -> None:
        handle = Scheduler(settings).handle
        for event, now in events:
            handle(event, now)

    return len(events) / min(_seconds(play) for _ in range(REPEATS))


def _events_of_a_run(steps: int) -> list[tuple[Event, float]]:
    workload, method = load_workload("nl2repo-122b"), METHODS_122B["E0"]
    simulation = Simulation(workload, method.settings(workload, steps), nodes_per_cell=method.nodes, seed=1)
    events: list[tuple[Event, float]] = []
    handle = simulation.scheduler.handle

    def recorded(event: Event, now: float) -> list:
        events.append((event, now))
        return handle(event, now)

    simulation.scheduler.handle = recorded  # type: ignore[method-assign]
    simulation.run()
    return events


def _adversarial_events_per_s(least: int) -> tuple[float, int]:
    events = broken = seed = 0
    start = process_time()
    while events < least:
        rng = random.Random(seed)
        world = AdversarialWorld(random_settings(rng), rng)
        try:
            world.finish()
        except Broken:
            broken += 1
        events, seed = events + world.events, seed + 1
    return events / (process_time() - start), broken


def _seconds(call) -> float:
    start = process_time()
    call()
    return process_time() - start
