"""The `gyre` command as a user types it: exit codes and one-line errors."""

import json
import subprocess
import sys

import pytest


def gyre(*arguments, **environment):
    import os

    done = subprocess.run(
        [sys.executable, "-m", "gyre_lib.commands.main", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("scheduling.extra_dispatch=0.3", "scheduling.extra_dispatch"),
        ("scheduling.unknown=1", "scheduling.unknown"),
        ("scheduling.groups_per_batch=-4", "scheduling.groups_per_batch"),
        ("rollout.tasks=no/such/folder", "rollout.tasks"),
        ("cells.count=0", "cells.count"),
        ("model.path=no/such/model", "model.path"),
    ],
)
def test_bad_configuration_is_refused_before_anything_starts(override, field):
    code, out, err = gyre("run", "data/configs/demo.yaml", override, "--dry-run")
    assert (code, out) == (2, "")
    assert field in err
    assert len(err.strip().splitlines()) == 1


def test_dry_run_says_what_would_run():
    code, out, _ = gyre("run", "data/configs/demo.yaml", "--dry-run")
    assert code == 0
    assert "expected staleness 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "nothing"), "no such benchmark"),
        (("report", "no-such-run"), "no-such-run"),
        (("burst", "no-such-run"), "no-such-run"),
        (("sql", "no-such-run", "SELECT 1"), "no-such-run"),
        (("run", "no.yaml"), "no.yaml"),
    ],
)
def test_wrong_names_get_one_line_and_exit_code_2(arguments, message, tmp_path):
    code, _, err = gyre(*arguments, GYRE_RUNS=str(tmp_path))
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_doctor_answers_for_every_part():
    code, out, _ = gyre("doctor", "--json")
    rows = json.loads(out)["rows"]
    missing = [row for row in rows if not row["ok"]]
    assert code == (1 if any(row["needed"] == "demo" for row in missing) else 0)
    assert {"prefect", "sglang", "megatron-core", "bubblewrap sandbox"} <= {row["check"] for row in rows}
    assert all(row["how_to_get_it"] for row in missing)


def test_status_and_down_without_anything_up(tmp_path):
    assert gyre("status", GYRE_RUNS=str(tmp_path))[:2] == (0, "(no rows)\n")
    assert gyre("down", GYRE_RUNS=str(tmp_path))[:2] == (0, "")
