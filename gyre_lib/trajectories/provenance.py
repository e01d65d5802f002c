"""Which tokens may be a target: emitted by our engine for this execution, in a turn that the harness really took.

Per token the rule is the record's form: `output_ids` were emitted, `input_ids` were supplied. Per record the rule needs the whole
execution, because whether an answer arrived is known only from what came after it: `trainable_records` settles it at closure.
"""

import json
from collections import defaultdict
from collections.abc import Iterable

from gyre_lib.trajectories.classes import SIDE
from gyre_lib.trajectories.tito_record import RequestRecord


def emitted_mask(path: Iterable[RequestRecord]) -> list[bool]:
    """True for each token of a root-to-leaf path that our engines emitted; length of the whole path's tokens."""
    mask: list[bool] = []
    for record in path:
        mask.extend([False] * len(record.input_ids))
        mask.extend([True] * len(record.output_ids))
    return mask


def trainable_records(records: Iterable[RequestRecord]) -> dict[str, bool]:
    """For each record of ONE execution, by request id: may its output be a target?

    False where the proxy said so, for side requests and empty outputs, for a node that a later request could not tell from another one,
    and for orphans of a retry: among records of one request digest (same agent, same body) those that the history went on from train;
    if it went on from none, the last to arrive does (earlier ones were given up by the harness). Independent of the order of records.
    """
    records = list(records)
    parents = {record.parent_id for record in records if record.parent_id}
    doubtful = {name for record in records for name in _ambiguous(record)}
    verdict = {
        record.request_id: record.trainable and bool(record.output_ids) and record.role_class != SIDE and record.request_id not in doubtful
        for record in records
    }
    calls: defaultdict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for record in records:
        calls[record.agent_id, record.request_digest].append(record)
    for same in calls.values():
        if len(same) == 1:
            continue
        taken = {record.request_id for record in same if record.request_id in parents}
        if not taken:
            taken = {max(same, key=lambda record: (record.started_s, record.sequence)).request_id}
        for record in same:
            verdict[record.request_id] = verdict[record.request_id] and record.request_id in taken
    return verdict


def _ambiguous(record: RequestRecord) -> list[str]:
    """Request ids that this record's history could not tell apart (metadata key `ambiguous`)."""
    if '"ambiguous"' not in record.metadata:
        return []
    found = json.loads(record.metadata).get("ambiguous", [])
    return [name for name in found if isinstance(name, str)]
