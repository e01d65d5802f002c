"""What a harness is to us: a command line, its environment, and how to read its exit code. It knows a base URL and a key, no more."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre_lib.rollout.sandboxes.protocol import PROXY_PORT

BASE_URL = f"http://127.0.0.1:{PROXY_PORT}"
INSTRUCTION_INSIDE = "/run/gyre/instruction.md"


@dataclass(frozen=True)
class HarnessSettings:
    """What a launch may choose."""

    token: str
    model_name: str = "policy"
    max_turns: int = 8
    max_output_tokens: int = 256
    max_context_tokens: int = 2048
    budget_s: float = 120.0


@dataclass(frozen=True)
class HarnessCommand:
    """How to start it inside the sandbox."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    read_only: dict[str, Path] = field(default_factory=dict)
    """Path inside -> host file or folder that the program needs."""


@dataclass(frozen=True)
class HarnessEnd:
    """How it ended by itself. `endpoint_failed`: the model endpoint, not the policy, is to blame."""

    detail: str = ""
    endpoint_failed: bool = False


class Harness(Protocol):
    name: str

    def check(self) -> None:
        """Raises InputError when the program is not installed, saying how to get it."""

    def command(self, settings: HarnessSettings, instruction: str) -> HarnessCommand:
        """The command; the instruction also lies in the sandbox as INSTRUCTION_INSIDE."""

    def read_end(self, exit_code: int, output: Path) -> HarnessEnd:
        """What its exit code and its output say."""
