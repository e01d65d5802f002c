"""Serve the deployments of this machine: `python -m flows.serve`. Each can then be launched from the UI with a form."""

from pathlib import Path

from prefect import serve

from flows.burst import burst
from flows.evaluation import evaluate_policy, re_evaluate
from flows.training_run import training_run
from gyre_lib.config.run_config import load_config

# The form starts from settings that run on this machine as they are.
FORM_DEFAULTS = Path(__file__).parents[1] / "data/configs/demo.yaml"
PARALLEL_FLOW_RUNS = 3


def main() -> None:
    defaults = load_config(FORM_DEFAULTS, ["name=from-the-ui", "scheduling.bursts=2"])
    serve(
        training_run.to_deployment(
            "one-machine",
            description="Train a policy; a run with the same name is resumed.",
            tags=["gyre"],
            parameters={"config": defaults.model_dump()},
        ),
        burst.to_deployment("one-machine", description="Carry out (or finish) one burst of a run whose services are up.", tags=["gyre"]),
        evaluate_policy.to_deployment("one-machine", description="Score the published policy on held-out tasks.", tags=["gyre"]),
        re_evaluate.to_deployment("one-machine", description="Score preserved work again, chosen by SQL.", tags=["gyre"]),
        limit=PARALLEL_FLOW_RUNS,
    )


if __name__ == "__main__":
    main()
