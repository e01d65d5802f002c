"""What a live run's journal says, replayed through the scheduler with every journalled action compared."""

import json
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.scheduling.replay import journal_lines, replay_entry
from gyre_lib.scheduling.scheduler import Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings


def replay_rows(journal: Path) -> list[dict[str, Any]]:
    """Rows (figure, paper, simulated, stderr, relative_error): `paper` is the journal's figure, `simulated` the replay's.

    Raises InputError for a folder without a journal or a broken line, ReplayError where an action differs.
    """
    scheduler: Scheduler | None = None
    entries = actions = journalled_actions = 0
    times: list[float] = []
    role_s: dict[str, float] = {}
    for number, line in enumerate(journal_lines(journal), 1):
        entry = _entry(line, number)
        if "settings" in entry:
            scheduler = scheduler or Scheduler(SchedulerSettings.from_json(entry["settings"]))
            continue
        if scheduler is None:
            raise InputError(f"journal line {number}: the settings come first")
        before, since = list(scheduler.roles), times[-1] if times else entry["now"]
        _, ordered = replay_entry(scheduler, entry)
        for role in before:
            role_s[role] = role_s.get(role, 0.0) + max(0.0, entry["now"] - since)
        entries, actions, journalled_actions = entries + 1, actions + len(ordered), journalled_actions + len(entry["actions"])
        times.append(entry["now"])
    if scheduler is None:
        raise InputError(f"{journal}: an empty journal, not even the settings")
    return _rows(scheduler, entries, actions, journalled_actions, times, role_s)


def _entry(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"journal line {number}: not JSON ({error.msg})") from error
    if not isinstance(entry, dict) or ("settings" not in entry and not {"seq", "now", "event", "actions"} <= set(entry)):
        raise InputError(f"journal line {number}: not a journal entry")
    return entry


def _rows(
    scheduler: Scheduler, entries: int, actions: int, journalled: int, times: list[float], role_s: dict[str, float]
) -> list[dict[str, Any]]:
    snapshot = scheduler.snapshot()
    figures: list[tuple[str, float | None, float]] = [
        ("journal entries", None, entries),
        ("actions equal to the journal's", journalled, actions),
        ("seconds", None, times[-1] - times[0] if times else 0.0),
    ]
    figures += [
        (name.replace("_", " "), None, snapshot[name]) for name in ("version", "published_version", "water_level", "identity_checks")
    ]
    if (mean := scheduler.staleness.mean) is not None:
        figures.append(("mean staleness of consumed groups", None, float(mean)))
    figures.append(("staleness identity holds", 1, int(snapshot["identity_ok"])))
    figures += [(f"cell seconds in {role}", None, seconds) for role, seconds in sorted(role_s.items())]
    return [
        {"figure": name, "paper": paper, "simulated": value, "stderr": 0.0, "relative_error": None if not paper else value / paper - 1}
        for name, paper, value in figures
    ]
