"""Weights pulled from another process: right version or an error, never a mixture."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre_lib.config.errors import InputError
from gyre_lib.transfer import mooncake_transport
from gyre_lib.transfer.transport import TransferFailed, open_transport
from gyre_lib.transfer.weight_exposure import HEADER_BYTES, QUARANTINE_S, WeightExposure, WeightPull, WrongVersion

NUMEL = 400_000


class Owner:
    """A process with one exposed slab; `expose` makes it a new one."""

    def __init__(self, kind: str, numel: int = NUMEL) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "owner_process.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.expose(numel)

    def expose(self, numel: int) -> None:
        self.manifest = self.tell(f"expose {numel}")

    def tell(self, line: str) -> dict[str, Any]:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        while not answer.startswith("{"):  # Mooncake's library logs a line of its own
            assert answer, "the owner is gone"
            answer = self.process.stdout.readline()
        return json.loads(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["mooncake", "socket"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lasting_owner(kind: str) -> Iterator[Owner]:
    owner = Owner(kind)
    yield owner
    owner.end()


@pytest.fixture
def core(lasting_owner: Owner) -> Owner:
    """An owner that has published nothing yet; the test must leave it alive."""
    lasting_owner.expose(NUMEL)
    return lasting_owner


@pytest.fixture
def mortal(kind: str) -> Iterator[Callable[..., Owner]]:
    """Starts owners that the test may kill or stop."""
    started: list[Owner] = []

    def start(numel: int = NUMEL) -> Owner:
        started.append(Owner(kind, numel))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def pull(kind: str) -> Iterator[WeightPull]:
    transport = open_transport(kind)
    reader = WeightPull(transport)
    yield reader
    reader.close()
    transport.close()


def test_a_published_version_arrives_whole(core: Owner, pull: WeightPull) -> None:
    core.tell("publish 3")
    slab = torch.zeros(NUMEL)
    report = pull.pull_into(slab, core.manifest, 3, timeout_s=10)
    assert torch.equal(slab, torch.full((NUMEL,), 3.0))
    assert report.nbytes == 4 * NUMEL and report.attempts == 1
    assert set(report.phases) == {"wait", "read", "verify", "copy"}
    core.tell("publish 4")
    assert pull.versions(core.manifest) == [3, 4]
    pull.pull_into(slab, core.manifest, 3, timeout_s=10)  # the previous version is still there
    assert torch.equal(slab, torch.full((NUMEL,), 3.0))


def test_a_version_that_is_not_there_is_an_error_and_leaves_the_slab_alone(core: Owner, pull: WeightPull) -> None:
    slab = torch.full((NUMEL,), -5.0)
    with pytest.raises(WrongVersion, match="version 2"):
        pull.pull_into(slab, core.manifest, 2, timeout_s=0.2)
    core.tell("publish 2")
    core.tell("publish 4")  # takes the slot of 2
    with pytest.raises(WrongVersion, match="shows version 4"):
        pull.pull_into(slab, core.manifest, 2, timeout_s=0.2)
    assert torch.equal(slab, torch.full((NUMEL,), -5.0))


def test_a_pull_waits_for_a_version_that_comes_in_time(core: Owner, pull: WeightPull) -> None:
    threading.Timer(0.4, lambda: core.tell("publish 1")).start()
    slab = torch.zeros(NUMEL)
    report = pull.pull_into(slab, core.manifest, 1, timeout_s=20)
    assert torch.equal(slab, torch.ones(NUMEL)) and report.attempts > 1


def test_no_torn_weights_from_an_owner_that_rewrites_them_all_the_time(mortal: Any, pull: WeightPull) -> None:
    core = mortal()
    core.tell("churn")
    slab = torch.zeros(NUMEL)
    accepted = rejected = 0
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        shown = pull.versions(core.manifest)
        if not shown:
            continue
        try:
            pull.pull_into(slab, core.manifest, shown[-1], timeout_s=0.0)
        except WrongVersion:
            rejected += 1
        else:
            accepted += 1
            assert torch.equal(slab, torch.full((NUMEL,), float(shown[-1])))
    assert accepted > 0 and rejected > 0


def test_an_owner_killed_in_mid_read_is_an_error_and_leaves_the_slab_alone(mortal: Any, pull: WeightPull) -> None:
    numel = 40_000_000
    core = mortal(numel)
    core.tell("publish 1")
    slab = torch.full((numel,), -5.0)
    threading.Timer(0.05, core.process.kill).start()
    with pytest.raises((TransferFailed, WrongVersion)):
        while True:
            pull.pull_into(slab, core.manifest, 1, timeout_s=5)
            slab.fill_(-5.0)
    assert torch.equal(slab, torch.full((numel,), -5.0))


def test_a_new_owner_after_a_dead_one_works_at_once(core: Owner, mortal: Any, pull: WeightPull) -> None:
    first = mortal()
    slab = torch.zeros(NUMEL)
    first.process.kill()
    first.process.wait()
    with pytest.raises(TransferFailed):
        pull.pull_into(slab, first.manifest, 1, timeout_s=1)
    core.tell("publish 1")
    pull.pull_into(slab, core.manifest, 1, timeout_s=10)
    assert torch.equal(slab, torch.ones(NUMEL))


@pytest.mark.slow
def test_a_stopped_owner_times_out_and_its_late_bytes_reach_no_weights(mortal: Any, pull: WeightPull) -> None:
    numel = 40_000_000
    core = mortal(numel)
    core.tell("publish 1")
    slab = torch.full((numel,), -5.0)
    os.kill(core.process.pid, signal.SIGSTOP)
    threading.Timer(25, lambda: os.kill(core.process.pid, signal.SIGCONT)).start()
    with pytest.raises(TransferFailed):
        pull.pull_into(slab, core.manifest, 1, timeout_s=5)
    time.sleep(25)
    assert torch.equal(slab, torch.full((numel,), -5.0))
    core.tell("publish 2")
    pull.pull_into(slab, core.manifest, 2, timeout_s=30)
    assert torch.equal(slab, torch.full((numel,), 2.0))


def test_weights_of_another_size_are_refused(core: Owner, pull: WeightPull) -> None:
    with pytest.raises(WrongVersion, match="holds 40"):
        pull.pull_into(torch.zeros(10), core.manifest, 1, timeout_s=1)


def test_a_region_of_another_transport_is_refused(core: Owner, kind: str) -> None:
    other = open_transport("socket" if kind == "mooncake" else "mooncake")
    with pytest.raises(TransferFailed, match=f"exposed over {kind}"):
        WeightPull(other).pull_into(torch.zeros(NUMEL), core.manifest, 1, timeout_s=0)
    other.close()


class FaultyMemory:
    """A transport inside one process whose next data reads fail after writing something, or deliver a flipped byte."""

    kind = "socket"

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.faults: list[str] = []
        self.destinations: list[int] = []

    def expose(self, memory: torch.Tensor) -> dict[str, Any]:
        self.memory = memory
        return {"kind": "socket", "nbytes": memory.numel()}

    def prepare(self, memory: torch.Tensor) -> None: ...

    def forget(self, memory: torch.Tensor) -> None: ...

    def close(self) -> None: ...

    def read(self, region: dict[str, Any], offset: int, into: torch.Tensor) -> None:
        into.copy_(self.memory[offset : offset + into.numel()])
        if into.numel() == HEADER_BYTES:
            return
        self.destinations.append(into.data_ptr())
        fault = self.faults.pop() if self.faults else ""
        if fault == "flip":
            into[7] ^= 1
        if fault == "fail":
            raise TransferFailed("no progress")


def test_a_flipped_bit_is_noticed_and_read_again() -> None:
    transport = FaultyMemory()
    exposure = WeightExposure(torch.arange(100.0), transport)
    exposure.publish(6)
    transport.faults = ["flip"]
    slab = torch.zeros(100)
    report = WeightPull(transport).pull_into(slab, exposure.manifest(), 6, timeout_s=5)
    assert torch.equal(slab, torch.arange(100.0)) and report.attempts == 2


def test_a_buffer_whose_read_failed_is_not_used_again_before_its_quarantine_ends() -> None:
    now = [0.0]
    transport = FaultyMemory()
    exposure = WeightExposure(torch.arange(100.0), transport)
    exposure.publish(1)
    reader = WeightPull(transport, clock=lambda: now[0])
    slab = torch.zeros(100)
    transport.faults = ["fail"]
    reader.pull_into(slab, exposure.manifest(), 1, timeout_s=5)
    failed, good = transport.destinations
    assert good != failed
    reader.pull_into(slab, exposure.manifest(), 1, timeout_s=5)
    assert transport.destinations[-1] == good
    assert [held.memory.data_ptr() for held in reader._quarantine] == [failed]
    now[0] = QUARANTINE_S + 1
    transport.faults = ["fail"]
    reader.pull_into(slab, exposure.manifest(), 1, timeout_s=5)
    assert [held.memory.data_ptr() for held in reader._quarantine] == [good]


def test_a_machine_without_the_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLibrary:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name == "mooncake.engine":
                raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoLibrary(), *sys.meta_path])
    with pytest.raises(InputError, match=r"weight_transport.*apt-get install libibverbs1"):
        mooncake_transport.import_transfer_engine()
