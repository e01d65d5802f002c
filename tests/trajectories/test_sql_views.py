"""Every shipped view over the small recorded run gives the rows that were worked out for it; the connection can only read."""

import json
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from recorded_run import T0, layout_writers, write_recorded_run
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE, WordLevel

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.admission import admit_nodes, nodes_of_table
from gyre_lib.trajectories.materialisation import materialise_table
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.views import VIEWS_FOLDER, ask, find_view, needs_vocabulary, open_connection, shipped_views

EXPECTED = Path(__file__).with_name("expected_views.json")
"""Rows by view; Unix times as seconds after T0. Written by hand-checking the output of `python tests/trajectories/test_sql_views.py`."""

ARGUMENTS = {
    "execution_timeline": ["g00001-00"],
    "trajectory_tree": ["g00001-00"],
    "rendered_trajectory": ["g00001-00", "1"],
    "execution_diff": ["g00001-00", "g00001-01"],
    "execution_diff_calls": ["g00001-00", "g00001-01"],
}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_recorded_run(tmp_path_factory.mktemp("sealed"))


@pytest.fixture(scope="module")
def connection(layout: RunLayout) -> duckdb.DuckDBPyConnection:
    return open_connection(layout)


def rows_of(connection: duckdb.DuckDBPyConnection, view: str) -> list[dict]:
    answer = ask(connection, *find_view(view).call(ARGUMENTS.get(view, [])))
    return [{name: _plain(name, value) for name, value in row.items()} for row in answer.to_pylist()]


def _plain(name: str, value: object) -> object:
    if isinstance(value, Decimal):
        return int(value)
    if isinstance(value, float):
        return round(value - T0 if name in ("started_s", "ended_s") else value, 6)
    return value


@pytest.mark.parametrize("view", sorted(shipped_views()))
def test_every_view_has_its_expected_rows(connection, view):
    assert rows_of(connection, view) == json.loads(EXPECTED.read_text())[view]


def test_every_view_says_its_question():
    for view in shipped_views().values():
        assert view.question.endswith("?"), view.name
        assert (VIEWS_FOLDER / f"{view.name}.sql").exists()


def test_open_and_sealed_segments_answer_together(tmp_path):
    """The same run, half of each table still in open segments of live writers: the same answers."""
    layout = write_recorded_run(tmp_path, close=False)
    assert list(layout.segments.rglob("*.arrow"))
    assert list(layout.segments.rglob("*.parquet"))
    connection = open_connection(layout)
    for view, expected in json.loads(EXPECTED.read_text()).items():
        assert rows_of(connection, view) == expected
    for writer in layout_writers.pop(layout.root).values():
        writer.close()


def test_admission_works_from_an_answer_of_duckdb(connection):
    """The candidates of an execution read through SQL: the same draws and rows as recorded."""
    requests = ask(connection, "SELECT * FROM requests WHERE execution_id = 'g00001-00' ORDER BY sequence")
    admission = admit_nodes(nodes_of_table(requests), run_id="tiny", execution_id="g00001-00", version=0, max_trajectories=2)
    recorded = ask(
        connection,
        "SELECT leaf_request_id, target_tokens FROM admissions WHERE admitted AND execution_id = 'g00001-00' ORDER BY trajectory",
    )
    assert [
        {"leaf_request_id": item.leaf_request_id, "target_tokens": item.target_tokens} for item in admission.admitted
    ] == recorded.to_pylist()
    shown = ask(connection, "SELECT token_id, target FROM rendered_trajectory('g00001-00', 1)").to_pydict()
    row = materialise_table(requests, admission.admitted)[1]
    assert (row.token_ids.tolist(), row.targets.tolist()) == (shown["token_id"], shown["target"])


def test_later_rows_supersede_earlier_ones_and_the_log_keeps_both(connection):
    status = ask(connection, "SELECT status FROM groups WHERE group_id = 'g00001'").column(0).to_pylist()
    logged = ask(connection, "SELECT status FROM groups_log WHERE group_id = 'g00001' ORDER BY recorded_s").column(0).to_pylist()
    assert (status, logged) == (["consumed"], ["queued", "consumed"])


@pytest.mark.parametrize(
    "query",
    [
        "COPY requests TO '{folder}/out.csv'",
        "COPY (SELECT 1) TO '{folder}/out.parquet'",
        "CREATE TABLE x AS SELECT 1",
        "INSERT INTO executions VALUES (1)",
        "DROP VIEW groups",
        "ATTACH '{folder}/other.db'",
        "INSTALL httpfs",
        "LOAD '{folder}/x.duckdb_extension'",
        "SET enable_external_access = true",
        "SELECT * FROM read_parquet('{segment}')",
        "SELECT * FROM '{segment}'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('{folder}/x.csv')",
        "SELECT * FROM glob('/*')",
        "SELECT 1; SELECT 2",
        "EXPORT DATABASE '{folder}/copy'",
        "PRAGMA database_list",
        "SELECT * FROM layout",
        "",
    ],
)
def test_a_query_can_only_read_the_run(connection, layout, tmp_path, query):
    (segment, *_) = layout.segments.rglob("*.parquet")
    before = sorted((path, path.stat().st_mtime_ns) for path in layout.root.rglob("*"))
    with pytest.raises(InputError) as error:
        ask(connection, query.format(folder=tmp_path, segment=segment))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    assert sorted((path, path.stat().st_mtime_ns) for path in layout.root.rglob("*")) == before


@pytest.mark.parametrize(
    "query", ["COPY requests TO '{folder}/out.csv'", "SELECT * FROM '{segment}'", "RESET enable_external_access", "INSTALL httpfs"]
)
def test_a_notebook_connection_is_locked_too(layout, tmp_path, query):
    (segment, *_) = layout.segments.rglob("*.parquet")
    with pytest.raises(duckdb.Error):
        open_connection(layout).sql(query.format(folder=tmp_path, segment=segment))
    assert not list(tmp_path.iterdir())


def test_wrong_queries_get_one_line(connection):
    with pytest.raises(InputError, match='Binder Error: Referenced column "nope" not found'):
        ask(connection, "SELECT nope FROM requests")
    with pytest.raises(InputError, match="Parser Error: syntax error at or near"):
        ask(connection, "SELEC 1")
    with pytest.raises(InputError, match="view nope: no such view; there are admitted_by_class, advantages, "):
        find_view("nope")
    with pytest.raises(InputError, match="view execution_diff: takes one, other, got 1"):
        find_view("execution_diff").call(["x"])


def test_a_view_file_that_is_none_is_named(tmp_path):
    (tmp_path / "broken.sql").write_text("SELECT 1")
    with pytest.raises(InputError, match=r"broken\.sql"):
        shipped_views(tmp_path)


def test_token_texts_come_from_the_runs_tokenizer(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    tokenizer = Tokenizer(BPE(vocab={"Ġ": 0, "a": 1, "Ġa": 2, "Ã": 3, "¤": 4}, merges=[("Ġ", "a")]))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    layout.config.write_text(f"model: {{path: '{tmp_path}'}}\n")
    SegmentWriter(layout, "engines", "coordinator").close()
    words = ask(open_connection(layout), "SELECT text, bytes FROM vocabulary WHERE token_id > 1 ORDER BY token_id").to_pylist()
    assert words == [{"text": " a", "bytes": b" a"}, {"text": "\ufffd", "bytes": b"\xc3"}, {"text": "\ufffd", "bytes": b"\xa4"}]
    layout.published.joinpath("2").mkdir(parents=True)
    Tokenizer(WordLevel({"mine": 7}, unk_token="mine")).save(str(layout.published / "2" / "tokenizer.json"))
    assert ask(open_connection(layout), "SELECT token_id, text FROM vocabulary").to_pylist() == [{"token_id": 7, "text": "mine"}]
    assert ask(open_connection(layout, vocabulary=False), "SELECT * FROM vocabulary").num_rows == 0
    assert needs_vocabulary("SELECT * FROM rendered_trajectory('a', 0)")
    assert not needs_vocabulary("SELECT * FROM role_time")


def test_c20_groups_of_a_crash_are_accounted_for_once(tmp_path):
    """3 executions finished, 2 run, 1 is queued at the crash. After it the 2 and the 1 run again: each group is consumed once."""
    layout = RunLayout(tmp_path / "run")
    rows = [
        {"group_id": f"g{number}", "status": status, "executions": 1}
        for number, status in enumerate(["ready"] * 3 + ["running"] * 2 + ["queued"])
    ]
    SegmentWriter(layout, "groups", "coordinator").append(rows)
    with SegmentWriter(layout, "groups", "coordinator-again") as writer:
        for status, step in (("running", None), ("ready", None), ("consumed", 0)):
            writer.append([{"group_id": f"g{number}", "status": status, "executions": 1, "consumed_step": step} for number in range(6)])
        assert ask(open_connection(layout), "SELECT status, groups, consumed_twice FROM group_accounting").to_pylist() == [
            {"status": "consumed", "groups": 6, "consumed_twice": 0}
        ]
        writer.append([{"group_id": "g0", "status": "consumed", "executions": 1, "consumed_step": 3}])
    assert ask(open_connection(layout), "SELECT consumed_twice FROM group_accounting").column(0).to_pylist() == [1]


def test_c23_advantages_are_taken_by_group_id(tmp_path):
    """Groups of 4, 3 and 4, interleaved; the one whose rewards are all 5.0 gets zeros."""
    rewards = {"g1": [0.0, 1.0, 1.0, 0.0], "g2": [5.0, 5.0, 5.0], "g3": [1.0, 0.0, 0.0, 0.0]}
    rows = [(f"{group}-{place}", group, score) for group, scores in rewards.items() for place, score in enumerate(scores)]
    found = advantages(tmp_path, [rows[place * 7 % 11] for place in range(11)])
    assert [found[f"g1-{place}"] for place in range(4)] == pytest.approx([-1, 1, 1, -1], abs=1e-5)
    assert [found[f"g2-{place}"] for place in range(3)] == [0, 0, 0]
    assert [found[f"g3-{place}"] for place in range(4)] == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], abs=1e-5)


def test_c24_the_baseline_counts_executions_and_one_valid_gives_none(tmp_path):
    found = advantages(tmp_path, [("g1-0", "g1", 1.0), ("g1-1", "g1", 0.0), ("g2-0", "g2", 1.0), ("g2-1", "g2", None)])
    assert found == pytest.approx({"g1-0": 1.0, "g1-1": -1.0, "g2-0": None}, abs=1e-5)


def test_c25_an_infrastructure_failure_is_no_reward(connection):
    """It has no row among the rewards, no admission, and lowers no mean."""
    name = "execution_id = 'g00004-00'"
    assert ask(connection, f"SELECT outcome, score FROM executions WHERE {name}").to_pylist() == [
        {"outcome": "InfrastructureFailed", "score": None}
    ]
    assert ask(connection, f"SELECT * FROM advantages WHERE {name}").num_rows == 0
    assert ask(connection, f"SELECT * FROM admissions WHERE {name}").num_rows == 0
    assert ask(connection, "SELECT mean_score FROM score_by_version WHERE version = 1").column(0).to_pylist() == [1.0]


def advantages(folder: Path, rows: list[tuple[str, str, float | None]]) -> dict[str, float | None]:
    layout = RunLayout(folder / "run")
    with SegmentWriter(layout, "executions", "coordinator") as writer:
        writer.append(
            [
                {
                    "execution_id": execution,
                    "group_id": group,
                    "score": score,
                    "validity": "unresolved" if score is None else "valid",
                    "train": True,
                }
                for execution, group, score in rows
            ]
        )
    return {row["execution_id"]: row["advantage"] for row in ask(open_connection(layout), "SELECT * FROM advantages").to_pylist()}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        opened = open_connection(write_recorded_run(Path(scratch)))
        views = {view: rows_of(opened, view) for view in sorted(shipped_views())}
    lines = [f"{json.dumps(view)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]" for view, rows in views.items()]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
