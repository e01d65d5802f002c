"""Start the real Claude Code CLI against a proxy: bare environment, fresh home, scratch git workspace."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BINARY = Path(__file__).parents[2] / ".claude-code/node_modules/@anthropic-ai/claude-code/bin/claude.exe"


@dataclass
class CliResult:
    returncode: int | None
    stdout: str
    stderr: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def result(self) -> dict[str, Any]:
        """The last `result` event: there are two when background agents ran."""
        return [event for event in self.events if event.get("type") == "result"][-1]


def workspace(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "hello.py").write_text("def hi():\n\treturn 'héllo <b> & \"q\"'\n\n\nprint(hi())\n")
    (folder / "README.md").write_text("# scratch\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_GLOBAL": "/dev/null"}
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True, env=environment, capture_output=True)
    return folder


def user_line(text: str) -> dict[str, Any]:
    return {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": text}]}}


def run_claude(
    prompt: str | None,
    url: str,
    key: str,
    folder: Path,
    *,
    flags: list[str] | None = None,
    env: dict[str, str] | None = None,
    lines: list[Any] | None = None,
    kill: tuple[Callable[[], bool], int] | None = None,
    timeout_s: float = 150,
) -> CliResult:
    """`lines` is stream-json input; a callable in it is waited for (then the CLI gets two seconds to become idle). `kill`: (when, signal)."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    if not work.exists():
        workspace(work)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "policy-under-test",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        **(env or {}),
    }
    command = [str(BINARY), "-p", *([prompt] if prompt is not None else []), "--output-format", "stream-json", "--verbose"]
    command += ["--dangerously-skip-permissions", *(flags or []), *(["--input-format", "stream-json"] if lines is not None else [])]
    process = subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE if lines is not None else subprocess.DEVNULL,
    )

    def feed() -> None:
        assert process.stdin is not None and lines is not None
        for line in lines:
            if callable(line):
                while not line() and process.poll() is None:
                    time.sleep(0.1)
                time.sleep(2.0)
            else:
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()
        process.stdin.close()
        process.stdin = None

    def killer() -> None:
        assert kill is not None
        while process.poll() is None:
            if kill[0]():
                process.send_signal(kill[1])
                return
            time.sleep(0.05)

    helpers = [
        threading.Thread(target=work_, daemon=True) for work_, wanted in ((feed, lines is not None), (killer, kill is not None)) if wanted
    ]
    for helper in helpers:
        helper.start()
    output: dict[str, str] = {}
    readers = [
        threading.Thread(target=lambda name=name, pipe=pipe: output.__setitem__(name, pipe.read()))
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for reader in readers:
        reader.join(10)
    events = []
    for line in output.get("stdout", "").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return CliResult(process.returncode, output.get("stdout", ""), output.get("stderr", ""), events)


def forget_home(folder: Path) -> None:
    shutil.rmtree(folder / "home", ignore_errors=True)
