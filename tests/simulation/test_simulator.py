"""The simulated cluster: laws that must hold whatever the calibration."""

from fractions import Fraction

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.simulation.engine_pool import EnginePool
from gyre_lib.simulation.executions import Execution, SimulatedGroup
from gyre_lib.simulation.methods import METHODS_122B, method
from gyre_lib.simulation.queries import Queries
from gyre_lib.simulation.runs import simulate
from gyre_lib.simulation.simulator import Simulation
from gyre_lib.simulation.workload import Workload, load_workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload("nl2repo-122b")


def changed(workload: Workload, **parts) -> Workload:
    data = workload.model_dump(mode="json")
    for part, values in parts.items():
        data[part] |= values
    return Workload.model_validate(data)


def test_engine_shares_its_speed_in_virtual_time():
    pool = EnginePool([2], load_share=0.5)
    a, b = (Execution(name, SimulatedGroup("g", 0, 0, 1, 1.0), 0.0, 0.0, False, False) for name in "ab")
    pool.add(0, a, 100.0, now=0.0)
    assert pool.next_finish[0] == pytest.approx(75.0)
    pool.add(0, b, 100.0, now=30.0)
    assert pool.next_finish[0] == pytest.approx(30 + 60)
    assert pool.finish(0, 90.0) is a
    assert pool.next_finish[0] == pytest.approx(90 + 40 * 0.75)
    ((left, moved),) = pool.drain(0, 100.0)
    assert moved is b and left == pytest.approx(40 - 10 / 0.75)
    assert pool.load == [0]


def test_stopped_execution_does_not_finish():
    pool = EnginePool([4], load_share=0.0)
    a, b = (Execution(name, SimulatedGroup("g", 0, 0, 1, 1.0), 0.0, 0.0, False, False) for name in "ab")
    pool.add(0, a, 10.0, now=0.0)
    pool.add(0, b, 20.0, now=0.0)
    pool.remove(a, 5.0)
    assert pool.next_finish[0] == 20.0 and pool.finish(0, 20.0) is b


def test_queries_are_common_to_all_methods(workload):
    one, other = Queries(workload, 7, 16), Queries(workload, 7, 16)
    assert one[200] == other[200] and one[3] == other[3]
    assert one[3] != Queries(workload, 8, 16)[3]


def test_same_seed_same_run(workload):
    first, second = (simulate(workload, METHODS_122B["E0"], 6, seed=3) for _ in range(2))
    assert first.total_s == second.total_s and first.step_ends_s == second.step_ends_s


@pytest.mark.parametrize("name", METHODS_122B)
def test_every_method_of_the_ablation_consumes_what_it_should(workload, name):
    run = simulate(workload, METHODS_122B[name], 12, seed=1)
    assert len(run.step_ends_s) == 12
    assert run.step_ends_s == sorted(run.step_ends_s)
    assert 0 <= run.slack < 1
    assert run.mean_staleness <= METHODS_122B[name].mean_staleness


def test_colocate_without_extra_dispatch_has_the_exact_mean_staleness(workload):
    assert simulate(workload, METHODS_122B["C0"], 12, seed=2).mean_staleness == 1.5


def test_durations_respect_the_wall_clock_limits(workload):
    run = simulate(workload, METHODS_122B["E0"], 12, seed=4)
    assert max(run.durations.executions_s) <= workload.execution.overall_limit_s + 1e-6
    assert run.durations.harness_timeouts > 0 and run.durations.overall_timeouts > 0


def test_failures_and_oversampling_end_the_run_with_every_group_counted(workload):
    rough = changed(workload, execution={"infrastructure_failure_rate": 0.05, "evaluation_failure_rate": 0.2})
    run = simulate(rough, method("elastic", 0.5, 3, 4, oversampling=2), 6, seed=5)
    assert run.durations.failures > 0 and len(run.step_ends_s) == 6


def test_groups_that_always_fail_are_lost_and_still_counted(workload):
    broken = changed(workload, execution={"infrastructure_failure_rate": 1.0})
    for rule in ("placeholder", "requeue"):
        run = simulate(broken, method("elastic", 0.5, 3, 4, lost_groups=rule), 3, seed=5)
        assert len(run.step_ends_s) == 3


def test_recorded_queries_replace_the_laws(workload):
    recorded = changed(workload, execution={"recorded": [[[100.0, 10.0], [200.0, 20.0]], [[50.0, 5.0]]]})
    query = Queries(recorded, 0, 16)[0]
    assert set(query.work_s) <= {100.0, 200.0} or set(query.work_s) == {50.0}
    assert len(query.work_s) == 16


def test_training_work_has_mean_one_whatever_its_exponent(workload):
    for exponent in (0.0, 1.0):
        queries = Queries(changed(workload, training={"work_exponent": exponent}), 1, 16)
        mean = sum(queries[q].training_work for q in range(4000)) / 4000
        assert mean == pytest.approx(1.0, abs=0.05)


def test_recording_follows_roles_and_capacity(workload):
    settings = METHODS_122B["E0"].settings(workload, 3)
    run = Simulation(workload, settings, nodes_per_cell=4, seed=0, record=True).run()
    assert all(running <= capacity for _, _, running, capacity in run.levels if capacity)
    order = [cell for _, cell, role in run.roles if role == "to_training"]
    assert order == sorted(order)


def test_small_cells_with_a_tight_pool_still_end():
    tight = changed(
        load_workload("nl2repo-122b"), cluster={"concurrency_per_node": 1}, batch={"groups_per_batch": 2, "executions_per_group": 3}
    )
    for phi in (0, 0.5, 1):
        run = simulate(tight, method("elastic", phi, 2, 32), 4, seed=0)
        assert len(run.step_ends_s) == 4


def test_impossible_methods_are_refused_before_anything_runs(workload):
    with pytest.raises(InputError, match="40 of the cluster's 32 nodes"):
        method("async", 1, 1, 40).settings(workload, 4)
    with pytest.raises(InputError, match="no whole number of 5-node cells"):
        method("elastic", 1, 1, 5).settings(workload, 4)
    with pytest.raises(InputError, match="not a multiple of mu = 3"):
        method("elastic", 0.5, 3, 4).settings(workload, 4)
    with pytest.raises(InputError, match=r"phi\*B must be an integer"):
        Method = method("elastic", Fraction(1, 3), 3, 4)
        Method.settings(workload, 3)


def test_broken_workload_file_names_the_field(tmp_path, workload):
    file = tmp_path / "mine.yaml"
    with pytest.raises(InputError, match="no such workload file; shipped ones: nl2repo-122b"):
        load_workload(tmp_path / "none.yaml")
    data = workload.model_dump_json().replace('"load_share":', '"load_shar":')
    file.write_text(data)
    with pytest.raises(InputError, match=r"engine\.load_share"):
        load_workload(file)
