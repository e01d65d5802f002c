"""What must be true of any run, checked on a short real one whose burst flow was killed with SIGKILL and launched again."""

import collections
import itertools

import httpx
import pytest

from gyre_lib.coordination.journal import read_entries
from gyre_lib.coordination.run_figures import run_figures
from gyre_lib.coordination.run_report import write_report
from gyre_lib.coordination.services_file import read_services
from gyre_lib.trajectories.store import connect

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BURSTS, STEPS, GROUPS, EXECUTIONS, EXTRA_GROUPS = 2, 4, 4, 4, 2


@pytest.fixture(scope="module")
def events(short_run):
    files = sorted(short_run.layout.journal.glob("burst-*.jsonl"))
    return [entry for entry in itertools.chain.from_iterable(map(read_entries, files)) if "event" in entry]


@pytest.fixture(scope="module")
def figures(short_run):
    return run_figures(short_run.layout)


def query(short_run, sql):
    with connect(short_run.layout.root) as database:
        return database.execute(sql).fetchall()


def test_flow_was_killed_inside_a_burst_and_the_run_finished(short_run, figures):
    assert short_run.killed_at["burst"] == 0
    assert short_run.killed_at["terminated"] > 0
    assert figures.scheduler["phase"] == "done"
    assert figures.scheduler["version"] == STEPS


def test_nothing_was_dispatched_twice_and_no_execution_was_lost(events):
    dispatched = [e for entry in events for a in entry["actions"] if a["kind"] == "Dispatch" for group in a["executions"] for e in group]
    groups = EXTRA_GROUPS + STEPS * GROUPS
    assert len(dispatched) == len(set(dispatched)) == groups * EXECUTIONS
    launched = [e for entry in events for a in entry["actions"] if a["kind"] == "Launch" for e in a["executions"]]
    assert len(launched) == len(set(launched))
    ended = collections.Counter(entry["event"]["execution"] for entry in events if entry["event"]["kind"] == "ExecutionEnded")
    assert set(ended) <= set(dispatched)
    assert max(ended.values()) == 1


def test_every_group_was_consumed_once(events, short_run):
    assigned = [entry["event"]["group"] for entry in events if entry["event"]["kind"] == "GroupAssigned"]
    assert len(assigned) == len(set(assigned)) == STEPS * GROUPS
    consumed = query(short_run, "SELECT count(*), count(DISTINCT group_id) FROM groups WHERE status = 'consumed'")
    assert consumed == [(STEPS * GROUPS, STEPS * GROUPS)]


def test_staleness_identity_holds_exactly(figures):
    assert figures.scheduler["identity_ok"]
    assert figures.scheduler["identity_checks"] == BURSTS


def test_every_step_counts_all_executions_of_its_batch(short_run):
    rows = query(short_run, "SELECT step, executions, groups FROM train_steps ORDER BY step")
    valid = dict(query(short_run, "SELECT consumed_step, sum(valid_executions) FROM groups WHERE status = 'consumed' GROUP BY 1"))
    assert [step for step, _, _ in rows] == list(range(STEPS))
    for step, executions, groups in rows:
        assert (executions, groups) == (valid[step], GROUPS)


def test_a_satellite_trained_a_batch_with_the_core(figures):
    assert max(row["cells"] for row in figures.steps) == 2
    joined = [row for row in figures.transitions if row["direction"] == "to_training" and row["outcome"] == "done"]
    assert {row["cell"] for row in joined} == {0, 1}
    satellite = next(row for row in joined if row["cell"] == 1)
    assert {"route", "drain", "release", "pull_read", "pull_verify"} <= set(satellite["phases"])
    assert satellite["weight_bytes"] > 0


def test_harness_saw_no_error_and_tokens_belong_to_published_versions(short_run, figures):
    assert figures.proxy["harness_visible_errors"] == 0
    versions = query(short_run, "SELECT DISTINCT span.version FROM (SELECT unnest(version_spans) AS span FROM requests) ORDER BY 1")
    assert {version for (version,) in versions} <= {0, 2, 4}


def test_trainer_and_engine_agree_on_log_probs_at_equal_version(short_run):
    rows = query(short_run, "SELECT logprob_mismatch_max FROM train_steps WHERE logprob_mismatch_max IS NOT NULL")
    assert all(value < 1e-4 for (value,) in rows)


def test_every_published_version_is_served_and_exported(short_run):
    assert query(short_run, "SELECT DISTINCT version FROM publications WHERE ok ORDER BY 1") == [(2,), (4,)]
    assert query(short_run, "SELECT count(*) FROM publications WHERE NOT ok") == [(0,)]
    assert list((short_run.layout.published / "4").glob("*.safetensors"))


def test_sql_answered_while_the_run_went_on(short_run):
    assert len(short_run.live_rows) >= 4


def test_held_out_executions_never_train(short_run):
    assert short_run.held_out["version"] == STEPS
    assert short_run.held_out["executions"] > 0
    trained = query(short_run, "SELECT count(*) FROM admissions a JOIN executions e USING (execution_id) WHERE NOT e.train")
    assert trained == [(0,)]


def test_all_processes_fit_in_memory(short_run):
    assert 0 < short_run.memory_mib < 12 * 1024


def test_bursts_are_flows_with_one_task_run_per_action(short_run):
    body = {"flows": {"name": {"any_": ["burst"]}}}
    bursts = httpx.post(f"{short_run.api_url}/flow_runs/filter", json=body).json()
    finished = [run for run in bursts if run["state_type"] == "COMPLETED"]
    assert len(finished) == BURSTS
    names = set()
    for run in bursts:
        tasks = httpx.post(f"{short_run.api_url}/task_runs/filter", json={"flow_runs": {"id": {"any_": [run["id"]]}}}).json()
        names |= {task["name"] for task in tasks}
    for wanted in ("dispatch 10 groups at version 0", "train step 0", "cell 0 to training", "cell 1 to training", "publish version 2"):
        assert wanted in names
    assert any(name.startswith("roll out group g0000") for name in names)
    assert any(name.startswith("evaluate g0000") for name in names)
    artifacts = httpx.post(f"{short_run.api_url}/artifacts/filter", json={}).json()
    assert {"short-burst-0", "short-burst-1", "short-step-0", "short-scores"} <= {artifact["key"] for artifact in artifacts}


def test_report_is_one_self_contained_page(short_run):
    page = write_report(short_run.layout).read_text()
    for words in ("Role timeline", "Score per burst", "Water level", "Transitions", "identity holds exactly"):
        assert words in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_services_are_listed_with_their_logs(short_run):
    services = read_services(short_run.layout)
    assert services is not None
    names = {process.name for process in services.processes}
    assert {"coordinator", "proxy-0", "rank-0-0", "rank-1-0", "worker-0", "engine-cell-0", "engine-cell-1"} <= names
    assert all(process.alive for process in services.processes)
