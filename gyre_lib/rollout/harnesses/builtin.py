"""The small built-in harness: `builtin_agent.py`, run by this Python inside the sandbox."""

import sys
from pathlib import Path

from gyre_lib.rollout.harnesses import builtin_agent
from gyre_lib.rollout.harnesses.protocol import BASE_URL, INSTRUCTION_INSIDE, HarnessCommand, HarnessEnd, HarnessSettings

AGENT_INSIDE = "/run/gyre/builtin_agent.py"
ENDS = {
    builtin_agent.FINISHED: "",
    builtin_agent.TURNS_USED_UP: "stopped after the most model calls",
    builtin_agent.ENDPOINT_FAILED: "the model endpoint failed",
}


class BuiltinHarness:
    name = "builtin"

    def check(self) -> None:
        """Always there: it is part of the package."""

    def command(self, settings: HarnessSettings, instruction: str) -> HarnessCommand:
        argv = (
            str(Path(sys.executable).resolve()), "-I", "-S", AGENT_INSIDE,
            "--instruction", INSTRUCTION_INSIDE,
            "--model", settings.model_name,
            "--max-turns", str(settings.max_turns),
            "--max-tokens", str(settings.max_output_tokens),
        )  # fmt: skip
        env = {"ANTHROPIC_BASE_URL": BASE_URL, "ANTHROPIC_API_KEY": settings.token}
        return HarnessCommand(argv, env, {AGENT_INSIDE: Path(builtin_agent.__file__)})

    def read_end(self, exit_code: int, output: Path) -> HarnessEnd:
        detail = ENDS.get(exit_code, f"exit code {exit_code}")
        if exit_code == builtin_agent.ENDPOINT_FAILED:
            detail = output.read_text(errors="replace").strip().rpartition("\n")[2][:300] or detail
        return HarnessEnd(detail, exit_code == builtin_agent.ENDPOINT_FAILED)
