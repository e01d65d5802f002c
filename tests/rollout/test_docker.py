"""The docker sandbox against a stand-in for the docker program: what it asks for, and how failures are told apart."""

import threading
from pathlib import Path

import pytest

from gyre_lib.rollout.sandboxes.docker import Docker
from gyre_lib.rollout.sandboxes.protocol import SandboxCommand, SandboxExit, SandboxUnavailable
from gyre_lib.rollout.tasks import Task


def docker(tmp_path: Path, script: str) -> Docker:
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n{script}\n')
    program.chmod(0o755)
    return Docker(str(program))


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def command(tmp_path: Path, **changes: object) -> SandboxCommand:
    workspace = tmp_path / "w"
    workspace.mkdir(exist_ok=True)
    return SandboxCommand(**{"argv": ("echo", "hi"), "workspace": workspace, "output": tmp_path / "out", "image": "img", **changes})


def test_a_container_has_no_network_no_rights_and_the_key_in_its_environment(tmp_path: Path):
    made = command(tmp_path, proxy_socket=tmp_path / "p.sock", env={"KEY": "k"}, read_only={"/tests": tmp_path})
    line = " ".join(Docker().arguments(made, "n"))
    for part in (
        "--network none",
        "--cap-drop ALL",
        "no-new-privileges",
        "--env KEY=k",
        f"{tmp_path}:/tests:ro",
        f"{tmp_path}/w:/app",
        "/run/gyre/proxy.sock",
    ):
        assert part in line
    assert line.index("--entrypoint python3 img") < line.index("-- echo hi")


@pytest.mark.parametrize("code", [0, 1, 137])
def test_the_exit_code_is_the_commands(tmp_path: Path, code: int):
    assert docker(tmp_path, f"exit {code}").run(command(tmp_path), 20.0, threading.Event()) == SandboxExit("exited", code)


def test_a_failing_daemon_is_not_the_commands_fault(tmp_path: Path):
    with pytest.raises(SandboxUnavailable, match="no such image"):
        docker(tmp_path, "echo no such image; exit 125").run(command(tmp_path), 20.0, threading.Event())
    with pytest.raises(SandboxUnavailable, match="not installed"):
        Docker(str(tmp_path / "none")).check()


def test_a_limit_stops_and_removes_the_container(tmp_path: Path):
    sandbox = docker(tmp_path, '[ "$1" = run ] && exec sleep 60; exit 0')
    assert sandbox.run(command(tmp_path), 0.4, threading.Event()).kind == "timeout"
    name = calls(tmp_path)[0].split("--name ")[1].split()[0]
    assert [line.split()[0] for line in calls(tmp_path)] == ["run", "stop", "rm"]
    assert all(name in line for line in calls(tmp_path))


def test_the_image_is_the_tasks_or_built_once_from_its_dockerfile(tmp_path: Path):
    environment = tmp_path / "environment"
    environment.mkdir()
    (environment / "Dockerfile").write_text("FROM debian\nRUN true\n")
    task = Task("t", tmp_path, "do", environment, tmp_path)
    sandbox = docker(tmp_path, '[ "$1 $2" = "image inspect" ] && exit 1; exit 0')
    tag = sandbox.image_of(task)
    assert tag.startswith("gyre-task:")
    assert calls(tmp_path)[-1] == f"build --quiet --tag {tag} {environment}"
    assert docker(tmp_path, "exit 0").image_of(task) == tag


def test_the_workspace_is_what_the_image_has_and_the_environment_adds(tmp_path: Path):
    environment = tmp_path / "environment"
    environment.mkdir()
    (environment / "extra.txt").write_text("x")
    task = Task("t", tmp_path, "do", environment, tmp_path, image="img")
    sandbox = docker(tmp_path, '[ "$1" = create ] && echo c1; [ "$1" = cp ] && echo y > "$3/inside.txt"; exit 0')
    sandbox.prepare(task, "img", tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["extra.txt", "inside.txt"]
    assert calls(tmp_path)[-1] == "rm --force c1"
