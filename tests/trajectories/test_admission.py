"""Admission: the invariants of the module's docstring over random trees, the draw's law, and the field reports that name it."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import executions, record

from gyre_lib.trajectories.admission import AdmittedTrajectory, admission_rows, admit, admit_nodes, nodes_of_records
from gyre_lib.trajectories.classes import CLASSES
from gyre_lib.trajectories.materialisation import materialise
from gyre_lib.trajectories.provenance import trainable_records
from gyre_lib.trajectories.tito_record import BadRecord, RequestRecord

LIMITS = st.none() | st.integers(1, 6)


def draw_from(records: list[RequestRecord], limit: int | None = None, version: int = 3) -> list[AdmittedTrajectory]:
    return admit(records, run_id="run", execution_id=records[0].execution_id, version=version, max_trajectories=limit)


def target_tokens(item: AdmittedTrajectory) -> list[tuple[str, int]]:
    return [(item.path_request_ids[run.node], place) for run in item.targets for place in range(run.start, run.end)]


def trainable_tokens(records: list[RequestRecord]) -> set[tuple[str, int]]:
    verdict = trainable_records(records)
    return {
        (item.request_id, place)
        for item in records
        if verdict[item.request_id] and item.role_class in CLASSES
        for place in range(len(item.output_ids))
    }


def path_to(records: list[RequestRecord], leaf: str) -> tuple[str, ...]:
    by_id = {item.request_id: item for item in records}
    path = [leaf]
    while by_id[path[-1]].parent_id:
        path.append(by_id[path[-1]].parent_id)
    return tuple(reversed(path))


@settings(deadline=None, max_examples=60)
@given(executions(), LIMITS)
def test_every_token_is_a_target_at_most_once_and_only_by_provenance(records, limit):
    admitted = draw_from(records, limit)
    drawn = [token for item in admitted for token in target_tokens(item)]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) <= trainable_tokens(records)
    assert limit is None or len(admitted) <= limit
    for item in admitted:
        assert item.path_request_ids == path_to(records, item.leaf_request_id)
        assert item.target_tokens == len(target_tokens(item)) > 0


@settings(deadline=None, max_examples=60)
@given(executions())
def test_without_a_limit_every_trainable_token_is_a_target_exactly_once(records):
    drawn = [token for item in draw_from(records) for token in target_tokens(item)]
    assert sorted(drawn) == sorted(trainable_tokens(records))


@settings(deadline=None, max_examples=60)
@given(executions(), st.integers(1, 5))
def test_targets_are_fixed_at_the_draw(records, limit):
    assert draw_from(records, limit) == draw_from(records, limit + 1)[:limit]


@settings(deadline=None, max_examples=60)
@given(executions())
def test_a_class_is_drawn_from_only_when_higher_ones_are_exhausted(records):
    tokens = trainable_tokens(records)
    masked: set[tuple[str, int]] = set()
    for item in draw_from(records):
        higher = CLASSES[: CLASSES.index(item.role_class)]
        for leaf in _candidate_leaves(records):
            if leaf.role_class in higher:
                assert not (_path_tokens(records, leaf.request_id) & tokens) - masked
        expected = (_path_tokens(records, item.leaf_request_id) & tokens) - masked
        assert set(target_tokens(item)) == expected
        masked |= _path_tokens(records, item.leaf_request_id)


@settings(deadline=None, max_examples=60)
@given(executions(), LIMITS)
def test_the_same_seed_gives_the_same_choice(records, limit):
    assert draw_from(records, limit) == draw_from([*records], limit)


@settings(deadline=None, max_examples=60)
@given(executions(), LIMITS)
def test_every_candidate_is_admitted_beyond_the_limit_or_empty(records, limit):
    admission = admit_nodes(nodes_of_records(records), run_id="run", execution_id="e", version=1, max_trajectories=limit)
    candidates = [*admission.admitted, *admission.beyond, *admission.empty]
    assert sorted(item.leaf_request_id for item in candidates) == sorted(leaf.request_id for leaf in _candidate_leaves(records))
    assert sum(item.target_tokens for item in candidates) == len(trainable_tokens(records))
    assert all(item.target_tokens == 0 for item in admission.empty)
    if limit is None:
        assert not admission.beyond
    rows = admission_rows(admission, execution_id="e", version=1, max_trajectories=limit)
    assert sum(row["admitted"] for row in rows) == len(admission.admitted)


@pytest.mark.parametrize("counts", [(1, 2, 3, 4), (7, 1), (5, 5, 5)])
def test_draw_frequencies_follow_the_unmasked_counts(counts):
    """Chi-square over 6,000 seeds; the bound is its 1 - 1e-6 quantile, so that a right rule practically never fails."""
    records = [record(place, None, n_output=count) for place, count in enumerate(counts)]
    trials = 6000
    drawn = Counter(draw_from(records, 1, version)[0].leaf_request_id for version in range(trials))
    chi2 = sum(
        (drawn[item.request_id] - trials * count / sum(counts)) ** 2 / (trials * count / sum(counts))
        for item, count in zip(records, counts, strict=True)
    )
    assert chi2 < {2: 23.9, 3: 27.6, 4: 30.7}[len(counts)]


def test_later_draws_follow_the_lowered_counts():
    """Two leaves share a long prefix: once one is drawn the other only offers its own 2 tokens against a third leaf's 6."""
    records = [record(0, None, n_output=50), record(1, 0, n_output=2), record(2, 0, n_output=2), record(3, None, n_output=6)]
    second = Counter()
    for version in range(4000):
        first, then = draw_from(records, 2, version)[:2]
        if first.leaf_request_id != records[3].request_id:
            second[then.leaf_request_id == records[3].request_id] += 1
    share = second[True] / second.total()
    assert abs(share - 6 / 8) < 5 * math.sqrt(0.75 * 0.25 / second.total())


def test_draws_do_not_change_between_releases():
    """A recorded run must be replayable: these are the choices of the first release."""
    records = [record(place, None, n_output=place + 1) for place in range(6)]
    assert [int(item.leaf_request_id[-6:]) for item in draw_from(records, None, 7)] == GOLDEN_DRAWS


def test_c05_a_turn_under_two_branches_trains_once():
    """In the other branch it is context; nothing that has no target is shipped."""
    records = [record(0, n_output=4), record(1, 0, n_output=3), record(2, 0, n_output=3), record(3, 1, n_output=2, trainable=False)]
    rows = materialise(records, draw_from(records))
    assert len(rows) == 2
    shared = set(records[0].output_ids)
    trained = [int(token) for row in rows for token in row.token_ids[row.targets]]
    assert sorted(trained) == sorted(token for item in records[:3] for token in item.output_ids)
    assert [len(shared & set(row.token_ids[row.targets].tolist())) for row in rows] == [4, 0]
    assert all(shared <= set(row.token_ids.tolist()) for row in rows)
    assert all(row.targets[-1] for row in rows)
    assert not set(records[3].output_ids) & {int(token) for row in rows for token in row.token_ids}


def test_c25_a_failure_without_a_trace_has_nothing_to_admit():
    assert admit([], run_id="run", execution_id="g00001-00", version=0, max_trajectories=5) == []
    assert materialise([], []) == []
    untrained = [record(0, trainable=False), record(1, 0, n_output=0)]
    assert draw_from(untrained) == []


def test_a_long_chain_and_a_broad_tree_are_no_problem():
    chain = [record(place, place - 1 if place else None, n_output=1) for place in range(5000)]
    assert [item.target_tokens for item in draw_from(chain)] == [5000]
    broad = [record(0)] + [record(place, 0, n_output=1) for place in range(1, 3000)]
    assert sum(item.target_tokens for item in draw_from(broad)) == 2999 + 2


def test_a_record_before_its_parent_is_refused():
    with pytest.raises(BadRecord, match="its parent"):
        draw_from([record(1, 0), record(0)])


def _candidate_leaves(records: list[RequestRecord]) -> list[RequestRecord]:
    """Trainable nodes without a trainable node below them (a tail without targets is never part of a candidate)."""
    tokens = {request_id for request_id, _ in trainable_tokens(records)}
    inner = {request_id for leaf in tokens for request_id in path_to(records, leaf)[:-1]}
    return [item for item in records if item.request_id in tokens - inner]


def _path_tokens(records: list[RequestRecord], leaf: str) -> set[tuple[str, int]]:
    by_id = {item.request_id: item for item in records}
    return {(name, place) for name in path_to(records, leaf) for place in range(len(by_id[name].output_ids))}


GOLDEN_DRAWS = [5, 4, 2, 3, 0, 1]
