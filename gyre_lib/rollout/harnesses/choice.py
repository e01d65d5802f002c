"""The harness of a configuration's name."""

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.harnesses.builtin import BuiltinHarness
from gyre_lib.rollout.harnesses.claude_code import ClaudeCode
from gyre_lib.rollout.harnesses.mini_swe_agent import MiniSweAgent
from gyre_lib.rollout.harnesses.protocol import Harness


def harness_named(name: str) -> Harness:
    """Raises InputError naming `rollout.harness`."""
    match name:
        case "builtin":
            return BuiltinHarness()
        case "claude-code":
            return ClaudeCode()
        case "mini-swe-agent":
            return MiniSweAgent()
    raise InputError(f"rollout.harness: unknown harness {name!r} (builtin, claude-code, mini-swe-agent)")
