"""`gyre theory`, `gyre simulate` as a user meets them."""

import json

import pytest
from typer.testing import CliRunner

from gyre_lib.commands.main import app
from gyre_lib.config.errors import InputError
from gyre_lib.scheduling.events import EngineReady, RunStarted, to_json
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings


def rows(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


def test_figures_of_the_paper_with_their_errors():
    (row,) = rows("simulate", "paper-122b", "--figure", "C2/C1", "--seeds", "2")
    assert set(row) == {"figure", "paper", "simulated", "stderr", "relative_error"}
    assert row["relative_error"] == pytest.approx(row["simulated"] / 0.852 - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "paper-9b"), "none of paper-122b"),
        (("simulate", "paper-122b", "--figure", "E9/E0"), "no figure E9/E0"),
        (("simulate", "paper-122b", "--seeds", "1"), "at least 2"),
        (("simulate", "paper-122b", "--workload", "nowhere"), "no such workload file"),
        (("simulate", "replay"), "needs a run"),
        (("simulate", "replay", "no-such-run"), "no such run"),
        (("simulate", "tune", "--staleness", "fast"), "staleness: a number"),
        (("simulate", "tune", "--staleness", "0.333"), "no \\(phi, mu\\)"),
    ],
)
def test_mistakes_get_one_line(arguments, words):
    with pytest.raises(InputError, match=words) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "\n" not in str(caught.value)


def journal(folder, change=lambda entry: entry):
    settings = SchedulerSettings(cells=1, cell_capacity=4, groups_per_batch=2, executions_per_group=2, steps_per_burst=1)
    scheduler, lines = Scheduler(settings), [json.dumps({"settings": settings.to_json()})]
    for sequence, event in enumerate((RunStarted(), EngineReady(0))):
        actions = [to_json(action) for action in scheduler.handle(event, float(sequence))]
        lines.append(json.dumps(change({"seq": sequence, "now": float(sequence), "event": to_json(event), "actions": actions})))
    (folder / "journal").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    (folder / "journal" / "burst-0000.jsonl").write_text("\n".join(lines) + '\n{"torn')


def test_replay_of_a_run_compares_every_action(tmp_path):
    journal(tmp_path / "run")
    (equal,) = [row for row in rows("simulate", "replay", str(tmp_path / "run")) if row["figure"].startswith("actions equal")]
    assert equal["paper"] == equal["simulated"] == 3


def test_replay_of_a_run_whose_actions_differ_fails_and_names_the_entry(tmp_path):
    journal(tmp_path / "run", lambda entry: entry | {"actions": []})
    result = CliRunner().invoke(app, ["simulate", "replay", str(tmp_path / "run")], catch_exceptions=False)
    assert result.exit_code == 1 and "journal entry 0" in result.output


def test_report_with_plots(tmp_path):
    rows("simulate", "paper-122b", "--figure", "E2/E0", "--seeds", "2", "--plots", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {
        "report.html", "role-timeline.png", "water-level.png", "utilisation.png", "durations.png",
    }  # fmt: skip
    assert "E2/E0" in (tmp_path / "report.html").read_text()
