"""Run a flow in this process: `python -m flows.launch training-run RUN | burst RUN NUMBER | evaluate-policy RUN LABEL`.

Prints one JSON line with the flow's result last. The run's folder already holds its configuration.
"""

import json
import sys

from gyre_lib.config.run_config import load_config
from tasks.connection import layout_of


def main(arguments: list[str]) -> None:
    kind, run, *rest = arguments
    if kind == "training-run":
        from flows.training_run import training_run

        result = training_run(load_config(layout_of(run).config))
    elif kind == "burst":
        from flows.burst import burst

        result = burst(run, int(rest[0]))
    else:
        from flows.evaluation import evaluate_policy

        result = evaluate_policy(run, label=rest[0])
    print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
