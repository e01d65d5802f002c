"""Routes: reservations follow the order of destinations and capacities; proxies learn every change once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_lib.coordination.routing_table import STANDALONE, Engine, Route, RoutingTable


def table_of(capacities, standalone=0):
    table = RoutingTable()
    for cell, capacity in enumerate(capacities):
        table.set_engine(Engine(f"cell-{cell}", f"http://cell-{cell}", cell, capacity, serving=True))
    if standalone:
        table.set_engine(Engine("standalone-0", "http://standalone-0", STANDALONE, standalone, serving=True))
    return table


def open_routes(table, count):
    for number in range(count):
        table.open(Route(f"e{number}", "digest", "", 100, 50, 1.0, True))


def loads(table):
    return {engine_id: table.load(engine_id) for engine_id in table.engines}


def test_new_executions_spread_by_load_relative_to_capacity():
    table = table_of([2, 4])
    open_routes(table, 6)
    assert loads(table) == {"cell-0": 2, "cell-1": 4}


def test_leaving_cell_fills_standalone_first_then_cells_in_descending_order():
    table = table_of([4, 4, 4], standalone=1)
    for number in range(4):
        table.routes[f"e{number}"] = Route(f"e{number}", "digest", "cell-0", 100, 50, 1.0, True)
        table._load["cell-0"] += 1
    assert table.move_away(["cell-0"], [STANDALONE, 2, 1]) == 4
    assert loads(table) == {"cell-0": 0, "standalone-0": 1, "cell-2": 3, "cell-1": 0}


def test_execution_without_a_serving_engine_waits_and_moves_when_one_serves():
    table = table_of([2])
    open_routes(table, 2)
    assert table.move_away(["cell-0"], []) == 0
    table.set_engine(Engine("cell-1", "http://cell-1", 1, 2))
    assert table.serve(["cell-1"], weight_version=3) == 2
    assert loads(table)["cell-1"] == 2
    assert table.engines["cell-1"].weight_version == 3


def test_delta_holds_each_change_once_and_full_holds_everything():
    table = table_of([4])
    open_routes(table, 2)
    first = table.delta()
    assert [route["execution_id"] for route in first["executions"]] == ["e0", "e1"]
    table.close("e0")
    second = table.delta()
    assert (second["executions"], second["closed"], second["version"]) == ([], ["e0"], first["version"] + 1)
    assert [route["execution_id"] for route in table.full()["executions"]] == ["e1"]
    assert table.delta()["closed"] == []


@given(
    capacities=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    standalone=st.integers(0, 4),
    data=st.data(),
)
def test_a_join_that_the_water_level_allows_never_overfills_an_engine(capacities, standalone, data):
    capacities = [capacities[0]] * len(capacities)
    remaining = standalone + sum(capacities[1:])
    table = table_of(capacities, standalone)
    open_routes(table, data.draw(st.integers(0, remaining)))
    order = ([STANDALONE] if standalone else []) + list(range(len(capacities) - 1, 0, -1))
    table.move_away(["cell-0"], order)
    assert table.load("cell-0") == 0
    for engine in table.engines.values():
        assert table.load(engine.engine_id) <= engine.capacity


@pytest.mark.parametrize("serving", [True, False])
def test_closing_frees_the_slot(serving):
    table = table_of([2])
    open_routes(table, 1)
    table.engines["cell-0"].serving = serving
    table.close("e0")
    table.close("e0")
    assert table.load("cell-0") == 0
