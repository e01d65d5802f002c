"""A rank's connection to a coordinator that waits, refuses, or goes away."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gyre_lib.cells.coordinator_link import LONGEST_WAIT_S, CoordinatorLink, CoordinatorRefused, HttpMicroStepSource
from gyre_lib.training.micro_steps import Closed, MicroStep, Wait
from gyre_lib.training.packing import PackingBuffer, PackingSettings
from gyre_lib.training.random_batches import random_groups
from tests.cells.doubles import CoordinatorDouble


@pytest.fixture
def coordinator() -> Iterator[CoordinatorDouble]:
    double = CoordinatorDouble()
    double.packing = PackingBuffer(PackingSettings(row_tokens=256))
    yield double
    double.stop()


@pytest.fixture
def source(coordinator: CoordinatorDouble) -> Iterator[HttpMicroStepSource]:
    link = CoordinatorLink(coordinator.url, 0, 0, "secret")
    yield HttpMicroStepSource(link, 0, "train-0")
    link.close()


def fill(coordinator: CoordinatorDouble, groups: int) -> None:
    coordinator.packing.open_batch(0, 2)
    for group in random_groups(0, groups, 4, 50, lambda rng: int(rng.integers(20, 60))):
        coordinator.packing.add_group(group)


def test_micro_steps_arrive_as_they_were_packed_until_the_batch_is_closed(
    coordinator: CoordinatorDouble, source: HttpMicroStepSource
) -> None:
    fill(coordinator, groups=2)
    seen = []
    while not isinstance(claimed := source.claim(), Closed):
        assert isinstance(claimed, MicroStep)
        issued = coordinator.packing._issued[claimed.micro_step_id]
        for mine, theirs in zip(claimed.microbatches[0], issued.microbatches[0], strict=True):
            assert np.array_equal(mine.row.token_ids, theirs.row.token_ids) and mine.advantage == theirs.advantage
        source.done(claimed, {"forward_backward_s": 0.1})
        seen.append(claimed.micro_step_id)
    assert claimed.executions == 8
    assert len(set(seen)) == len(seen) > 1 and coordinator.packing.finished


def test_a_cell_without_work_asks_less_and_less_often(coordinator: CoordinatorDouble, source: HttpMicroStepSource) -> None:
    coordinator.packing.open_batch(0, 2)
    waits = [source.claim() for _ in range(6)]
    assert all(isinstance(wait, Wait) for wait in waits)
    assert [wait.after_s for wait in waits] == pytest.approx([0.02, 0.04, 0.08, 0.16, LONGEST_WAIT_S, LONGEST_WAIT_S])


def test_an_answer_for_an_earlier_life_reaches_no_later_one(coordinator: CoordinatorDouble, source: HttpMicroStepSource) -> None:
    fill(coordinator, groups=2)
    claimed = source.claim()
    coordinator.life = "2"
    coordinator.packing = PackingBuffer(PackingSettings(row_tokens=256))
    fill(coordinator, groups=2)
    source.done(claimed, {})
    assert source.superseded
    assert source.claim() == Closed(0)
    assert coordinator.packing.progress()["claimed"] == 0


def test_a_coordinator_that_is_away_is_waited_for() -> None:
    first = CoordinatorDouble()
    link = CoordinatorLink(first.url, 3, 1, "secret")
    link.say_ready(1)
    first.stop()
    later: list[CoordinatorDouble] = []
    threading.Timer(1.0, lambda: later.append(CoordinatorDouble(first.port))).start()
    link.say_ready(1)
    assert later[0].ready == {(3, 1)}
    later[0].stop()


def test_a_refusal_is_an_error_that_holds_the_answer(coordinator: CoordinatorDouble) -> None:
    coordinator.answer = lambda *arguments: (422, {}, b"step: not a number")  # type: ignore[method-assign]
    with pytest.raises(CoordinatorRefused, match=r"/cells/0/ready: 422 step: not a number"):
        CoordinatorLink(coordinator.url, 0, 0, "secret").say_ready(1)
