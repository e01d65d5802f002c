"""C29: a sandbox service that is down is not asked for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_lib.rollout.sandboxes.circuit import SandboxCircuit, SandboxServiceDown


def test_c29_the_bound_stops_the_run_and_says_why():
    circuit = SandboxCircuit(limit=3)
    for number in range(3):
        circuit.check()
        circuit.failed(f"no space {number}")
    with pytest.raises(SandboxServiceDown, match=r"3 executions in a row.*no space 2"):
        circuit.check()
    circuit.reset()
    circuit.check()


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6))
def test_c29_only_an_unbroken_row_of_failures_opens_it(results: list[bool], limit: int):
    circuit = SandboxCircuit(limit)
    row = 0
    for good in results:
        if row >= limit:
            with pytest.raises(SandboxServiceDown):
                circuit.check()
        else:
            circuit.check()
        if good:
            circuit.succeeded()
            row = 0
        else:
            circuit.failed("down")
            row += 1
