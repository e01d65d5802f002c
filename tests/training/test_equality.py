"""The update equals that of one process doing the batch unpacked in one go, whatever the layout, the cells, the pauses and the packing."""

from typing import Any

import pytest
from training_cases import Case

from gyre_lib.benchmarks.equality import largest_difference
from gyre_lib.training.local_cells import LocalCells, train_batch
from gyre_lib.training.packing import PackingBuffer, PackingSettings

PACKED, UNPACKED = 256, 1
PAUSES = {0: 1, 1: 3, 2: 2}


def check(
    case: Case, row_tokens: int = PACKED, pauses: dict[int, int] | None = None, joins: list[dict[int, int]] | None = None, **sizes: Any
):
    """Three steps; gradients of each and the weights after the last against the reference."""
    buffer = PackingBuffer(PackingSettings(row_tokens=row_tokens, data_parallel=sizes.get("dp", 1), row_limit_tokens=1024))
    reports = []
    with LocalCells(case.model_dir, buffer, case.settings, **sizes) as cells:
        for step, groups in enumerate(case.batches):
            report, streams = train_batch(cells, step, groups, pauses=pauses, joins=joins[step] if joins else None)
            expected, gradients = case.steps[step]
            assert largest_difference(cells.call(0, "gradients"), gradients) <= 1e-5
            assert report.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-5)
            assert report.metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
            assert report.executions == sum(len(group.executions) for group in groups)
            gated = report.metrics["gate_fraction_executions"] * report.metrics["trained_executions"]
            assert gated == pytest.approx(expected["gated"], abs=1e-6)
            for reports_of_cell in streams.values():
                assert all(stream.startups <= 1 and stream.drains <= 1 for stream in reports_of_cell)
            reports.append((report, streams))
        for cell in range(reports[-1][0].cells):
            assert largest_difference(cells.call(cell, "weights"), case.weights) <= 1e-5
    return reports


@pytest.mark.parametrize(
    "sizes",
    [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()) or "one",
)
def test_layouts_of_one_cell(untied: Case, sizes: dict[str, int]) -> None:
    check(untied, pauses=PAUSES, **sizes)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_tied_embedding(tied: Case, sizes: dict[str, int]) -> None:
    check(tied, **sizes)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "pp": 2}, {"cells": 2, "dp": 2}], ids=str)
def test_mixture_of_experts(experts: Case, sizes: dict[str, int]) -> None:
    """Experts split over the tensor ranks, or shared out among them whole."""
    check(experts, joins=[{1: 1}] * 3 if "cells" in sizes else None, **sizes)


def test_satellites_join_at_any_micro_step(untied: Case) -> None:
    reports = check(untied, cells=3, pauses=PAUSES, joins=[{1: 0, 2: 3}, {1: 1, 2: 1}, {1: 4, 2: 9}])
    assert [report.cells for report, _ in reports] == [3, 3, 3]


def test_a_burst_may_grow_and_shrink(untied: Case) -> None:
    reports = check(untied, cells=2, joins=[{}, {1: 2}, {1: 0}])
    assert [report.cells for report, _ in reports] == [1, 2, 2]


def test_cells_of_pipelines(untied: Case) -> None:
    check(untied, cells=2, pp=2, dp=2, pauses=PAUSES, joins=[{1: 1}] * 3)


@pytest.mark.parametrize("sizes", [{}, {"cells": 2, "pp": 2}], ids=str)
def test_unpacked_rows(untied: Case, sizes: dict[str, int]) -> None:
    """One row in each microbatch: every execution of several trajectories is scored first, its rows lie in several cells."""
    joins = [{1: 0}] * 3 if "cells" in sizes else None
    reports = check(untied, row_tokens=UNPACKED, joins=joins, **sizes)
    assert reports[0][0].metrics["scored_tokens"] > 0
    if joins:
        assert all(streams[1][0].micro_steps > 0 for _, streams in reports)


def test_more_rows_at_once_than_one_lookahead(untied: Case) -> None:
    """Everything at once, no pause: the same."""
    check(untied, row_tokens=1024, dp=2)
