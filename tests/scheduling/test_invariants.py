"""All invariants of the scheduler under adversarial event orders, and replay of what happened at any cut."""

import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gyre_lib.scheduling.events import to_json
from gyre_lib.scheduling.replay import ReplayError, replay
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings
from gyre_lib.simulation.adversary import AdversarialWorld, random_settings


def world(seed: int, keep_history: bool = False) -> AdversarialWorld:
    rng = random.Random(seed)
    return AdversarialWorld(random_settings(rng), rng, keep_history=keep_history)


@pytest.mark.parametrize("block", range(4))
def test_adversarial_runs_keep_every_invariant_and_end(block):
    events, seed = 0, 1_000_000 * block
    while events < 100_000:
        adversary = world(seed)
        try:
            adversary.finish()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {adversary.settings}") from error
        events, seed = events + adversary.events, seed + 1


@st.composite
def machines(draw) -> SchedulerSettings:
    """Settings whose counts shrink towards the smallest machine that still fails."""
    policy = draw(st.sampled_from(["elastic", "async", "colocate"]))
    batch = draw(st.integers(1, 4))
    cells = draw(st.integers(1, 5))
    return SchedulerSettings(
        policy=policy,
        streaming=draw(st.booleans()),
        cells=cells,
        cell_capacity=draw(st.integers(1, 8)),
        standalone_capacity=draw(st.integers(1 if policy == "async" else 0, 8)),
        training_cells=draw(st.integers(1, cells)),
        groups_per_batch=batch,
        executions_per_group=draw(st.integers(1, 3)),
        oversampling=draw(st.integers(0, 2)),
        steps_per_burst=draw(st.integers(1, 4)),
        extra_groups=draw(st.integers(0, 2 * batch)),
        supply_groups=draw(st.integers(1, batch)),
        supply_hold_s=draw(st.sampled_from([0.0, 60.0])),
        bursts=draw(st.integers(1, 4)),
        lost_groups=draw(st.sampled_from(["placeholder", "requeue"])),
    )


@given(machines(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_machine_keeps_the_invariants(machine, seed):
    AdversarialWorld(machine, random.Random(seed)).finish()


class AdversarialMachine(RuleBasedStateMachine):
    """The same world, one rule per kind of step, so that a failing order shrinks."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.world = world(seed)

    @rule(times=st.integers(1, 40))
    def happens(self, times):
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: not self.world.done)
    @rule()
    def engine_or_satellite_dies(self):
        self.world._mishap()

    @rule(data=st.data())
    def event_repeats(self, data):
        event = self.world._last_event
        if event is not None and self.world._harmless_repeat(event):
            self.world._send(event, repeated=True)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


AdversarialMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestAdversarialMachine = AdversarialMachine.TestCase


def journal_of(adversary: AdversarialWorld) -> list[str]:
    lines = [json.dumps({"settings": adversary.settings.to_json()})]
    scheduler = Scheduler(adversary.settings)
    for sequence, (event, _) in enumerate(adversary.history):
        actions = scheduler.handle(event, 0.0)
        lines.append(json.dumps({"seq": sequence, "now": 0.0, "event": to_json(event), "actions": [to_json(a) for a in actions]}))
    return lines


def state(scheduler: Scheduler) -> bytes:
    values = {key: value for key, value in vars(scheduler).items() if key not in ("_handlers", "policy")}
    return pickle.dumps(values)


@given(st.integers(0, 2**32), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_replay_rebuilds_the_same_state_and_actions_at_any_cut(seed, where):
    adversary = world(seed, keep_history=True)
    adversary.finish()
    lines = journal_of(adversary)
    cut = 1 + int(where * (len(lines) - 1))
    restored = replay(lines[:cut])
    direct = Scheduler(adversary.settings)
    entries = [json.loads(line) for line in lines[1:]]
    replayed = iter(adversary.history)
    for _ in entries[: cut - 1]:
        direct.handle(next(replayed)[0], 0.0)
    assert state(restored) == state(direct)
    for event, _ in replayed:
        assert restored.handle(event, 0.0) == direct.handle(event, 0.0)
    assert state(restored) == state(direct)


def test_replay_names_the_entry_whose_actions_differ():
    adversary = world(3, keep_history=True)
    adversary.finish()
    lines = journal_of(adversary)
    at = next(i for i, line in enumerate(lines) if i and json.loads(line)["actions"])
    changed = json.loads(lines[at])
    changed["actions"] = changed["actions"][1:]
    lines[at] = json.dumps(changed)
    with pytest.raises(ReplayError, match=f"journal entry {at - 1}:"):
        replay(lines)
