"""The packing buffer as a pure object: its invariants under any order of claims, deaths and groups."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import RunConfig
from gyre_lib.training.bin_packing import best_fit_decreasing, first_fit_decreasing
from gyre_lib.training.micro_steps import Closed, MicroStep, Wait, from_arrow, to_arrow
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyExecution, ReadyGroup, oldest_first
from gyre_lib.training.random_batches import random_groups, random_row


def scores_of(micro_step: MicroStep, value: float = 0.25) -> dict[str, tuple[float, int]]:
    """A log-ratio of `value` at every target."""
    scores: dict[str, tuple[float, int]] = {}
    for rows in micro_step.microbatches:
        for placed in rows:
            total, count = scores.get(placed.row.execution_id, (0.0, 0))
            here = int(placed.row.targets.sum())
            scores[placed.row.execution_id] = (total + value * here, count + here)
    return scores


def finish(buffer: PackingBuffer, micro_step: MicroStep, cell: int, now: float = 0.0) -> bool:
    stats = {"scores": scores_of(micro_step)} if micro_step.kind == "score" else {}
    return buffer.done(micro_step.micro_step_id, cell, now, stats)


def trained_rows(groups: list[ReadyGroup]) -> Counter:
    """(execution, trajectory) of every row that has to be trained."""
    keys: Counter = Counter()
    for group in groups:
        if len({execution.reward for execution in group.executions}) < 2:
            continue
        mean = np.mean([execution.reward for execution in group.executions])
        for execution in group.executions:
            if execution.reward != mean:
                keys.update((row.execution_id, row.trajectory) for row in execution.rows if row.targets.any())
    return keys


def rows_in(micro_steps: list[MicroStep]) -> Counter:
    return Counter((p.row.execution_id, p.row.trajectory) for ms in micro_steps for rows in ms.microbatches for p in rows)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 100_000), ranks=st.sampled_from([1, 2, 3]), budget=st.sampled_from([1, 40, 100, 400]))
def test_each_row_is_trained_once_whatever_happens(seed: int, ranks: int, budget: int) -> None:
    """Cells claim, finish, die and fall silent in any order; groups come at any time: on the cells that stay, each row counts once."""
    rng = np.random.default_rng(seed)
    groups = random_groups(seed, 3, 3, 50, lambda rng: int(rng.integers(4, 90)))
    buffer = PackingBuffer(PackingSettings(row_tokens=budget, data_parallel=ranks, row_limit_tokens=400, lease_s=100.0))
    buffer.open_batch(0, len(groups))
    cells, now, waiting = {0, 1, 2}, 0.0, list(groups)
    held: dict[int, list[MicroStep]] = {cell: [] for cell in cells}
    kept: dict[int, list[MicroStep]] = {cell: [] for cell in cells}
    chances = {"claim": 0.45, "done": 0.4, "group": 0.1, "die": 0.02, "silent": 0.03}
    while not buffer.finished:
        now += 1.0
        move, cell = rng.choice(list(chances), p=list(chances.values())), int(rng.choice(sorted(cells)))
        if move == "claim":
            answer = buffer.claim(cell, now)
            if isinstance(answer, MicroStep):
                assert len(answer.microbatches) == ranks
                held[cell].append(answer)
            elif isinstance(answer, Closed):
                assert held[cell], "a cell without work is told of the end only when all is done"
        elif move == "done" and held[cell]:
            micro_step = held[cell].pop(int(rng.integers(len(held[cell]))))
            assert finish(buffer, micro_step, cell, now)
            assert not finish(buffer, micro_step, cell, now), "done twice counts once"
            kept[cell].append(micro_step)
        elif move == "group" and waiting:
            buffer.add_group(waiting.pop(0))
        elif move == "die" and cell != 0:
            buffer.hand_back(cell)
            cells.remove(cell)
            assert not any(finish(buffer, micro_step, cell, now) for micro_step in held[cell]), "what was given back is not its any more"
        elif move == "silent" and cell != 0 and held[cell]:
            now += 1000.0
            for other in cells - {cell}:
                answer = buffer.claim(other, now)
                if isinstance(answer, MicroStep):
                    held[other].append(answer)
            assert buffer.expire(now) == [cell]
            cells.remove(cell)
    counted = [micro_step for cell in cells for micro_step in kept[cell] if micro_step.kind == "train"]
    assert rows_in(counted) == trained_rows(groups)
    assert buffer.executions == sum(len(group.executions) for group in groups)
    assert all(isinstance(buffer.claim(cell, now), Closed) for cell in (0, 1, 2))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), ranks=st.sampled_from([1, 2, 4]), budget=st.sampled_from([40, 100, 200, 1000]))
def test_an_executions_ratio_is_known_before_its_backward(seed: int, ranks: int, budget: int) -> None:
    """A trained row either carries its execution's sum, or all of the execution is in its micro-step."""
    groups = random_groups(seed, 2, 4, 50, lambda rng: int(rng.integers(4, 90)))
    buffer = PackingBuffer(PackingSettings(row_tokens=budget, data_parallel=ranks, row_limit_tokens=400))
    buffer.open_batch(3, 2)
    for group in groups:
        buffer.add_group(group)
    while not buffer.finished:
        micro_step = buffer.claim(0, 0.0)
        assert isinstance(micro_step, MicroStep) and micro_step.step == 3
        for rows in micro_step.microbatches:
            assert sum(len(p.row.token_ids) for p in rows) <= budget or len(rows) == 1
        if micro_step.kind == "train":
            here: Counter = Counter()
            for placed in (p for rows in micro_step.microbatches for p in rows):
                here[placed.row.execution_id] += int(placed.row.targets.sum())
                if not math.isnan(placed.log_ratio_sum):
                    assert placed.log_ratio_sum == pytest.approx(0.25 * placed.execution_targets)
                    here[placed.row.execution_id] = -1
            for placed in (p for rows in micro_step.microbatches for p in rows):
                assert here[placed.row.execution_id] in (-1, placed.execution_targets) or not math.isnan(placed.log_ratio_sum)
        finish(buffer, micro_step, 0)


def test_groups_are_wanted_while_rows_run_low() -> None:
    groups = random_groups(0, 9, 8, 50, lambda rng: int(rng.integers(40, 90)))
    buffer = PackingBuffer(PackingSettings(row_tokens=200, lookahead=4))
    buffer.open_batch(0, 9)
    taken = 0
    while not buffer.finished:
        while buffer.want_group():
            buffer.add_group(groups[taken])
            taken += 1
        assert taken == 9 or buffer._buffered_tokens() >= 800
        finish(buffer, buffer.claim(0, 0.0), 0)
    assert taken == 9


def test_starved_cells_get_what_is_half_full() -> None:
    rng = np.random.default_rng(0)
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    buffer.open_batch(0, 2)
    rows = {n: [random_row(rng, f"g0-{n}", "g0", 0, tokens, 50)] for n, tokens in enumerate([30, 10])}
    buffer.add_group(ReadyGroup("g0", 0, [ReadyExecution(f"g0-{n}", float(n), rows[n]) for n in rows]))
    assert isinstance(buffer.claim(0, 0.0), Wait), "40 of 100 tokens wait for company"
    more = [random_row(rng, "g1-0", "g1", 0, 30, 50)]
    buffer.add_group(ReadyGroup("g1", 0, [ReadyExecution("g1-0", 0.0, more), ReadyExecution("g1-1", 1.0, [])]))
    micro_step = buffer.claim(0, 0.0)
    assert isinstance(micro_step, MicroStep) and micro_step.tokens == 70


def test_oldest_version_first() -> None:
    groups = [ReadyGroup("g2", 1, []), ReadyGroup("g3", 0, []), ReadyGroup("g1", 1, [])]
    assert [group.group_id for group in oldest_first(groups)] == ["g3", "g1", "g2"]


def test_an_empty_cell_waits_for_the_others_and_takes_their_work_if_they_die() -> None:
    groups = random_groups(0, 1, 2, 50, lambda rng: 50, max_rows=1)
    groups[0].executions[0] = replace(groups[0].executions[0], reward=0.0)
    groups[0].executions[1] = replace(groups[0].executions[1], reward=1.0)
    buffer = PackingBuffer(PackingSettings(row_tokens=50))
    buffer.open_batch(0, 1)
    buffer.add_group(groups[0])
    first, second = buffer.claim(0, 0.0), buffer.claim(1, 0.0)
    assert isinstance(buffer.claim(0, 0.0), Closed), "it has one to finish: drain"
    finish(buffer, first, 0)
    assert isinstance(buffer.claim(0, 0.0), Wait), "cell 1 may still die"
    buffer.hand_back(1)
    assert isinstance(buffer.claim(1, 0.0), Closed), "cell 1 is out"
    assert buffer.claim(0, 0.0) == second
    finish(buffer, second, 0)
    assert buffer.finished and buffer.claim(0, 0.0) == Closed(2)


def test_a_pausing_pipeline_keeps_its_lease_by_asking() -> None:
    buffer = PackingBuffer(PackingSettings(row_tokens=100, lease_s=10.0))
    buffer.open_batch(0, 2)
    groups = random_groups(0, 1, 4, 50, lambda rng: 90, max_rows=1)
    members = [replace(execution, reward=float(number)) for number, execution in enumerate(groups[0].executions)]
    buffer.add_group(replace(groups[0], executions=members))
    assert isinstance(buffer.claim(1, 0.0), MicroStep)
    while isinstance(buffer.claim(1, 8.0), MicroStep):
        pass
    assert buffer.expire(17.0) == []
    assert buffer.expire(18.5) == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.nan}, "execution g0-0, trajectory 0: the log-prob of the target at position 9 is nan"),
        ({"logprobs": 0.5}, "position 9 is 0.5"),
        ({"temperature": 0.0}, "temperature 0.0 is not positive"),
        ({"group_id": "g9"}, "the row says execution g0-0 of group g9, expected group g0"),
        ({"tokens": 401}, "execution g0-0, trajectory 0: 401 tokens, more than the limit of 400"),
        ({"targets": 0}, "position 0 is a target but nothing precedes it"),
        ({"versions": np.zeros(3, np.int32)}, "have lengths"),
    ],
)
def test_bad_rows_are_refused_by_name_and_the_batch_stays_as_it_was(change: dict, message: str) -> None:
    row = random_row(np.random.default_rng(0), "g0-0", "g0", 0, change.pop("tokens", 10), 50)
    if "logprobs" in change:
        change = {"logprobs": np.where(np.arange(10) == 9, change["logprobs"], row.logprobs).astype(np.float32)}
    if "targets" in change:
        change = {"targets": np.arange(10) == 0}
    bad = ReadyGroup("g0", 0, [ReadyExecution("g0-0", 1.0, [replace(row, **change)]), ReadyExecution("g0-1", 0.0, [])])
    buffer = PackingBuffer(PackingSettings(row_tokens=100, row_limit_tokens=400))
    buffer.open_batch(0, 1)
    with pytest.raises(InputError, match=message):
        buffer.add_group(bad)
    assert not buffer.closed and buffer.executions == 0
    buffer.add_group(ReadyGroup("g0", 0, []))
    assert buffer.finished


def test_a_row_over_the_budget_has_a_microbatch_of_its_own() -> None:
    rng = np.random.default_rng(0)
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    buffer.open_batch(0, 1)
    sizes = {"g0-0": 250, "g0-1": 20, "g0-2": 30}
    members = [ReadyExecution(e, float(n), [random_row(rng, e, "g0", 0, size, 50)]) for n, (e, size) in enumerate(sizes.items())]
    members[1] = replace(members[1], reward=0.5)
    taken = buffer.add_group(ReadyGroup("g0", 0, members))
    assert taken.trained_executions == 3 and taken.scored_executions == 0
    assert sorted(buffer.claim(0, 0.0).tokens for _ in range(2)) == [50, 250]


def test_c25_a_lost_group_is_a_placeholder_never_a_row() -> None:
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    buffer.open_batch(0, 2)
    taken = buffer.add_group(ReadyGroup("g0", 0, []))
    assert (taken.executions, taken.trained_executions, taken.signal) == (0, 0, False)
    buffer.add_group(ReadyGroup("g1", 0, []))
    assert buffer.finished and buffer.claim(0, 0.0) == Closed(0)


def test_all_rewards_equal_needs_no_compute_but_counts() -> None:
    groups = random_groups(0, 1, 4, 50, lambda rng: 50)
    equal = replace(groups[0], executions=[replace(execution, reward=5.0) for execution in groups[0].executions])
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    buffer.open_batch(0, 1)
    assert not buffer.add_group(equal).signal
    assert buffer.claim(0, 0.0) == Closed(4)


def test_misuse_is_refused() -> None:
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    assert buffer.claim(0, 0.0) == Closed(0), "no batch is open"
    buffer.open_batch(0, 1)
    with pytest.raises(RuntimeError, match="batch 1 opened while batch 0 is unfinished"):
        buffer.open_batch(1, 1)
    buffer.abandon()
    buffer.open_batch(0, 2)
    buffer.add_group(ReadyGroup("g0", 0, []))
    with pytest.raises(RuntimeError, match="group g0 is in batch 0 already"):
        buffer.add_group(ReadyGroup("g0", 0, []))
    buffer.add_group(ReadyGroup("g1", 0, []))
    with pytest.raises(RuntimeError, match="holds its 2 groups already; g2 refused"):
        buffer.add_group(ReadyGroup("g2", 0, []))
    with pytest.raises(InputError, match="execution g3-0: reward nan is not a number"):
        buffer.open_batch(1, 1)
        buffer.add_group(ReadyGroup("g3", 0, [ReadyExecution("g3-0", math.nan, [])]))


def test_scores_must_be_those_that_were_asked_for() -> None:
    groups = random_groups(1, 1, 4, 50, lambda rng: 90, max_rows=3)
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    buffer.open_batch(0, 1)
    buffer.add_group(groups[0])
    micro_step = buffer.claim(0, 0.0)
    assert micro_step.kind == "score"
    with pytest.raises(InputError, match="scores of \\[\\], expected \\['g0"):
        buffer.done(micro_step.micro_step_id, 0, 0.0, {})


def test_settings_come_from_the_run() -> None:
    settings_ = PackingSettings.from_config(RunConfig.model_validate({"training": {"row_tokens": 64}, "cells": {"data_parallel": 2}}))
    assert (settings_.row_tokens, settings_.data_parallel) == (64, 2)
    assert settings_.limit >= RunConfig().rollout.max_context_tokens


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), ranks=st.sampled_from([1, 3]))
def test_micro_steps_survive_the_wire(seed: int, ranks: int) -> None:
    groups = random_groups(seed, 1, 4, 50, lambda rng: int(rng.integers(4, 90)))
    buffer = PackingBuffer(PackingSettings(row_tokens=100, data_parallel=ranks))
    buffer.open_batch(0, 1)
    buffer.add_group(groups[0])
    while not buffer.finished:
        sent = buffer.claim(0, 0.0)
        received = from_arrow(to_arrow(sent))
        assert (received.micro_step_id, received.step, received.kind) == (sent.micro_step_id, sent.step, sent.kind)
        assert received.sizes() == sent.sizes() and received.shared_executions == sent.shared_executions
        assert len(received.microbatches) == ranks
        for ours, theirs in zip(sent.microbatches, received.microbatches, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a.advantage, a.execution_targets) == (b.advantage, b.execution_targets)
                assert np.array_equal(a.log_ratio_sum, b.log_ratio_sum, equal_nan=True)
                for name in ("token_ids", "targets", "logprobs", "versions"):
                    left, right = getattr(a.row, name), getattr(b.row, name)
                    assert left.dtype == right.dtype and np.array_equal(left, right)
                assert (a.row.execution_id, a.row.group_id, a.row.trajectory, a.row.role_class, a.row.temperature) == (
                    b.row.execution_id, b.row.group_id, b.row.trajectory, b.row.role_class, b.row.temperature,
                )  # fmt: skip
        finish(buffer, sent, 0)


@given(st.lists(st.integers(1, 120), max_size=60), st.lists(st.integers(0, 100), max_size=4))
def test_best_fit_decreasing_packs_everything_within_capacity(sizes: list[int], room: list[int]) -> None:
    bins = best_fit_decreasing(sizes, 100, room)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    for number, items in enumerate(bins):
        limit = room[number] if number < len(room) else 100
        assert sum(sizes[item] for item in items) <= limit or (number >= len(room) and len(items) == 1)
    if not room:
        assert len(bins) <= max(1.25 * len(first_fit_decreasing(sizes, 100)), len(first_fit_decreasing(sizes, 100)) + 1)
