"""Finding the run that a command names."""

from pathlib import Path

from gyre_lib.commands.services import runs_folder
from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout


def find_run(run: str) -> RunLayout:
    """A run by its name in the runs folder, or by the path of its folder. Raises InputError that says where it looked."""
    by_name, by_path = runs_folder() / run, Path(run)
    for folder in (by_name, by_path):
        if (folder / "segments").is_dir() or (folder / "config.yaml").is_file():
            return RunLayout(folder.absolute())
    looked = f"{by_name} and {by_path.absolute()}" if by_name != by_path.absolute() else str(by_name)
    raise InputError(f"run {run}: no such run; looked at {looked} (the runs folder is GYRE_RUNS, or ./runs)")
