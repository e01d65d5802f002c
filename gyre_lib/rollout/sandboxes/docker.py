"""Sandboxes as Docker containers through the docker command line: network `none`, all capabilities dropped, the workspace mounted.

The task's `docker_image` is used; it must hold /bin/sh, and for harnesses that go through the proxy a `python3` for the relay.
"""

import shutil
import subprocess
import threading
import time
import uuid
from pathlib import Path

from gyre_lib.rollout.artifacts import digest_tree
from gyre_lib.rollout.environments import apply_dockerfile, copy_into
from gyre_lib.rollout.sandboxes.protocol import MAX_FILE_BYTES, PROXY_PORT, TERM_GRACE_S, SandboxCommand, SandboxExit, SandboxUnavailable
from gyre_lib.rollout.tasks import Task

RELAY = Path(__file__).with_name("relay.py")
SOCKET_INSIDE = "/run/gyre/proxy.sock"
RELAY_INSIDE = "/run/gyre/relay.py"
POLL_S = 0.25
BUILD_TIMEOUT_S = 1800.0
DOCKER_FAILED = 125
"""Exit code of `docker run` when the daemon or the image, not the command, failed."""


class Docker:
    name = "docker"

    def __init__(self, program: str = "docker", default_image: str = "python:3.11-slim") -> None:
        self._program = program
        self._default_image = default_image

    def check(self) -> None:
        if shutil.which(self._program) is None:
            raise SandboxUnavailable(f"{self._program} is not installed")
        self._docker("info", "--format", "{{.ServerVersion}}", timeout_s=30.0)

    def image_of(self, task: Task) -> str:
        """The task's image, or one built from environment/Dockerfile (tagged by its content, so it is built once)."""
        if task.image:
            return task.image
        if task.environment is None or not (task.environment / "Dockerfile").is_file():
            return self._default_image
        tag = f"gyre-task:{digest_tree(task.environment)[0][:16]}"
        if self._docker("image", "inspect", tag, check=False).returncode:
            self._docker("build", "--quiet", "--tag", tag, str(task.environment), timeout_s=BUILD_TIMEOUT_S)
        return tag

    def prepare(self, task: Task, image: str, workspace: Path) -> None:
        """What the image has in the work folder, then the files of environment/ (which a Dockerfile has copied already)."""
        workspace.mkdir(parents=True)
        container = self._docker("create", image, "true").stdout.strip()
        try:
            self._docker("cp", f"{container}:{task.workdir}/.", str(workspace), check=False)
        finally:
            self._docker("rm", "--force", container, check=False)
        if task.environment is not None:
            if (task.environment / "Dockerfile").is_file() and task.image:
                apply_dockerfile(task.environment, task.workdir, workspace)
            elif not (task.environment / "Dockerfile").is_file():
                copy_into(task.environment, workspace)

    def _docker(self, *arguments: str, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run([self._program, *arguments], capture_output=True, text=True, timeout=timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxUnavailable(f"docker {arguments[0]}: {error}") from error
        if check and done.returncode:
            raise SandboxUnavailable(f"docker {arguments[0]}: {done.stderr.strip()[-300:]}")
        return done

    def arguments(self, command: SandboxCommand, name: str) -> list[str]:
        """The `docker run` command line."""
        arguments = [self._program, "run", "--rm", "--name", name, "--network", "none", "--cap-drop", "ALL"]
        arguments += ["--security-opt", "no-new-privileges", "--ulimit", f"fsize={MAX_FILE_BYTES}", "--workdir", command.workdir]
        for variable, value in {"LC_ALL": "C.UTF-8", **command.env}.items():
            arguments += ["--env", f"{variable}={value}"]
        mounts = [(outside, inside, ":ro") for inside, outside in command.read_only.items()]
        mounts += [(outside, inside, "") for inside, outside in command.writable.items()]
        mounts.append((command.workspace, command.workdir, ""))
        inner: tuple[str, ...] = command.argv
        if command.proxy_socket is not None:
            mounts += [(RELAY, RELAY_INSIDE, ":ro"), (command.proxy_socket, SOCKET_INSIDE, "")]
            inner = ("python3", "-I", "-S", RELAY_INSIDE, str(PROXY_PORT), SOCKET_INSIDE, "--", *inner)
        else:
            arguments.append("--init")
        for outside, inside, mode in mounts:
            arguments += ["--volume", f"{outside.resolve()}:{inside}{mode}"]
        return [*arguments, "--entrypoint", inner[0], command.image or self._default_image, *inner[1:]]

    def run(self, command: SandboxCommand, timeout_s: float, cancelled: threading.Event) -> SandboxExit:
        name = f"gyre-{uuid.uuid4().hex[:16]}"
        try:
            with command.output.open("wb") as output:
                process = subprocess.Popen(
                    self.arguments(command, name), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            raise SandboxUnavailable(f"{self._program} could not be started: {error}") from error
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                code = process.wait(timeout=max(0.01, min(POLL_S, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if cancelled.is_set() or time.monotonic() >= deadline:
                    self._stop(name, process)
                    return SandboxExit("cancelled" if cancelled.is_set() else "timeout")
                continue
            if code == DOCKER_FAILED:
                raise SandboxUnavailable(f"docker run failed: {command.output.read_bytes()[-400:].decode('utf-8', 'replace').strip()}")
            return SandboxExit("exited", code)

    def _stop(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._docker("stop", "--time", str(int(TERM_GRACE_S)), name, check=False)
        self._docker("rm", "--force", name, check=False)
        process.kill()
        process.wait()
