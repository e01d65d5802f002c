"""`gyre sql` and `gyre show` over the recorded run: what they print, and how they refuse."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from recorded_run import write_recorded_run
from typer.testing import CliRunner

from gyre_lib.commands.show import show
from gyre_lib.commands.sql import sql
from gyre_lib.config.errors import InputError
from gyre_lib.trajectories.viewer import gather
from gyre_lib.trajectories.viewer_page import render_page
from gyre_lib.trajectories.views import open_connection

app = typer.Typer()
app.command("sql")(sql)
app.command("show")(show)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_recorded_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _runs_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_RUNS", str(runs))


def answer(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_sql_prints_a_table_json_csv_and_parquet(tmp_path, runs):
    query = "SELECT status, count(*) AS n FROM groups GROUP BY status ORDER BY status"
    assert answer("sql", "tiny", query).split() == ["status", "n", "consumed", "4", "queued", "2", "running", "1"]
    rows = [{"status": "consumed", "n": 4}, {"status": "queued", "n": 2}, {"status": "running", "n": 1}]
    assert json.loads(answer("sql", "tiny", query, "--json")) == {"rows": rows}
    assert answer("sql", "tiny", query, "--csv").split() == ["status,n", "consumed,4", "queued,2", "running,1"]
    answer("sql", "tiny", query, "--parquet", str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
    assert answer("sql", str(runs / "tiny"), "SELECT 1 AS one").split() == ["one", "1"]


def test_sql_shows_views_lists_them_and_describes_tables():
    assert len(json.loads(answer("sql", "tiny", "--view", "staleness", "--json"))["rows"]) == 4
    assert len(json.loads(answer("sql", "tiny", "--view", "trajectory_tree", "g00001-00", "--json"))["rows"]) == 7
    assert "word1" in answer("sql", "tiny", "--view", "rendered_trajectory", "g00001-00", "1")
    assert answer("sql", "tiny", "SELECT 'a' || chr(10) || 'b' AS text").splitlines() == ["text", "a\\nb"]
    listed = answer("sql", "tiny", "--list")
    assert "execution_diff(one, other)" in listed
    assert "How does the score change with the policy version?" in listed
    assert "v_t - v_d, in policy versions" in answer("sql", "tiny", "--columns", "groups")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sql", "tiny", "SELECT nope FROM groups"], 'Binder Error: Referenced column "nope" not found'),
        (["sql", "tiny", "--view", "nope"], "view nope: no such view; there are admitted_by_class"),
        (["sql", "tiny", "--view", "trajectory_tree"], "view trajectory_tree: takes execution, got 0"),
        (["sql", "missing", "SELECT 1"], r"run missing: no such run; looked at .*/missing and .*/missing \(the runs folder is GYRE_RUNS"),
        (["sql", "tiny"], "query: one query in quotes"),
        (["sql", "tiny", "--columns", "nope"], "table nope: no such table; there are requests"),
        (["sql", "tiny", "SELECT 1", "--csv", "--json"], "options: at most one"),
        (["sql", "tiny", "SELECT 1", "--parquet", "/nowhere/x.parquet"], "/nowhere/x.parquet: "),
        (["show", "tiny", "g00001-0"], "execution g00001-0: no such execution; there is g00001-00, g00001-01"),
        (["show", "missing", "x"], "run missing: no such run"),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as error:
        answer(*arguments)
    assert "\n" not in str(error.value)


def test_a_wrong_query_exits_with_2():
    command = [sys.executable, "-m", "gyre_lib.commands.main", "sql", "tiny", "SELECT nope FROM groups"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Binder Error:")
    assert done.stderr.count("\n") == 1


def test_show_prints_the_tree():
    text = answer("show", "tiny", "g00001-00")
    assert "outcome   Completed, score 1" in text
    assert "trajectories: 2 of 3 candidates admitted (limit 2)" in text
    tree = text.partition("\ntree\n")[2].splitlines()[:7]
    assert [re.match(r"  ( *)(\S) #(\d+)", line).groups() for line in tree] == [
        ("", "●", "0"), ("", "│", "1"), ("", "│", "4"), ("", "●", "2"), ("", "│", "3"), ("", "●", "5"), ("", "│", "6"),
    ]  # fmt: skip
    assert "v0,1" in tree[1]
    assert "moved cell-1 → standalone-0" in tree[1]
    assert "agent explore" in tree[3]
    assert "not trainable: given up" in tree[6]
    assert "no valid score" in answer("show", "tiny", "g00004-00")
    assert "without a valid score nothing is trained" in answer("show", "tiny", "g00004-00")


def test_the_page_is_self_contained_and_tokens_stay_text(tmp_path, runs):
    page = tmp_path / "page.html"
    assert answer("show", "tiny", "g00001-00", "--html", str(page)) == f"wrote {page}\n"
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|@import", text)
    record = gather(open_connection(write_recorded_run(tmp_path)), "g00001-00")
    record.texts[1] = "</script><script>alert(1)</script><!--"
    assert render_page(record, "tiny").count("<script") == text.count("<script")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_the_page_shows_tree_tokens_and_assessments_in_a_browser(tmp_path):
    page = tmp_path / "page.html"
    answer("show", "tiny", "g00001-00", "--html", str(page))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    command = ["chromium", *flags, "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert dom.count('class="call') == 7
    assert len(re.findall(r'class="t target"', dom)) == 2
    assert "Trajectory T0, as it is trained: 1 call, 7 tokens." in dom
    assert "Try 1: valid, score 1" in dom
