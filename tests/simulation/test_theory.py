"""Formulas against brute force."""

from fractions import Fraction

import pytest

from gyre_lib.scheduling import theory
from gyre_lib.simulation.queue_model import QueueRun, play
from gyre_lib.simulation.theory_rows import theory_rows


def test_every_row_of_the_theory_holds():
    rows = theory_rows(quick=True)
    assert len(rows) > 40
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize(("phi", "mu", "mean"), [("3/2", 1, "4/3"), ("1/2", 3, "11/8"), (0, 4, "3/2")])
def test_twelve_steps_at_staleness_one_and_a_half_measure_less(phi, mu, mean):
    assert theory.cold_start_staleness(Fraction(phi), mu, 12) == Fraction(mean)


def test_queue_model_that_can_never_fill_a_batch_says_so():
    with pytest.raises(RuntimeError, match="cannot go on"):
        play(QueueRun(Fraction(0), 1, 4, 3, stuck_first=True))
