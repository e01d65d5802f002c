"""Does the demo's policy learn? The whole demo over several seeds: held-out score before and after. Minutes per seed."""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.config.layout import RunLayout
from gyre_lib.coordination.run_figures import run_figures
from gyre_lib.coordination.run_report import held_out_change

SEEDS = 5
CLEAR = 2.0
"""A gain counts as clear from this many standard errors of the difference."""


def run(quick: bool = False) -> list[BenchRow]:
    """One row per seed (gain of the held-out score; its baseline is the score before), then the mean gain and how many rose clearly."""
    rows, clear = [], 0
    with tempfile.TemporaryDirectory(prefix="gyre-learning-") as folder:
        for seed in range(1 if quick else SEEDS):
            change = _demo(seed, Path(folder))
            clear += change["standard_errors"] > CLEAR
            ok = change["standard_errors"] > CLEAR
            rows.append(
                BenchRow(f"gain of seed {seed}", change["gain"], "score", "> 2 standard errors", ok, change["before"]["mean_score"])
            )
    gains = [row.value for row in rows]
    rows.append(BenchRow("mean gain", statistics.mean(gains), "score", "> 0", statistics.mean(gains) > 0))
    rows.append(BenchRow("seeds that rose clearly", clear, f"of {len(gains)}"))
    return rows


def _demo(seed: int, runs: Path) -> dict:
    import os

    name = f"seed-{seed}"
    command = [sys.executable, "-m", "gyre_lib.commands.main", "demo", f"name={name}", f"training.seed={seed}"]
    done = subprocess.run(command, env={**os.environ, "GYRE_RUNS": str(runs)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the demo of seed {seed} failed: {done.stdout[-2000:]}")
    change = held_out_change(run_figures(RunLayout(runs / name)))
    assert change is not None, "the demo evaluates before and after"
    return change
