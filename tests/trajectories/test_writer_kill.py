"""A writer killed at random moments: every acknowledged record is there, no half record is, and readers never fail."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import connect, read_table, row_to_record
from gyre_lib.trajectories.views import ask

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from random_trees import record
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.segments import SegmentWriter
from gyre_lib.trajectories.store import record_to_row
writer = SegmentWriter(RunLayout(Path(sys.argv[1])), "requests", "proxy-0", segment_bytes=40_000)
for sequence in range(int(sys.argv[2]), 10**9):
    writer.append([record_to_row(record(sequence, n_input=200, n_output=100))])
    print(sequence, flush=True)
"""


def kill_after(layout: RunLayout, first: int, delay_s: float) -> int:
    """Let a writer append from record `first` for a while, kill it, and return the number of the last one that it acknowledged."""
    command = [sys.executable, "-c", WRITER, str(layout.root), str(first), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    assert process.stdout.readline() == f"{first}\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    acknowledged = [first, *map(int, process.stdout.read().split("\n")[:-1])]
    process.stdout.close()
    process.wait()
    return acknowledged[-1]


def check_kills(layout: RunLayout, kills: int, seed: int) -> None:
    """The writer comes back each time under the same name and goes on behind what is there; sometimes another one repairs and seals first."""
    dice = random.Random(seed)
    first = 0
    for kill in range(kills):
        last = kill_after(layout, first, dice.random() ** 3 * 0.15)
        rows = read_table(layout, "requests").sort_by("sequence")
        sequences = rows.column("sequence").to_pylist()
        assert sequences == list(range(len(sequences)))
        assert last < len(sequences) <= last + 2
        tail = [row_to_record(row) for row in rows.slice(max(0, rows.num_rows - 30)).to_pylist()]
        assert all(len(item.input_ids) == 200 and len(item.output_ids) == 100 for item in tail)
        if kill % 5 == 0:
            answer = ask(connect(layout.root), "SELECT count(*), sum(n_output) FROM requests").to_pylist()
            assert [list(row.values()) for row in answer] == [[len(sequences), 100 * len(sequences)]]
        if kill % 3 == 0:
            SegmentWriter(layout, "requests", "proxy-0").close()
            assert read_table(layout, "requests").num_rows == len(sequences)
        first = len(sequences)


def test_a_writer_killed_at_random_points_loses_nothing_acknowledged(tmp_path):
    check_kills(RunLayout(tmp_path / "run"), kills=12, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_writer_killed_200_times_loses_nothing_acknowledged(tmp_path):
    check_kills(RunLayout(tmp_path / "run"), kills=200, seed=1)


def test_queries_never_fail_while_a_writer_is_killed(tmp_path):
    """A reader asks all the time, also in the moment of the kill and of the repair."""
    layout = RunLayout(tmp_path / "run")
    command = [sys.executable, "-c", WRITER, str(layout.root), "0", str(Path(__file__).parent)]
    seen = 0
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        for asked in range(4):
            if asked == 2:
                process.send_signal(signal.SIGKILL)
            ((count,),) = connect(layout.root).sql("SELECT count(*) FROM requests").fetchall()
            assert count >= seen
            seen = count
        process.wait()
        process.stdout.close()
