"""What a trajectory row must be to be trained; a bad one is refused by name, never repaired."""

import numpy as np

from gyre_lib.config.errors import InputError
from gyre_lib.trajectories.materialisation import TrajectoryRow


def check_row(row: TrajectoryRow, execution_id: str, group_id: str, limit: int) -> None:
    """Raises InputError naming execution, trajectory and position unless the row can be trained.

    A row longer than `limit` tokens, arrays of unequal length, a target at position 0 (nothing precedes it), a target whose log-prob
    is not finite or is positive, or a temperature that is not positive.
    """
    name = f"execution {execution_id}, trajectory {row.trajectory}"
    if (row.execution_id, row.group_id) != (execution_id, group_id):
        raise InputError(f"{name}: the row says execution {row.execution_id} of group {row.group_id}, expected group {group_id}")
    length = len(row.token_ids)
    if not length == len(row.targets) == len(row.logprobs) == len(row.versions) or length == 0:
        lengths = (length, len(row.targets), len(row.logprobs), len(row.versions))
        raise InputError(f"{name}: token_ids, targets, logprobs and versions have lengths {lengths}")
    if length > limit:
        raise InputError(f"{name}: {length} tokens, more than the limit of {limit}")
    if row.targets[0]:
        raise InputError(f"{name}: position 0 is a target but nothing precedes it")
    if not row.temperature > 0:
        raise InputError(f"{name}: temperature {row.temperature} is not positive")
    bad = row.targets & ~(np.isfinite(row.logprobs) & (row.logprobs <= 1e-3))
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        raise InputError(f"{name}: the log-prob of the target at position {position} is {row.logprobs[position]}")
