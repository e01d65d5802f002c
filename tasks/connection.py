"""How a task reaches the coordinator of its run, and where runs lie."""

import functools
import os
from pathlib import Path

from gyre_lib.config.layout import RunLayout
from gyre_lib.coordination.client import CoordinatorClient, find_coordinator


def runs_folder() -> Path:
    """Folder of run folders: GYRE_RUNS, or `runs` under the current folder."""
    return Path(os.environ.get("GYRE_RUNS", "runs")).resolve()


def layout_of(run: str) -> RunLayout:
    return RunLayout(runs_folder() / run)


@functools.cache
def coordinator_of(run: str) -> CoordinatorClient:
    """One client per run and process."""
    return CoordinatorClient(find_coordinator(layout_of(run)))
