"""Impossible settings are refused with one line that says why."""

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import RunConfig
from gyre_lib.scheduling.settings import SchedulerSettings, extra_groups, supply_groups


def settings(**changes) -> SchedulerSettings:
    return SchedulerSettings(**{**dict(cells=2, cell_capacity=4, groups_per_batch=4, executions_per_group=2, steps_per_burst=1), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(steps_per_burst=0), "steps_per_burst: an integer of at least 1"),
        (dict(groups_per_batch=0), "groups_per_batch"),
        (dict(cells=0), "cells"),
        (dict(executions_per_group=1.5), "executions_per_group"),
        (dict(supply_groups=5), "no cell could ever join"),
        (dict(supply_hold_s=float("nan")), "supply_hold_s"),
        (dict(policy="magic"), "policy: one of elastic"),
        (dict(dispatch="continuous"), "async only"),
        (dict(lost_groups="ignore"), "lost_groups"),
        (dict(cell_capacity=0), "no execution could ever run"),
        (dict(policy="async", training_cells=2), "all 2 cells always train"),
        (dict(policy="async", training_cells=3), "training_cells: at most K"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        settings(**changes)
    assert "\n" not in str(caught.value)


def test_phi_times_b_must_be_an_integer():
    assert extra_groups(0.1, 30) == 3
    with pytest.raises(InputError, match=r"0\.3 \* 32 = 9\.6"):
        extra_groups(0.3, 32)


def test_supply_is_rounded_up():
    assert supply_groups(0.25, 32) == 8 and supply_groups(0.3, 10) == 3 and supply_groups(0.26, 32) == 9
    with pytest.raises(InputError, match="supply_fraction"):
        supply_groups(0, 32)


def test_settings_of_a_configuration_and_back_from_json():
    made = SchedulerSettings.from_config(RunConfig())
    assert made.extra_groups == 2 and made.supply_groups == 1
    assert SchedulerSettings.from_json(made.to_json()) == made
    with pytest.raises(InputError, match="unknown field colour"):
        SchedulerSettings.from_json({**made.to_json(), "colour": 1})
