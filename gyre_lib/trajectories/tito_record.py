"""The TITO request record of one model call: exact ids in, exact ids out, log-probs, and what is needed to place it in the tree."""

import math
from dataclasses import dataclass, field


class BadRecord(ValueError):
    """A record that contradicts itself; it is refused, never repaired."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled from policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One node of an execution's trajectory tree. Inputs are incremental: the parent's path, then `input_ids`, is the whole prompt.

    Everything in `input_ids` was supplied from outside and is context only; everything in `output_ids` was emitted by our engines.
    """

    run_id: str
    execution_id: str
    request_id: str
    """32 hex digits, unique in the run."""
    sequence: int
    """Position in the execution's commit order, from 0."""
    parent_id: str
    """request_id of the parent node; empty at the root."""
    agent_id: str
    """Empty for the main agent."""
    parent_agent_id: str
    role_class: str
    """One of trajectories.classes.CLASSES: main_task, main_summary, sub_task, sub_summary; or `side` (recorded, never trained)."""
    branch_reason: str
    """extension, root, history, compaction, retry, fork."""
    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    """Natural log, after temperature; one per output id."""
    version_spans: list[VersionSpan]
    """Run lengths over output_ids, in order, without gaps."""
    trainable: bool
    untrainable_reason: str
    """Empty when trainable."""
    request_digest: str
    """Digest of agent and canonical request body: equal for a retry of the same call."""
    history_key: str
    """Digest by which the next request of the same history finds this node."""
    finish_reason: str
    """stop, length, tool_calls, abort."""
    temperature: float
    engine_ids: list[str] = field(default_factory=list)
    """Engines that produced the output, in order; more than one after a reroute."""
    attempts: int = 1
    reroutes: int = 0
    cached_tokens: int = 0
    started_s: float = 0.0
    """Unix time at which the request arrived."""
    ended_s: float = 0.0
    api: str = "anthropic"
    model_requested: str = ""
    stream: bool = False
    metadata: str = "{}"
    """JSON: headers worth keeping, sampling parameters beyond temperature, parse statuses."""

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.output_logprobs):
            raise BadRecord(f"request {self.request_id}: {len(self.output_ids)} output ids but {len(self.output_logprobs)} log-probs")
        if not all(math.isfinite(value) for value in self.output_logprobs):
            raise BadRecord(f"request {self.request_id}: a log-prob is not finite")
        position = 0
        for span in self.version_spans:
            if span.start != position or span.end <= span.start:
                raise BadRecord(f"request {self.request_id}: version spans leave a gap at token {position}")
            position = span.end
        if position != len(self.output_ids):
            raise BadRecord(f"request {self.request_id}: version spans cover {position} of {len(self.output_ids)} output ids")
