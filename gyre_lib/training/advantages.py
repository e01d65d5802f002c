"""Group-relative advantages (§12): computed from the rewards of one group at a time, never by reshaping a batch."""

import math


def advantages(rewards: list[float], divide_by_std: bool) -> list[float]:
    """One advantage per valid reward of one group: (R - mean) / (std + 1e-6), or R - mean.

    The standard deviation is the population's. Zeros when there are fewer than two rewards or all are equal. Raises ValueError for a
    reward that is not finite.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not finite")
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return [value / (std + 1e-6) for value in centred]
