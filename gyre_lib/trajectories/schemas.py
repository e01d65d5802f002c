"""The columns of every table, in one place: type, unit and meaning (the meaning travels in the Arrow field's metadata).

Every table has `run_id` and `recorded_s`. A later row of the same key supersedes an earlier one, so a table is an append-only log of
facts; the SQL views show the latest row of each key, `<table>_log` shows all of them. A column that is not an id may be null.

Schema version: raised when a column changes its meaning or type. A new nullable column does not raise it: older files are read with
nulls there. Files of a newer version than this code knows are refused.
"""

import pyarrow as pa

SCHEMA_VERSION = 1

_NAME = pa.string()
_COUNT = pa.int32()
_BIG = pa.int64()
_REAL = pa.float64()
_FLAG = pa.bool_()
_IDS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_LOGPROBS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_NAMES = pa.list_(pa.field("item", pa.string(), nullable=False))
_REALS = pa.list_(pa.field("item", pa.float64(), nullable=False))
_SECONDS = pa.map_(pa.string(), pa.float64())
_SPANS = pa.list_(pa.field("item", pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]), nullable=False))
_TARGET_RUNS = pa.list_(pa.field("item", pa.struct([("node", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]), nullable=False))

Columns = list[tuple[str, pa.DataType, str]]

_REQUESTS: Columns = [
    ("execution_id", _NAME, "execution that made the model call"),
    ("request_id", _NAME, "32 hex digits, unique in the run"),
    ("sequence", _COUNT, "position in the execution's commit order, from 0"),
    ("parent_id", _NAME, "request_id of the parent node; empty at the root"),
    ("agent_id", _NAME, "empty for the main agent"),
    ("parent_agent_id", _NAME, "agent that started this agent; empty for the main agent"),
    ("role_class", _NAME, "main_task, main_summary, sub_task, sub_summary, or side (never trained)"),
    ("branch_reason", _NAME, "extension, root, history, compaction, retry, fork"),
    ("input_ids", _IDS, "token ids supplied from outside since the parent's path: context only"),
    ("output_ids", _IDS, "token ids emitted by our engines"),
    ("output_logprobs", _LOGPROBS, "natural log after temperature, one per output id"),
    ("version_spans", _SPANS, "run lengths [start, end) over output_ids and the policy version that sampled them"),
    ("trainable", _FLAG, "the output may be a target"),
    ("untrainable_reason", _NAME, "empty when trainable"),
    ("request_digest", _NAME, "equal for a retry of the same call"),
    ("history_key", _NAME, "digest by which the next request of the same history finds this node"),
    ("finish_reason", _NAME, "stop, length, tool_calls, abort"),
    ("temperature", _REAL, "sampling temperature"),
    ("engine_ids", _NAMES, "engines that produced the output, in order; more than one after a reroute"),
    ("attempts", _COUNT, "generation attempts at engines"),
    ("reroutes", _COUNT, "times the request moved to another engine"),
    ("cached_tokens", _COUNT, "prompt tokens that the engine had in its prefix cache"),
    ("started_s", _REAL, "Unix time at which the request arrived"),
    ("ended_s", _REAL, "Unix time at which the output was complete"),
    ("api", _NAME, "anthropic or openai"),
    ("model_requested", _NAME, "model name that the harness asked for"),
    ("stream", _FLAG, "the response was streamed"),
    ("metadata", _NAME, "JSON: headers, sampling parameters beyond temperature, parse statuses"),
    ("n_input", _COUNT, "number of input_ids (so that counting never reads the lists)"),
    ("n_output", _COUNT, "number of output_ids"),
    ("version_first", _COUNT, "policy version of the first output token; null without output"),
    ("version_last", _COUNT, "policy version of the last output token; null without output"),
]

_EXECUTIONS: Columns = [
    ("execution_id", _NAME, "one end-to-end task run by a harness in a sandbox"),
    ("group_id", _NAME, "rollout group"),
    ("task_id", _NAME, "query"),
    ("dispatch_version", _COUNT, "published policy version when the group entered the queue (v_d)"),
    ("outcome", _NAME, "Completed, HarnessTimeout, OverallTimeout, InfrastructureFailed, Cancelled; null while it runs"),
    ("outcome_detail", _NAME, "why, in one line"),
    ("score", _REAL, "reward of the designated assessment; null when there is none (a valid zero is 0)"),
    ("validity", _NAME, "valid or unresolved"),
    ("artifact_ref", _NAME, "preserved work; empty when nothing was left"),
    ("launched_s", _REAL, "Unix time of launch"),
    ("ended_s", _REAL, "Unix time at which the harness ended"),
    ("settled_s", _REAL, "Unix time at which the reward was settled"),
    ("requests", _COUNT, "model calls recorded"),
    ("output_tokens", _BIG, "tokens that our engines emitted for it"),
    ("harness", _NAME, "agent program"),
    ("train", _FLAG, "false for executions of evaluate-policy, which never enter training"),
    ("worker", _NAME, "worker process that ran it"),
]

_GROUPS: Columns = [
    ("group_id", _NAME, "the N independent executions of one query"),
    ("task_id", _NAME, "query"),
    ("status", _NAME, "queued, running, ready, assigned, consumed, lost, requeued"),
    ("dispatch_version", _COUNT, "latest published version when the group was admitted to the queue (v_d)"),
    ("consumed_step", _COUNT, "training step whose batch holds the group"),
    ("consumed_version", _COUNT, "policy version just before that step (v_t)"),
    ("staleness", _COUNT, "v_t - v_d, in policy versions"),
    ("executions", _COUNT, "executions of the group"),
    ("valid_executions", _COUNT, "executions with a valid reward"),
    ("rewards", _REALS, "valid rewards, by execution id"),
    ("mean_reward", _REAL, "mean of the valid rewards"),
    ("dispatched_s", _REAL, "Unix time of entry into the queue"),
    ("ready_s", _REAL, "Unix time at which all its rewards were settled"),
    ("consumed_s", _REAL, "Unix time of the update that consumed it"),
    ("detail", _NAME, "why it was lost, or the id under which it was queued again"),
]

_ARTIFACTS: Columns = [
    ("artifact_ref", _NAME, "reference to the preserved work, unique in the run"),
    ("execution_id", _NAME, "execution that left it"),
    ("request_id", _NAME, "last model call before it was taken (branch reference); may be empty"),
    ("kind", _NAME, "final or intermediate"),
    ("path", _NAME, "where it lies, relative to the run's folder"),
    ("digest", _NAME, "digest of its content: the artifact version"),
    ("bytes", _BIG, "size in bytes"),
    ("files", _COUNT, "number of files"),
    ("created_s", _REAL, "Unix time at which it was preserved"),
]

_ASSESSMENTS: Columns = [
    ("assessment_id", _NAME, "one evaluation of one artifact"),
    ("execution_id", _NAME, "execution whose work was assessed"),
    ("artifact_ref", _NAME, "artifact assessed"),
    ("artifact_digest", _NAME, "digest of the state that was really assessed"),
    ("request_id", _NAME, "model call after which the state was taken (branch reference); may be empty"),
    ("attempt", _COUNT, "1 for the first try on this artifact"),
    ("designated", _FLAG, "this assessment is the execution's reward; intermediate ones never are"),
    ("evaluator", _NAME, "which evaluator"),
    ("score", _REAL, "null when unresolved"),
    ("validity", _NAME, "valid or unresolved"),
    ("detail", _NAME, "evaluator's explanation or error, in one line"),
    ("started_s", _REAL, "Unix time"),
    ("ended_s", _REAL, "Unix time"),
]

_ADMISSIONS: Columns = [
    ("execution_id", _NAME, "execution"),
    ("leaf_request_id", _NAME, "leaf of the candidate trajectory"),
    ("admitted", _FLAG, "drawn for training; false beyond J_max, and where other draws had masked everything"),
    ("trajectory", _COUNT, "order of the draw, from 0, also beyond J_max; null for a leaf without unmasked tokens"),
    ("policy_version", _COUNT, "version in the seed of the draws"),
    ("role_class", _NAME, "class of the leaf"),
    ("path_request_ids", _NAMES, "nodes from the root to the leaf"),
    ("targets", _TARGET_RUNS, "targets: runs [start, end) over the output tokens of path node number `node`"),
    ("target_tokens", _COUNT, "tokens unmasked at the draw: its fixed targets (beyond J_max: what they would have been)"),
    ("candidate_tokens", _COUNT, "trainable tokens on the path before any draw"),
    ("path_tokens", _COUNT, "tokens of the whole path, context and output"),
    ("max_trajectories", _COUNT, "J_max; null for no limit"),
]

_MICRO_STEPS: Columns = [
    ("micro_step_id", _NAME, "one microbatch for each data-parallel rank of a cell"),
    ("step", _COUNT, "training step"),
    ("status", _NAME, "queued, claimed, done, returned"),
    ("cell", _COUNT, "cell that holds or did it; null while queued"),
    ("claims", _COUNT, "times it was claimed; above 1 after a cell gave it back"),
    ("rows", _COUNT, "packed rows"),
    ("trajectories", _COUNT, "trajectory rows in it"),
    ("execution_ids", _NAMES, "executions in it"),
    ("tokens", _COUNT, "tokens without padding"),
    ("target_tokens", _COUNT, "targets"),
    ("padding_tokens", _COUNT, "unused places of its rows"),
    ("queued_s", _REAL, "Unix time"),
    ("claimed_s", _REAL, "Unix time of the last claim"),
    ("done_s", _REAL, "Unix time"),
    ("forward_backward_s", _REAL, "seconds of computation on the cell"),
]

_TRAIN_STEPS: Columns = [
    ("step", _COUNT, "training step, from 0; policy version before it"),
    ("burst", _COUNT, "burst of the step"),
    ("final", _FLAG, "last step of its burst: publication follows"),
    ("cells", _COUNT, "cells in the collective prefix at the update"),
    ("groups", _COUNT, "groups consumed"),
    ("executions", _COUNT, "executions with a valid reward (E of the objective)"),
    ("trajectories", _COUNT, "admitted trajectories trained"),
    ("micro_steps", _COUNT, "micro-steps done"),
    ("tokens", _BIG, "tokens through forward and backward, without padding"),
    ("target_tokens", _BIG, "targets"),
    ("padding_tokens", _BIG, "unused places of packed rows"),
    ("max_trajectories", _COUNT, "J_max; null for no limit"),
    ("mean_reward", _REAL, "training score: mean valid reward of the batch"),
    ("loss", _REAL, "objective's loss"),
    ("grad_norm", _REAL, "global gradient norm before clipping"),
    ("learning_rate", _REAL, "of this step"),
    ("gate_fraction_executions", _REAL, "share of executions whose gate is 0"),
    ("gate_fraction_tokens", _REAL, "share of target tokens whose execution's gate is 0"),
    ("kl", _REAL, "KL estimate of behaviour against current policy, nats per token"),
    ("logprob_mismatch_mean", _REAL, "mean |trainer - engine| log-prob over targets sampled at this version, nats; null when none"),
    ("logprob_mismatch_max", _REAL, "largest such difference, nats; null when none"),
    ("entropy", _REAL, "mean entropy at the targets, nats"),
    ("ratio_mean", _REAL, "mean execution ratio s_i"),
    ("staleness_mean", _REAL, "mean staleness of the groups consumed, versions"),
    ("opened_s", _REAL, "Unix time at which the batch was opened"),
    ("trained_s", _REAL, "Unix time at which every micro-step was done"),
    ("updated_s", _REAL, "Unix time at which the update was complete"),
    ("duration_s", _REAL, "seconds from opening to update"),
    ("seconds", _SECONDS, "seconds by phase: wait, forward_backward, reduce, optimizer, broadcast, checkpoint, …"),
]

_TRANSITIONS: Columns = [
    ("transition_id", _NAME, "one change of role of one cell"),
    ("cell", _COUNT, "cell; 0 is the core"),
    ("direction", _NAME, "to_training or to_rollout"),
    ("burst", _COUNT, "burst"),
    ("step", _COUNT, "training step that was current"),
    ("outcome", _NAME, "done, failed, late (not in the prefix)"),
    ("detail", _NAME, "why it failed"),
    ("started_s", _REAL, "Unix time"),
    ("ended_s", _REAL, "Unix time; null while it is going on"),
    ("duration_s", _REAL, "seconds"),
    ("rerouted_executions", _COUNT, "executions whose route moved"),
    ("rerouted_requests", _COUNT, "requests in flight that moved"),
    ("weight_version", _COUNT, "version of the weights loaded"),
    ("weight_bytes", _BIG, "bytes of weights pulled or loaded"),
    ("water_level", _COUNT, "executions not yet terminated, at the start"),
    ("phases", _SECONDS, "seconds by phase"),
]

_PUBLICATIONS: Columns = [
    ("version", _COUNT, "published policy version"),
    ("engine_id", _NAME, "engine that received it"),
    ("burst", _COUNT, "burst that ended with it"),
    ("ok", _FLAG, "the engine reports this version"),
    ("detail", _NAME, "why not"),
    ("bytes", _BIG, "bytes sent to the engine"),
    ("started_s", _REAL, "Unix time"),
    ("ended_s", _REAL, "Unix time"),
    ("duration_s", _REAL, "seconds"),
    ("phases", _SECONDS, "seconds by phase: pause, update, resume, verify"),
]

_ENGINES: Columns = [
    ("engine_id", _NAME, "engine"),
    ("at_s", _REAL, "Unix time of this state"),
    ("state", _NAME, "started, serving, draining, training, lost, stopped"),
    ("cell", _COUNT, "cell of the engine; -1 in the standalone pool"),
    ("weight_version", _COUNT, "policy version it serves"),
    ("capacity", _COUNT, "concurrent executions"),
    ("url", _NAME, "address"),
    ("pid", _COUNT, "process id"),
    ("device", _NAME, "cpu or cuda"),
    ("detail", _NAME, "reason of the change"),
]

KEYS: dict[str, tuple[str, ...]] = {
    "requests": ("request_id",),
    "executions": ("execution_id",),
    "groups": ("group_id",),
    "artifacts": ("artifact_ref",),
    "assessments": ("assessment_id",),
    "admissions": ("execution_id", "leaf_request_id"),
    "micro_steps": ("micro_step_id",),
    "train_steps": ("step",),
    "transitions": ("transition_id",),
    "publications": ("version", "engine_id"),
    "engines": ("engine_id", "at_s"),
}
"""Per table, the columns whose equality makes a later row supersede an earlier one."""

_REQUIRED = {"requests": {name for name, _, _ in _REQUESTS} - {"version_first", "version_last"}}


def _schema(table: str, columns: Columns) -> pa.Schema:
    required = _REQUIRED.get(table, set()) | set(KEYS[table])
    common: Columns = [("run_id", _NAME, "run"), ("recorded_s", _REAL, "Unix time at which the row was written")]
    fields = [pa.field(name, kind, nullable=False, metadata={"meaning": text}) for name, kind, text in common]
    fields += [pa.field(name, kind, nullable=name not in required, metadata={"meaning": text}) for name, kind, text in columns]
    return pa.schema(fields, metadata={"gyre.table": table, "gyre.schema_version": str(SCHEMA_VERSION)})


SCHEMAS: dict[str, pa.Schema] = {
    table: _schema(table, columns)
    for table, columns in {
        "requests": _REQUESTS,
        "executions": _EXECUTIONS,
        "groups": _GROUPS,
        "artifacts": _ARTIFACTS,
        "assessments": _ASSESSMENTS,
        "admissions": _ADMISSIONS,
        "micro_steps": _MICRO_STEPS,
        "train_steps": _TRAIN_STEPS,
        "transitions": _TRANSITIONS,
        "publications": _PUBLICATIONS,
        "engines": _ENGINES,
    }.items()
}


def column_meanings(table: str) -> list[dict[str, str]]:
    """One row per column: table, column, type, meaning."""
    return [
        {"table": table, "column": field.name, "type": str(field.type), "meaning": field.metadata[b"meaning"].decode()}
        for field in SCHEMAS[table]
    ]


def schema_version(schema: pa.Schema) -> int:
    """Version written into a file's schema; 0 for a file without one."""
    return int((schema.metadata or {}).get(b"gyre.schema_version", b"0"))
