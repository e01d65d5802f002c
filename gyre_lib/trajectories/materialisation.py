"""Admitted trajectories as token rows: the path's tokens in order, with masks, log-probs and versions aligned to them.

Only nodes of admitted paths are touched. From Arrow the token arrays are views of the segment's buffers; the one copy is the row itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gyre_lib.trajectories.admission import AdmittedTrajectory
from gyre_lib.trajectories.tito_record import BadRecord, RequestRecord


@dataclass(frozen=True)
class TrajectoryRow:
    """One trajectory of T tokens. Position t is a target iff token_ids[t] is to be predicted from the tokens before it."""

    execution_id: str
    group_id: str
    trajectory: int
    role_class: str
    token_ids: np.ndarray
    """int32[T]"""
    targets: np.ndarray
    """bool[T]"""
    logprobs: np.ndarray
    """float32[T]: the recorded behaviour log-prob of a target; 0 elsewhere."""
    versions: np.ndarray
    """int32[T]: policy version that sampled a target; -1 elsewhere."""
    temperature: float

    @property
    def positions(self) -> np.ndarray:
        """int32[T], from 0."""
        return np.arange(len(self.token_ids), dtype=np.int32)

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.targets))


@dataclass(frozen=True, slots=True)
class NodeTokens:
    """Token arrays of one request record."""

    input_ids: np.ndarray
    output_ids: np.ndarray
    logprobs: np.ndarray
    spans: Sequence[tuple[int, int, int]]
    """(version, start, end) over the output."""
    temperature: float


def materialise(
    records: Sequence[RequestRecord], admitted: Sequence[AdmittedTrajectory], group_id: str | None = None
) -> list[TrajectoryRow]:
    """Rows of one execution's admitted trajectories. `group_id` None: the execution id up to its last dash.

    Raises BadRecord when a path has targets sampled at two temperatures, or a target without any token before it.
    """
    if not admitted:
        return []
    wanted = {request_id for item in admitted for request_id in item.path_request_ids}
    nodes = {record.request_id: _of_record(record) for record in records if record.request_id in wanted}
    return materialise_nodes(nodes, admitted, records[0].execution_id, group_id)


def materialise_table(requests: pa.Table, admitted: Sequence[AdmittedTrajectory], group_id: str | None = None) -> list[TrajectoryRow]:
    """As `materialise`, from one execution's rows of table `requests`, whose token lists are not copied before the row is built."""
    if not admitted:
        return []
    wanted = {request_id for item in admitted for request_id in item.path_request_ids}
    return materialise_nodes(nodes_of(requests, wanted), admitted, requests.column("execution_id")[0].as_py(), group_id)


def materialise_nodes(
    nodes: Mapping[str, NodeTokens], admitted: Sequence[AdmittedTrajectory], execution_id: str, group_id: str | None = None
) -> list[TrajectoryRow]:
    """Rows from token arrays by request_id."""
    group_id = execution_id.rpartition("-")[0] if group_id is None else group_id
    return [_row(nodes, item, execution_id, group_id) for item in admitted]


def nodes_of(requests: pa.Table, wanted: set[str]) -> dict[str, NodeTokens]:
    """Views of the token lists of the wanted rows, by request_id."""
    nodes = {}
    for batch in requests.to_batches():
        inputs, outputs, logprobs = (_lists(batch.column(name)) for name in ("input_ids", "output_ids", "output_logprobs"))
        spans = batch.column("version_spans")
        temperatures = batch.column("temperature")
        for place, request_id in enumerate(batch.column("request_id").to_pylist()):
            if request_id in wanted:
                runs = [(span["version"], span["start"], span["end"]) for span in spans[place].as_py()]
                nodes[request_id] = NodeTokens(
                    _slice(inputs, place), _slice(outputs, place), _slice(logprobs, place), runs, temperatures[place].as_py()
                )
    return nodes


def _row(nodes: Mapping[str, NodeTokens], item: AdmittedTrajectory, execution_id: str, group_id: str) -> TrajectoryRow:
    path = [nodes[request_id] for request_id in item.path_request_ids]
    output_starts = []
    length = 0
    for node in path:
        output_starts.append(length + len(node.input_ids))
        length = output_starts[-1] + len(node.output_ids)
    token_ids = np.empty(length, np.int32)
    targets = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    for node, output_start in zip(path, output_starts, strict=True):
        token_ids[output_start - len(node.input_ids) : output_start] = node.input_ids
        token_ids[output_start : output_start + len(node.output_ids)] = node.output_ids
    for run in item.targets:
        node, offset = path[run.node], output_starts[run.node]
        targets[offset + run.start : offset + run.end] = True
        logprobs[offset + run.start : offset + run.end] = node.logprobs[run.start : run.end]
        for version, start, end in node.spans:
            start, end = max(start, run.start), min(end, run.end)
            if start < end:
                versions[offset + start : offset + end] = version
    temperatures = {path[run.node].temperature for run in item.targets}
    if len(temperatures) != 1:
        raise BadRecord(f"execution {execution_id}: trajectory {item.trajectory} was sampled at temperatures {sorted(temperatures)}")
    if targets[0]:
        raise BadRecord(f"execution {execution_id}: trajectory {item.trajectory} begins with a target that nothing precedes")
    return TrajectoryRow(
        execution_id, group_id, item.trajectory, item.role_class, token_ids, targets, logprobs, versions, temperatures.pop()
    )


def _of_record(record: RequestRecord) -> NodeTokens:
    return NodeTokens(
        np.asarray(record.input_ids, np.int32),
        np.asarray(record.output_ids, np.int32),
        np.asarray(record.output_logprobs, np.float32),
        [(span.version, span.start, span.end) for span in record.version_spans],
        record.temperature,
    )


def _lists(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)


def _slice(lists: tuple[np.ndarray, np.ndarray], place: int) -> np.ndarray:
    values, offsets = lists
    return values[offsets[place] : offsets[place + 1]]
