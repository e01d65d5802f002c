"""A bad configuration is refused with one line that names the field."""

from pathlib import Path

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.config.run_config import RunConfig, load_config, parse_config

SHIPPED = sorted(Path("data/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    assert isinstance(load_config(path), RunConfig)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"scheduling": {"extra_dispatch": 0.3}}, "scheduling.extra_dispatch: phi*B must be an integer"),
        ({"scheduling": {"groups_per_batch": -1}}, "scheduling.groups_per_batch"),
        ({"scheduling": {"steps_per_burst": 0}}, "scheduling.steps_per_burst"),
        ({"scheduling": {"supply_fraction": 0}}, "scheduling.supply_fraction"),
        ({"scheduling": {"dispatch": "continuous"}}, "scheduling.dispatch: continuous dispatch exists for policy async only"),
        ({"cells": {"count": 0}}, "cells.count"),
        ({"cells": {"cuont": 3}}, "cells.cuont: Extra inputs are not permitted"),
        ({"cells": {"standalone_engines": 1}}, "cells.standalone_capacity"),
        ({"cells": {"context_parallel": 2}}, "cells.context_parallel"),
        ({"rollout": {"harness_budget_s": 500}}, "rollout.harness_budget_s: must be below overall_budget_s"),
        ({"training": {"ratio_high": 0.9}}, "training.ratio_high"),
        ({"name": "Not A Name"}, "name"),
        ({"scheduling": {"policy": "async"}, "cells": {"count": 1}}, "cells.training_cells"),
    ],
)
def test_impossible_values_are_refused_naming_the_field(data, field):
    with pytest.raises(InputError) as caught:
        parse_config(data, "run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {field}")
    assert "\n" not in str(caught.value)


def test_overrides_are_yaml_values(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n")
    config = load_config(path, ["scheduling.bursts=7", "training.max_trajectories=null", "rollout.harness=claude-code"])
    assert (config.scheduling.bursts, config.training.max_trajectories, config.rollout.harness) == (7, None, "claude-code")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a: [", [], "not YAML"),
        ("- 1\n", [], "a configuration is a mapping of sections"),
        ("name: a\n", ["scheduling.bursts"], "section.key=value"),
        ("name: a\n", ["name.x=1"], "name is not a section"),
    ],
)
def test_files_and_overrides_that_make_no_sense(tmp_path, text, overrides, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_config(path, overrides)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")


def test_phi_is_the_fraction_that_was_written():
    config = parse_config({"scheduling": {"extra_dispatch": 0.1, "groups_per_batch": 10}}, "x")
    assert config.scheduling.phi * 10 == 1


def test_config_package_imports_no_torch():
    import subprocess
    import sys

    program = "import sys, gyre_lib.config.run_config, gyre_lib.scheduling.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
