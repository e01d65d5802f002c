"""Serve the deployments of this machine: `python -m flows.serve`. Each can then be launched from the UI with a form."""

from prefect import serve

from flows.burst import burst
from flows.evaluation import evaluate_policy, re_evaluate
from flows.training_run import training_run

PARALLEL_FLOW_RUNS = 3


def main() -> None:
    serve(
        training_run.to_deployment("one-machine", description="Train a policy; a run with the same name is resumed.", tags=["gyre"]),
        burst.to_deployment("one-machine", description="Carry out (or finish) one burst of a run whose services are up.", tags=["gyre"]),
        evaluate_policy.to_deployment("one-machine", description="Score the published policy on held-out tasks.", tags=["gyre"]),
        re_evaluate.to_deployment("one-machine", description="Score preserved work again, chosen by SQL.", tags=["gyre"]),
        limit=PARALLEL_FLOW_RUNS,
    )


if __name__ == "__main__":
    main()
