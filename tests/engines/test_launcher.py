"""What can be said of engines without starting one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_lib.engines.control import EngineControl, EngineError
from gyre_lib.engines.fork_server import ForkServerError, answers, request_engine
from gyre_lib.engines.launcher import SHIM, EngineProcess, engine_environment


def test_an_engine_that_is_not_there_is_not_ready_and_an_error_to_command(free_port: Callable[[], int]) -> None:
    with EngineControl(f"http://127.0.0.1:{free_port()}") as control:
        assert not control.ready()
        with pytest.raises(EngineError, match="ConnectError"):
            control.pause()


def test_without_a_fork_server_there_is_an_error_that_names_the_socket(tmp_path: Path) -> None:
    assert not answers(tmp_path / "no.sock")
    with pytest.raises(ForkServerError, match=r"no\.sock"):
        request_engine(tmp_path / "no.sock", [], tmp_path / "log")


def test_the_stand_ins_are_seen_by_cpu_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("RANK", "3")
    cpu, cuda = engine_environment("cpu", 1), engine_environment("cuda", 4)
    assert cpu["PYTHONPATH"] == f"{SHIM}:/elsewhere" and cuda["PYTHONPATH"] == "/elsewhere"
    assert "RANK" not in cpu and cuda["OMP_NUM_THREADS"] == "4"


def test_engines_of_one_run_do_not_sample_alike(tmp_path: Path) -> None:
    seeds = set()
    for number in range(3):
        arguments = EngineProcess(f"cell-{number}", tmp_path, 1, tmp_path / "log", capacity=2).arguments()
        seeds.add(arguments[arguments.index("--random-seed") + 1])
    assert len(seeds) == 3
