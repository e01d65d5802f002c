"""mini-swe-agent, unmodified: its `mini` command over the OpenAI Chat Completions API, with a base URL and a key."""

import os
import shutil
import sys
from pathlib import Path

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.harnesses.protocol import BASE_URL, HarnessCommand, HarnessEnd, HarnessSettings

INSTALL = "pip install mini-swe-agent==2.4.6 litellm==1.80.0"
"""LiteLLM by its version, never the newest: 1.82.7, 1.82.8 and 1.107.0 were malicious releases."""


class MiniSweAgent:
    name = "mini-swe-agent"

    def __init__(self, program: str = "") -> None:
        self._program = program or os.environ.get("GYRE_MINI_SWE_AGENT", "mini")

    def check(self) -> None:
        self._path()

    def _path(self) -> Path:
        found = shutil.which(self._program)
        if found is None:
            raise InputError(
                f"rollout.harness: mini-swe-agent is not installed ({self._program} not found); `{INSTALL}`, or set GYRE_MINI_SWE_AGENT"
            )
        return Path(found).absolute()

    def command(self, settings: HarnessSettings, instruction: str) -> HarnessCommand:
        program = self._path()
        argv = (
            str(program), "--yolo", "--exit-immediately", "--task", instruction, "--model", f"openai/{settings.model_name}",
            "--output", "/tmp/trajectory.json", "--cost-limit", "0",
        )  # fmt: skip
        env = {
            "OPENAI_BASE_URL": f"{BASE_URL}/v1",
            "OPENAI_API_BASE": f"{BASE_URL}/v1",
            "OPENAI_API_KEY": settings.token,
            "HOME": "/tmp",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        }
        return HarnessCommand(argv, env, {str(folder): folder for folder in _needed(program)})

    def read_end(self, exit_code: int, output: Path) -> HarnessEnd:
        tail = output.read_text(errors="replace")[-2000:]
        outage = exit_code != 0 and any(word in tail for word in ("APIConnectionError", "InternalServerError", "ServiceUnavailableError"))
        return HarnessEnd("" if exit_code == 0 else f"exit code {exit_code}", outage)


def _needed(program: Path) -> list[Path]:
    """The folders outside /usr that the program lives in: its virtual environment."""
    prefix = program.parent.parent
    return [] if prefix.is_relative_to("/usr") or prefix == Path(sys.base_prefix).resolve() else [prefix]
