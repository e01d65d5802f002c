"""The search over each policy's free choices, on a machine small enough to search in a second."""

from fractions import Fraction

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.simulation.tuning import FAMILIES, candidates, depths, plan, tune
from gyre_lib.simulation.workload import Workload, load_workload


@pytest.fixture(scope="module")
def small() -> Workload:
    data = load_workload("nl2repo-122b").model_dump(mode="json")
    data["cluster"] |= {"nodes": 4, "nodes_per_cell": 1, "nodes_per_rank": 1, "concurrency_per_node": 4}
    data["training"] |= {"node_seconds_per_step": 5000}
    data["batch"] |= {"groups_per_batch": 2, "executions_per_group": 3}
    return Workload.model_validate(data)


def test_depths_lie_on_the_staleness_line(small):
    assert depths(small, Fraction(3, 2)) == [(Fraction(3, 2), 1), (Fraction(1), 2), (Fraction(1, 2), 3), (Fraction(0), 4)]
    with pytest.raises(InputError, match=r"no \(phi, mu\)"):
        depths(small, Fraction(1, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_fit_the_cluster(small, family):
    found = list(candidates(small, family, Fraction(1)))
    assert found and all(method.settings(small, 12).bursts * method.mu == 12 for method in found)


def test_tune_compares_the_best_of_each_family_at_equal_staleness(small):
    rows = tune(small, ["1"], range(3), steps=12)
    *rows, bound = rows
    assert {row.figure for row in rows} == {f"E[d]=1 best {family}" for family in FAMILIES}
    assert [row.simulated for row in rows] == sorted(row.simulated for row in rows)
    assert bound.figure == "E[d]=1 elastic if training took no time" and bound.over_elastic < 1
    (reference,) = [row for row in rows if row.figure.endswith("best elastic")]
    assert reference.over_elastic == 1.0
    assert all(row.mean_staleness <= 1 for row in rows)


def test_plan_names_settings_of_a_run_configuration(small):
    values = {row["figure"]: row["simulated"] for row in plan(small, "1.5", range(3), steps=12)}
    assert values["cells.count"] * values["nodes per cell"] == 4
    assert values["cells.capacity"] == 4 * values["nodes per cell"]
    assert values["scheduling.extra_dispatch"] + (values["scheduling.steps_per_burst"] - 1) / 2 == 1.5


def test_steps_that_fit_no_burst_are_refused(small):
    data = small.model_dump(mode="json")
    data["batch"]["groups_per_batch"] = 3
    with pytest.raises(InputError, match="7 steps are no whole number of bursts"):
        tune(Workload.model_validate(data), ["1.5"], range(2), steps=7)
