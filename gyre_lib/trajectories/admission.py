"""Which trajectories of an execution are trained, and on which tokens (the paper's admission rule).

Invariants, each a property test:

1. A target was emitted by our engines for this execution and may be trained (provenance); everything else is context.
2. Every unmasked policy token is a target of at most one admitted trajectory; without a limit, of exactly one.
3. Targets are fixed at the draw: later draws leave them alone.
4. A class is drawn from only when every higher class has no leaf with unmasked tokens left.
5. Within a class a leaf is drawn with probability proportional to its unmasked count.
6. The draws depend on run, execution and version only: the same ones give the same choice, on any machine.

No path is expanded here: the rule needs the shape of the tree and token counts, never the tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gyre_lib.trajectories.classes import CLASSES
from gyre_lib.trajectories.provenance import trainable_records
from gyre_lib.trajectories.segments import Row
from gyre_lib.trajectories.store import record_outlines
from gyre_lib.trajectories.tito_record import BadRecord, RequestRecord


@dataclass(frozen=True, slots=True)
class TreeNode:
    """What admission knows of one request record: its place in the tree and its token counts."""

    request_id: str
    parent_id: str
    role_class: str
    trainable: bool
    n_input: int
    n_output: int


@dataclass(frozen=True, slots=True)
class TargetRun:
    """Output tokens [start, end) of path node number `node` (from the root, 0) are targets."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AdmittedTrajectory:
    """One drawn trajectory: the path from the root to a leaf, and its fixed targets."""

    trajectory: int
    """Order of the draw, from 0."""
    leaf_request_id: str
    role_class: str
    path_request_ids: tuple[str, ...]
    targets: tuple[TargetRun, ...]
    target_tokens: int
    candidate_tokens: int
    """Trainable tokens on the path before any draw."""
    path_tokens: int
    """All tokens of the path, context and output."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome for one execution. Every candidate is in one of the three lists."""

    admitted: list[AdmittedTrajectory]
    beyond: list[AdmittedTrajectory]
    """What further draws, beyond the limit, would have admitted: what a larger limit would cost can be read off."""
    empty: list[AdmittedTrajectory]
    """Leaves whose tokens were all masked by other draws; `trajectory` is -1."""


def admit(
    records: Sequence[RequestRecord],
    *,
    run_id: str,
    execution_id: str,
    version: int,
    max_trajectories: int | None,
    trainable: Mapping[str, bool] | None = None,
) -> list[AdmittedTrajectory]:
    """Draw at most `max_trajectories` (None: no limit) of one execution's trajectories, in order of the draw.

    `records` in sequence order; `trainable` by request_id, None for the provenance rule. Raises BadRecord for a tree that is none.
    """
    nodes = nodes_of_records(records, trainable)
    return admit_nodes(nodes, run_id=run_id, execution_id=execution_id, version=version, max_trajectories=max_trajectories).admitted


def nodes_of_records(records: Sequence[RequestRecord], trainable: Mapping[str, bool] | None = None) -> list[TreeNode]:
    """The tree of an execution's records; `trainable` None: by the provenance rule."""
    trainable = trainable_records(records) if trainable is None else trainable
    return [
        TreeNode(
            record.request_id,
            record.parent_id,
            record.role_class,
            trainable[record.request_id],
            len(record.input_ids),
            len(record.output_ids),
        )
        for record in records
    ]


def nodes_of_table(requests: pa.Table) -> list[TreeNode]:
    """The tree of one execution's rows of table `requests`, sorted by sequence, by the provenance rule; reads none of the token lists."""
    outlines = record_outlines(requests)
    trainable = trainable_records(outlines)
    counts = zip(requests.column("n_input").to_pylist(), requests.column("n_output").to_pylist(), strict=True)
    return [
        TreeNode(outline.request_id, outline.parent_id, outline.role_class, trainable[outline.request_id], n_input, n_output)
        for outline, (n_input, n_output) in zip(outlines, counts, strict=True)
    ]


def admit_nodes(nodes: Sequence[TreeNode], *, run_id: str, execution_id: str, version: int, max_trajectories: int | None) -> Admission:
    """As `admit`, on the bare tree, and with the candidates beyond the limit. Parents stand before their children."""
    tree = _CandidateTree(nodes)
    unmasked = tree.leaf_counts()
    candidates = unmasked.copy()
    masked = [count == 0 for count in tree.targets]
    drawn: list[AdmittedTrajectory] = []
    undrawn = dict.fromkeys(range(len(tree.leaves)))
    while (leaf := _draw(tree, unmasked, f"{run_id}\0{execution_id}\0{version}\0{len(drawn)}")) is not None:
        path = tree.path(leaf)
        fresh = [place for place, index in enumerate(path) if not masked[index]]
        drawn.append(_trajectory(tree, nodes, leaf, int(candidates[leaf]), fresh, len(drawn)))
        del undrawn[leaf]
        for place in fresh:
            index = path[place]
            masked[index] = True
            unmasked[tree.first_leaf[index] : tree.end_leaf[index]] -= tree.targets[index]
    empty = [_trajectory(tree, nodes, leaf, int(candidates[leaf]), [], -1) for leaf in undrawn]
    limit = len(drawn) if max_trajectories is None else max_trajectories
    return Admission(drawn[:limit], drawn[limit:], empty)


def admission_rows(admission: Admission, *, execution_id: str, version: int, max_trajectories: int | None) -> list[Row]:
    """Rows for table `admissions`: one per candidate."""
    return [
        {
            "execution_id": execution_id,
            "policy_version": version,
            "max_trajectories": max_trajectories,
            "admitted": admitted,
            "trajectory": item.trajectory if item.trajectory >= 0 else None,
            "leaf_request_id": item.leaf_request_id,
            "role_class": item.role_class,
            "path_request_ids": list(item.path_request_ids),
            "targets": [{"node": run.node, "start": run.start, "end": run.end} for run in item.targets],
            "target_tokens": item.target_tokens,
            "candidate_tokens": item.candidate_tokens,
            "path_tokens": item.path_tokens,
        }
        for admitted, items in ((True, admission.admitted), (False, admission.beyond), (False, admission.empty))
        for item in items
    ]


def _trajectory(
    tree: "_CandidateTree", nodes: Sequence[TreeNode], leaf: int, candidates: int, fresh: list[int], trajectory: int
) -> AdmittedTrajectory:
    """`fresh`: places of the path's nodes whose tokens are its targets."""
    path = tree.path(leaf)
    end = nodes[path[-1]]
    targets = tuple(TargetRun(place, 0, tree.targets[path[place]]) for place in fresh)
    return AdmittedTrajectory(
        trajectory=trajectory,
        leaf_request_id=end.request_id,
        role_class=end.role_class,
        path_request_ids=tuple(nodes[index].request_id for index in path),
        targets=targets,
        target_tokens=sum(run.end for run in targets),
        candidate_tokens=candidates,
        path_tokens=sum(nodes[index].n_input + nodes[index].n_output for index in path),
    )


def _draw(tree: "_CandidateTree", unmasked: np.ndarray, seed: str) -> int | None:
    """Number of the drawn leaf; None when nothing is unmasked."""
    for leaves in tree.leaves_by_class:
        counts = unmasked[leaves]
        total = int(counts.sum())
        if total:
            # A hash and not a library's generator: its draws must not change with a library's version. 256 bits: no visible bias.
            point = int.from_bytes(hashlib.sha256(seed.encode()).digest()) % total
            return int(leaves[np.searchsorted(np.cumsum(counts), point, side="right")])
    return None


class _CandidateTree:
    """The tree cut down to nodes with a trainable token in or below them, so that no path carries a tail without targets.

    Leaves are numbered depth first: the leaves below node i are [first_leaf[i], end_leaf[i]), and masking i is one slice.
    """

    def __init__(self, nodes: Sequence[TreeNode]) -> None:
        place = {node.request_id: index for index, node in enumerate(nodes)}
        if len(place) != len(nodes):
            raise BadRecord("two records of one execution have the same request_id")
        self._parent = [self._parent_of(index, node, place) for index, node in enumerate(nodes)]
        self.targets = [node.n_output if node.trainable and node.role_class in CLASSES else 0 for node in nodes]
        below = [0] * len(nodes)  # leaves in the subtree; a node without any is cut
        for index in reversed(range(len(nodes))):
            if not below[index] and self.targets[index]:
                below[index] = 1
            if self._parent[index] >= 0:
                below[self._parent[index]] += below[index]
        self.first_leaf, self.end_leaf = [0] * len(nodes), [0] * len(nodes)
        self.leaves = [0] * sum(count for count, parent in zip(below, self._parent, strict=True) if parent < 0)
        next_leaf = [0] * len(nodes)
        next_root = 0
        has_child = [False] * len(nodes)
        for index, parent in enumerate(self._parent):
            if parent >= 0 and below[index]:
                has_child[parent] = True
        for index, parent in enumerate(self._parent):
            first = next_root if parent < 0 else next_leaf[parent]
            self.first_leaf[index], self.end_leaf[index] = first, first + below[index]
            next_leaf[index] = first
            if parent < 0:
                next_root += below[index]
            else:
                next_leaf[parent] += below[index]
            if below[index] and not has_child[index]:
                self.leaves[first] = index
        classes = np.array([CLASSES.index(nodes[index].role_class) for index in self.leaves], int)
        self.leaves_by_class = [np.flatnonzero(classes == rank) for rank in range(len(CLASSES))]

    def leaf_counts(self) -> np.ndarray:
        """Per leaf, the trainable tokens of its path."""
        counts = np.zeros(len(self.leaves), np.int64)
        for index, count in enumerate(self.targets):
            counts[self.first_leaf[index] : self.end_leaf[index]] += count
        return counts

    def path(self, leaf: int) -> list[int]:
        """Places of the nodes from the root to a leaf."""
        path = [self.leaves[leaf]]
        while self._parent[path[-1]] >= 0:
            path.append(self._parent[path[-1]])
        return path[::-1]

    def _parent_of(self, index: int, node: TreeNode, place: dict[str, int]) -> int:
        if not node.parent_id:
            return -1
        parent = place.get(node.parent_id, index)
        if parent >= index:
            raise BadRecord(f"request {node.request_id}: its parent {node.parent_id} is not among the records before it")
        return parent
