"""A training run: bursts one after another, resumed by name."""

import contextlib
from collections.abc import Iterator
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from flows.burst import burst
from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig
from gyre_lib.coordination.run_services import prepare_run, start_services, stop_services
from gyre_lib.coordination.services_file import read_services
from tasks.connection import coordinator_of, runs_folder
from tasks.reporting import report_run


def _name() -> str:
    return str(_config_of(flow_run.parameters["config"]).name)


def _config_of(value: Any) -> RunConfig:
    return value if isinstance(value, RunConfig) else RunConfig.model_validate(value)


@flow(name="training-run", flow_run_name=_name)
def training_run(config: RunConfig) -> dict[str, Any]:
    """Train a policy: bursts until the configured number is done. A run with this name that was stopped goes on where it was."""
    layout = prepare_run(config, runs_folder())
    with services_of(layout):
        client = coordinator_of(config.name)
        started = client.start_run()
        number, run_done = started["burst"], started["run_done"]
        while not run_done:
            print(_line(burst(config.name, number), config), flush=True)
            state = client.state()
            number, run_done = max(number + 1, state["burst"]), state["run_done"]
        result = report_run(config.name)
    get_run_logger().info("run %s: %s", config.name, result)
    return result


def _line(done: dict[str, Any], config: RunConfig) -> str:
    """One burst in one line, for the terminal."""
    score = "no score" if done["score"] is None else f"training score {done['score']:.3f}"
    of = config.scheduling.bursts
    return f"burst {done['burst'] + 1} of {of}: {score}, up to {done['cells']} cells trained together, {done['seconds']:.0f} s"


@contextlib.contextmanager
def services_of(layout: RunLayout) -> Iterator[None]:
    """The run's services: those that are up, or ones that live as long as this flow."""
    services = read_services(layout)
    if services is not None:
        yield
        return
    start_services(layout)
    try:
        yield
    finally:
        stop_services(layout)


if __name__ == "__main__":
    training_run(RunConfig())
