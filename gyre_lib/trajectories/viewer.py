"""What `gyre show` tells about one execution, gathered once for the text and the page: tree, trajectories, assessments."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb

from gyre_lib.config.errors import InputError
from gyre_lib.trajectories.views import ask

Row = dict[str, Any]


@dataclass(frozen=True)
class ExecutionRecord:
    """Everything recorded of one execution. `requests` in commit order, `admissions` in the order of the draws."""

    execution: Row
    group: Row
    requests: list[Row]
    admissions: list[Row]
    assessments: list[Row]
    texts: dict[int, str]
    """Text of each token id that occurs; empty when the run's tokenizer is not at hand."""
    token_bytes: dict[int, str]
    """Bytes (hex) of those that are only a part of a character."""

    @cached_property
    def children(self) -> dict[str, list[Row]]:
        """Rows of table `requests` by parent_id, in commit order."""
        found: defaultdict[str, list[Row]] = defaultdict(list)
        for row in self.requests:
            found[row["parent_id"]].append(row)
        return dict(found)

    @cached_property
    def targets(self) -> dict[str, dict[int, int]]:
        """request_id -> {output place: number of the trajectory whose target it is}."""
        found: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for item in self.admitted:
            for run in item["targets"]:
                request_id = item["path_request_ids"][run["node"]]
                found[request_id].update({place: item["trajectory"] for place in range(run["start"], run["end"])})
        return dict(found)

    @property
    def admitted(self) -> list[Row]:
        return [item for item in self.admissions if item["admitted"]]

    @cached_property
    def trajectories(self) -> dict[str, list[int]]:
        """request_id -> numbers of the admitted trajectories whose path has it."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for item in self.admitted:
            for request_id in item["path_request_ids"]:
                found[request_id].append(item["trajectory"])
        return dict(found)

    @property
    def why_no_trajectories(self) -> str:
        """Said where an execution has no admissions."""
        if self.execution.get("train") is False:
            return "the execution only evaluates a policy"
        if self.execution.get("outcome") and self.execution.get("validity") != "valid":
            return "without a valid score nothing is trained"
        return "admission happens when the training batch takes the group"

    @property
    def tokens(self) -> int:
        return sum(row["n_input"] + row["n_output"] for row in self.requests)


def gather(connection: duckdb.DuckDBPyConnection, execution_id: str) -> ExecutionRecord:
    """Raises InputError when the run has no such execution; names close ones."""
    requests = _rows(connection, "requests", "execution_id", execution_id, "sequence")
    executions = _rows(connection, "executions", "execution_id", execution_id, "recorded_s")
    if not requests and not executions:
        known = ask(
            connection,
            "SELECT execution_id FROM (SELECT execution_id FROM executions UNION SELECT execution_id FROM requests)"
            " ORDER BY jaro_winkler_similarity(execution_id, ?) DESC, execution_id LIMIT 3",
            [execution_id],
        )
        names = known.column(0).to_pylist()
        raise InputError(
            f"execution {execution_id}: no such execution{'; there is ' + ', '.join(names) if names else ' (none is recorded yet)'}"
        )
    execution = executions[0] if executions else {"execution_id": execution_id}
    groups = _rows(connection, "groups", "group_id", execution.get("group_id") or "", "group_id")
    return ExecutionRecord(
        execution,
        groups[0] if groups else {},
        requests,
        _rows(connection, "admissions", "execution_id", execution_id, "trajectory"),
        _rows(connection, "assessments", "execution_id", execution_id, "attempt"),
        *_texts(connection, requests),
    )


def _rows(connection: duckdb.DuckDBPyConnection, table: str, column: str, value: str, order: str) -> list[Row]:
    return ask(connection, f"SELECT * FROM {table} WHERE {column} = ? ORDER BY {order}", [value]).to_pylist()


def _texts(connection: duckdb.DuckDBPyConnection, requests: list[Row]) -> tuple[dict[int, str], dict[int, str]]:
    used = {token for row in requests for token in (*row["input_ids"], *row["output_ids"])}
    words = [
        row for row in ask(connection, "SELECT token_id, text, hex(bytes) AS bytes FROM vocabulary").to_pylist() if row["token_id"] in used
    ]
    parts = {row["token_id"]: row["bytes"] for row in words if "\ufffd" in row["text"] and row["bytes"]}
    return {row["token_id"]: row["text"] for row in words}, parts
