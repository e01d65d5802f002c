"""The core's side of a pull, as a process of its own: obeys one word a line on standard input and answers each with a line of JSON.

`expose N` answers with the manifest of a slab of N numbers; `publish V` shows it full of V; `churn` publishes ever new versions until it is killed.
"""

import json
import sys
import time
from typing import Any

import torch

from gyre_lib.transfer.transport import open_transport
from gyre_lib.transfer.weight_exposure import WeightExposure


def main(kind: str) -> None:
    transport = open_transport(kind)
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "expose":
            slab = torch.zeros(int(arguments[0]))
            exposure = WeightExposure(slab, transport)
            answer(exposure.manifest())
        if word == "publish":
            slab.fill_(float(arguments[0]))
            exposure.publish(int(arguments[0]))
            answer({})
        if word == "churn":
            answer({})
            version = 0
            while True:
                version += 1
                slab.fill_(float(version))
                exposure.publish(version)
                time.sleep(0.03 if version % 3 else 0.0)


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
