"""Materialised rows against a naive walk of the path, from records and from Arrow."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import executions, record

from gyre_lib.trajectories import materialisation
from gyre_lib.trajectories.admission import admit, admit_nodes, nodes_of_records, nodes_of_table
from gyre_lib.trajectories.materialisation import materialise, materialise_table, nodes_of
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.store import record_to_row
from gyre_lib.trajectories.tito_record import BadRecord, VersionSpan


def admitted_of(records, limit=None):
    return admit(records, run_id="run", execution_id=records[0].execution_id, version=3, max_trajectories=limit)


def as_table(records) -> pa.Table:
    rows = [record_to_row(item) | {"recorded_s": 1.0} for item in records]
    return pa.Table.from_pylist(rows, SCHEMAS["requests"])


@settings(deadline=None, max_examples=60)
@given(executions(), st.none() | st.integers(1, 4))
def test_rows_are_the_paths_with_aligned_masks(records, limit):
    admitted = admitted_of(records, limit)
    by_id = {item.request_id: item for item in records}
    for item, row in zip(admitted, materialise(records, admitted), strict=True):
        path = [by_id[name] for name in item.path_request_ids]
        assert row.token_ids.tolist() == [token for node in path for token in (*node.input_ids, *node.output_ids)]
        expected = {}
        for run in item.targets:
            node = path[run.node]
            for place in range(run.start, run.end):
                expected[node.output_ids[place]] = node.output_logprobs[place]
        for token, target, logprob, version in zip(row.token_ids, row.targets, row.logprobs, row.versions, strict=True):
            assert target == (int(token) in expected)
            assert logprob == pytest.approx(expected.get(int(token), 0.0))
            assert version == (0 if target else -1)
        assert row.target_count == item.target_tokens
        assert len(row.token_ids) == item.path_tokens
        assert (row.execution_id, row.group_id) == ("g00001-00", "g00001")


@settings(deadline=None, max_examples=60)
@given(executions(), st.none() | st.integers(1, 4))
def test_arrow_gives_the_same_nodes_and_rows(records, limit):
    table = as_table(records)
    nodes = nodes_of_table(table)
    assert nodes == nodes_of_records(records)
    admitted = admit_nodes(nodes, run_id="run", execution_id="g00001-00", version=3, max_trajectories=limit).admitted
    assert admitted == admitted_of(records, limit)
    for one, other in zip(materialise(records, admitted), materialise_table(table, admitted), strict=True):
        for name, value in dataclasses.asdict(one).items():
            assert np.array_equal(value, getattr(other, name))


def test_token_arrays_from_arrow_are_views():
    table = as_table([record(0, n_input=100), record(1, 0)])
    column = table.column("input_ids").chunk(0).values.to_numpy(zero_copy_only=True)
    nodes = nodes_of(table, {"g00001-00-000000"})
    assert np.shares_memory(nodes["g00001-00-000000"].input_ids, column)


def test_paths_that_are_not_admitted_are_never_expanded(monkeypatch):
    """Of 50 leaves one is admitted: its two nodes are the only ones whose tokens are touched."""
    records = [record(0)] + [record(place, 0) for place in range(1, 51)]
    touched = []
    original = materialisation._of_record
    monkeypatch.setattr(materialisation, "_of_record", lambda item: touched.append(item.request_id) or original(item))
    admitted = admitted_of(records, 1)
    materialise(records, admitted)
    assert sorted(touched) == sorted(admitted[0].path_request_ids)


def test_c17_tokens_carry_the_version_that_served_them():
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3), VersionSpan(5, 3, 6)]
    records = [record(0, n_input=2, n_output=1, spans=[VersionSpan(3, 0, 1)]), record(1, 0, n_input=1, n_output=6, spans=spans)]
    (row,) = materialise(records, admitted_of(records))
    assert row.versions.tolist() == [-1, -1, 3, -1, 3, 3, 4, 5, 5, 5]
    stored = record_to_row(records[1])
    assert (stored["version_first"], stored["version_last"]) == (3, 5)


def test_c24_an_execution_weighs_by_its_rows_targets_not_by_their_number():
    """Three trajectories keep their execution's identity, so that a baseline can be taken over executions."""
    records = [record(0, n_output=1), *(record(place, 0) for place in (1, 2, 3))]
    rows = materialise(records, admitted_of(records))
    assert len(rows) == 3
    assert {row.execution_id for row in rows} == {"g00001-00"}
    assert sum(row.target_count for row in rows) == 7


def test_targets_at_two_temperatures_are_refused():
    records = [record(0), record(1, 0, temperature=0.5)]
    with pytest.raises(BadRecord, match="temperatures"):
        materialise(records, admitted_of(records))


def test_a_target_that_nothing_precedes_is_refused():
    records = [record(0, n_input=0)]
    with pytest.raises(BadRecord, match="nothing precedes"):
        materialise(records, admitted_of(records))
