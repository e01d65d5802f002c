"""Rebuild a scheduler from its journal, checking that every journalled action is what the scheduler orders again.

The journal is JSON lines: first `{"settings": {...}}` (SchedulerSettings), then `{"seq", "now", "event", "actions"}` in order of `seq`.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from gyre_lib.config.errors import InputError
from gyre_lib.scheduling.events import Action, Event, from_json, to_json
from gyre_lib.scheduling.scheduler import ProtocolError, Scheduler
from gyre_lib.scheduling.settings import SchedulerSettings


class ReplayError(RuntimeError):
    """A journalled action differs from what the scheduler orders now; the text names the entry."""


def journal_lines(folder: Path) -> Iterator[str]:
    """The lines of all `burst-*.jsonl` files of a journal folder, in order. Raises InputError where there is none.

    A torn last line (its writer died, or is writing now) is left out.
    """
    files = sorted(folder.glob("burst-*.jsonl"))
    if not files:
        raise InputError(f"{folder}: no burst-*.jsonl journal here")
    for file in files:
        with file.open() as lines:
            yield from (line for line in lines if line.endswith("\n"))


def replay(lines: Iterable[str]) -> Scheduler:
    """The scheduler after the last entry.

    Raises InputError for a line that is no journal entry or out of sequence, ReplayError where actions differ.
    """
    scheduler: Scheduler | None = None
    previous: int | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _parse(line, number)
        if "settings" in entry:
            settings = SchedulerSettings.from_json(entry["settings"])
            if scheduler is not None and settings != scheduler.settings:
                raise InputError(f"journal line {number}: settings differ from those that the run began with")
            scheduler = scheduler or Scheduler(settings)
            continue
        if scheduler is None:
            raise InputError(f"journal line {number}: the settings come first")
        if previous is not None and entry.get("seq") != previous + 1:
            raise InputError(f"journal line {number}: seq {entry.get('seq')} follows {previous}")
        previous = entry.get("seq")
        try:
            replay_entry(scheduler, entry)
        except (KeyError, TypeError) as error:
            raise InputError(f"journal line {number}: not a journal entry ({type(error).__name__}: {error})") from error
    if scheduler is None:
        raise InputError("journal: empty, not even the settings")
    return scheduler


def _parse(line: str, number: int) -> dict:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"journal line {number}: not JSON ({error.msg})") from error
    if not isinstance(entry, dict):
        raise InputError(f"journal line {number}: not a JSON object")
    return entry


def replay_entry(scheduler: Scheduler, entry: dict[str, Any]) -> tuple[Event, list[Action]]:
    """Give the scheduler one journalled event; returns it with the actions it ordered again.

    Raises ReplayError where they differ from the journalled ones, KeyError or TypeError for what is no entry.
    """
    sequence, event, journalled = entry["seq"], cast(Event, from_json(entry["event"])), entry["actions"]
    try:
        ordered = scheduler.handle(event, entry["now"])
    except ProtocolError as error:
        raise ReplayError(f"journal entry {sequence}: {to_json(event)['kind']} is impossible here: {error}") from error
    if ordered != [from_json(action) for action in journalled]:
        raise ReplayError(
            f"journal entry {sequence}: after {to_json(event)} the journal has {journalled},"
            f" the scheduler orders {[to_json(action) for action in ordered]}"
        )
    return event, ordered
