"""The coordinator's logs lose nothing that was acknowledged and keep no half line."""

import os
import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from gyre_lib.coordination.journal import Journal, read_entries


def test_entries_come_back_in_order_over_several_files(tmp_path):
    journal = Journal(tmp_path, "burst")
    journal.append({"seq": 1}, {"seq": 2})
    closed = journal.next_file()
    journal.append({"seq": 3})
    assert closed.name == "burst-0000.jsonl"
    assert [entry["seq"] for entry in journal.entries()] == [1, 2, 3]
    journal.close()
    assert [entry["seq"] for entry in Journal(tmp_path, "burst").entries()] == [1, 2, 3]


@given(cut=st.integers(min_value=1, max_value=30))
def test_torn_tail_is_cut_at_start_and_what_was_durable_stays(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, "burst")
    journal.append({"seq": 1, "text": "whole"})
    journal.append({"seq": 2, "text": "torn in the middle of this line"})
    journal.close()
    path = journal.files()[0]
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(folder, "burst")
    assert [entry["seq"] for entry in again.entries()] == [1]
    assert again.torn_bytes > 0
    again.append({"seq": 2})
    assert [entry["seq"] for entry in again.entries()] == [1, 2]


def test_a_reader_beside_the_writer_sees_whole_lines_only(tmp_path):
    journal = Journal(tmp_path, "burst")
    journal.append({"seq": 1})
    path = journal.files()[0]
    with path.open("ab") as other:
        other.write(b'{"seq": 2, "ha')
    assert [entry["seq"] for entry in read_entries(path)] == [1]


def test_killed_writer_keeps_every_acknowledged_entry(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom gyre_lib.coordination.journal import Journal\n"
        f"journal = Journal(Path({str(tmp_path)!r}), 'burst')\n"
        "for seq in range(100000):\n    journal.append({'seq': seq})\n    print(seq, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    acknowledged = [int(writer.stdout.readline()) for _ in range(50)][-1]
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    entries = [entry["seq"] for entry in Journal(tmp_path, "burst").entries()]
    assert entries == list(range(len(entries)))
    assert len(entries) > acknowledged


def test_full_disk_is_refused_loudly_and_leaves_whole_lines(tmp_path):
    program = (
        "import resource, signal\nfrom pathlib import Path\nfrom gyre_lib.coordination.journal import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"told = []\njournal = Journal(Path({str(tmp_path)!r}), 'burst', on_failure=told.append)\n"
        "written = 0\ntry:\n    while True:\n        journal.append({'seq': written})\n        written += 1\n"
        "except OSError:\n    assert len(told) == 1\n    print(written)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    entries = [entry["seq"] for entry in Journal(tmp_path, "burst").entries()]
    assert entries == list(range(int(done.stdout)))
    assert entries
