"""What a killed supervisor leaves running is found by id and creation time, and ended before anything new starts."""

import subprocess
import sys

import psutil
import pytest

from gyre_lib.config.layout import RunLayout
from gyre_lib.coordination.run_services import stop_services
from gyre_lib.coordination.services_file import ServiceProcess, Services, end_leftovers, read_services


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    created = psutil.Process(process.pid).create_time()
    process.wait()
    return process.pid, created


def test_down_ends_what_a_killed_supervisor_left(tmp_path, sleeper):
    layout = RunLayout(tmp_path)
    created = psutil.Process(sleeper.pid).create_time()
    Services(*gone(), processes=[ServiceProcess("worker-0", sleeper.pid, created, "", "")]).write(layout.services)
    assert read_services(layout) is None
    assert stop_services(layout)
    assert not psutil.pid_exists(sleeper.pid)
    assert not layout.services.exists()


def test_another_process_with_the_same_id_is_left_alone(tmp_path, sleeper):
    layout = RunLayout(tmp_path)
    created = psutil.Process(sleeper.pid).create_time()
    Services(*gone(), processes=[ServiceProcess("worker-0", sleeper.pid, created - 1000, "", "")]).write(layout.services)
    assert not end_leftovers(layout.services)
    assert sleeper.poll() is None


def test_services_file_is_for_its_owner_alone(tmp_path):
    layout = RunLayout(tmp_path)
    me = psutil.Process()
    Services(me.pid, me.create_time(), secret="s").write(layout.services)
    assert layout.services.stat().st_mode & 0o077 == 0
    assert read_services(layout).secret == "s"
    assert not end_leftovers(layout.services)
