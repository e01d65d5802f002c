"""The formulas of section 2.2, section 4.2 and the appendix, reconstructed (the text gives them without the equations).

Notation: B groups per step, mu steps per burst, phi extra dispatch in units of B, K cells, C_e and C_s capacities, L mean time of a group
from admission to ready, tau_T time of a step's training, T mean time between step starts, beta mean offset of a group's completion from the
start of the step before its own, in units of T. Times are in any one unit.
"""

from fractions import Fraction
from math import ceil


def target_depth(phi: Fraction, mu: int, batch: int) -> Fraction:
    """Equation 1: Q_b = (phi + mu) B groups."""
    return (phi + mu) * batch


def mean_staleness(phi: Fraction, mu: int) -> Fraction:
    """Equation 2: E[d] = phi + (mu - 1)/2 in steady state."""
    return phi + Fraction(mu - 1, 2)


def outstanding_staleness(phi: Fraction, mu: int) -> Fraction:
    """U/B at a publication, in the steady state of oldest-version-first consumption, with phi = a mu + b, 0 <= b < mu."""
    a = phi // mu
    b = phi - a * mu
    return Fraction(mu * mu * a * (a + 1), 2) + (a + 1) * mu * b


def cold_start_staleness(phi: Fraction, mu: int, steps: int) -> Fraction:
    """Mean d of the first `steps` steps (a multiple of mu, long enough to be past the start), oldest version first: E[d] - U/(B S)."""
    return mean_staleness(phi, mu) - outstanding_staleness(phi, mu) / steps


def stuck_group_staleness(phi: Fraction, mu: int, batch: int) -> Fraction:
    """Limit of the mean d when one group never finishes: bounded counts do not make the correction vanish."""
    return mean_staleness(phi, mu) - Fraction(1, batch)


def capacity(cells_out: int, cells: int, cell_capacity: int, standalone_capacity: int) -> int:
    """Equation 3: C(k) = C_s + (K - k) C_e."""
    return standalone_capacity + (cells - cells_out) * cell_capacity


def launches(dispatched: int, launched: int, terminated: int, room: int) -> int:
    """Equation 4: min(d - p, max(0, C(k) - (p - f)))."""
    return min(dispatched - launched, max(0, room - (launched - terminated)))


def largest_prefix(level: int, cells: int, cell_capacity: int, standalone_capacity: int) -> int:
    """Consequence of Equation 5: most cells that may have joined at water level w, K - ceil(max(0, w - C_s)/C_e) (below 0: none)."""
    return max(0, min(cells, cells - ceil(Fraction(max(0, level - standalone_capacity), cell_capacity))))


def largest_level_core_stays(mu: int, batch: int, executions: int, cells: int, cell_capacity: int, standalone_capacity: int) -> int:
    """Equation 6: the largest w at which the core may stay in training, C(1) - mu N B; negative: never."""
    return capacity(1, cells, cell_capacity, standalone_capacity) - mu * executions * batch


def boundary_step_time(latency: float, training: float, phi: float, mu: int, mean_position: float, beta: float) -> float:
    """T_b = (L + tau_T)/(phi + mu - 1 - ibar + beta), with ibar the time-weighted mean index of a step in its burst."""
    return (latency + training) / (phi + mu - 1 - mean_position + beta)


def continuous_step_time(latency: float, depth: int, batch: int) -> float:
    """T_c = B L / Q_c."""
    return batch * latency / depth


def continuous_staleness(depth: int, batch: int, ready_after_update: float, unpublished_steps: float) -> float:
    """E[d_c] = (Q_c + E[R+])/B + E[i]: updates that find a group unconsumed, and steps done but unpublished at its admission."""
    return (depth + ready_after_update) / batch + unpublished_steps


def continuous_staleness_rollout_bound(latency: float, training: float, step_time: float) -> float:
    """The same for mu = 1 when the trainer waits for B ready groups: (L + tau_T)/T_c."""
    return (latency + training) / step_time


def equal_depth_cost(mu: int, batch: int, ready_after_update: float) -> float:
    """Corollary A.5: E[d_c] - E[d_b] = mu + E[R+]/B at equal depth."""
    return mu + ready_after_update / batch


def equal_depth_time_ratio(latency: float, training: float, phi: float, mu: int, mean_position: float, beta: float) -> float:
    """T_b/T_c at equal depth; above 1 for mu = 1: boundary dispatch is slower."""
    return (1 + training / latency) * (phi + mu) / (phi + mu - 1 - mean_position + beta)


def equal_staleness_time_ratio(staleness: float, beta: float) -> float:
    """T_b/T_c at equal mean staleness D, mu = 1, rollout-bound: D/(D + beta), below 1: boundary dispatch is faster."""
    return staleness / (staleness + beta)
