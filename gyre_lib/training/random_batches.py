"""Random ready groups for tests and benchmarks of the trainer: executions of several trajectories, realistic masks and log-probs."""

from collections.abc import Callable

import numpy as np

from gyre_lib.training.packing import ReadyExecution, ReadyGroup
from gyre_lib.trajectories.materialisation import TrajectoryRow

ROLES = ("main_task", "main_summary", "sub_task", "sub_summary")


def random_row(
    rng: np.random.Generator, execution_id: str, group_id: str, trajectory: int, tokens: int, vocab: int, version: int = 0
) -> TrajectoryRow:
    """A row of alternating context and model turns; log-probs near those of a uniform policy."""
    targets = np.repeat(rng.random(-(-tokens // 8)) < 0.5, 8)[:tokens].copy()
    targets[0], targets[-1] = False, True
    logprobs = np.where(targets, -np.log(vocab) + rng.normal(0, 0.3, tokens), 0.0)
    return TrajectoryRow(
        execution_id=execution_id,
        group_id=group_id,
        trajectory=trajectory,
        role_class=ROLES[trajectory % len(ROLES)],
        token_ids=rng.integers(0, vocab, tokens).astype(np.int32),
        targets=targets,
        logprobs=np.minimum(logprobs, -1e-4).astype(np.float32),
        versions=np.where(targets, version, -1).astype(np.int32),
        temperature=1.0 if trajectory % 2 else 0.8,
    )


def random_groups(
    seed: int,
    groups: int,
    executions: int,
    vocab: int,
    lengths: Callable[[np.random.Generator], int],
    max_rows: int = 3,
    first_group: int = 0,
    version: int = 0,
) -> list[ReadyGroup]:
    """`groups` groups of `executions` executions with 1..max_rows trajectories of lengths(rng) tokens and rewards in {0, 0.5, 1}."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(first_group, first_group + groups):
        group_id, members = f"g{number:05d}", []
        for place in range(executions):
            execution_id = f"{group_id}-{place:02d}"
            rows = [
                random_row(rng, execution_id, group_id, trajectory, int(lengths(rng)), vocab, version)
                for trajectory in range(int(rng.integers(1, max_rows + 1)))
            ]
            members.append(ReadyExecution(execution_id, float(rng.choice([0.0, 0.5, 1.0])), rows))
        made.append(ReadyGroup(group_id, version, members))
    return made
