"""Reads the reward that a task's verifier left: /logs/verifier/reward.txt or reward.json, else the verifier's exit code."""

import json
import math
from pathlib import Path

MAX_REWARD_BYTES = 4096


class NoReward(Exception):
    """The verifier gave no usable reward; the text says why."""


def read_reward(verifier_logs: Path, exit_code: int) -> float:
    """A number from 0 to 1. Raises NoReward: a verifier that broke is not a zero."""
    for name in ("reward.txt", "reward.json"):
        file = verifier_logs / name
        if file.is_symlink() or not file.is_file():
            continue
        text = file.read_bytes()[:MAX_REWARD_BYTES].decode("utf-8", "replace").strip()
        return _checked(_json_reward(text) if name.endswith(".json") else _number(text), text)
    # Without a reward file the exit code decides, as for a plain test runner: 0 passed, 1 failed, anything else did not run.
    if exit_code in (0, 1):
        return 1.0 - exit_code
    raise NoReward(f"the verifier wrote no reward and ended with exit code {exit_code}")


def _json_reward(text: str) -> float:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise NoReward(f"reward.json is not JSON: {error}") from error
    if isinstance(data, dict):
        data = data.get("reward", next(iter(data.values()), None) if len(data) == 1 else None)
    return _number(data)


def _number(value: object) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise NoReward(f"the reward is not a number: {str(value)[:80]!r}")


def _checked(reward: float, text: str) -> float:
    if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
        raise NoReward(f"the reward is not between 0 and 1: {text[:80]!r}")
    return reward
