"""An execution as text: what became of it, its trajectories, and its tree with one line per model call."""

from collections.abc import Iterator
from typing import Any

from gyre_lib.trajectories.viewer import ExecutionRecord

LEGEND = (
    "One line per model call: its number, class, why it stands there, new tokens in, tokens emitted, policy version, and the trajectories\n"
    "(T0, …) on whose path it lies; * marks the one that trains its output. ● starts a context, │ continues the call above,\n"
    "├ branches off the call above it at the next lower indentation."
)


def render(record: ExecutionRecord) -> str:
    return "\n".join([*_summary(record), "", *_trajectories(record), "", *_assessments(record), "", "tree", *_tree(record), "", LEGEND])


def _summary(record: ExecutionRecord) -> Iterator[str]:
    execution, group = record.execution, record.group
    yield f"execution {execution['execution_id']}   task {_known(execution.get('task_id'))}   harness {_known(execution.get('harness'))}"
    ended = execution.get("outcome")
    score = "no valid score" if execution.get("validity") != "valid" else f"score {execution['score']:g}"
    detail = f" ({execution['outcome_detail']})" if execution.get("outcome_detail") else ""
    yield f"outcome   {ended}{detail}, {score}" if ended else "outcome   still running"
    if group:
        step = group["consumed_step"]
        consumed = f"consumed by step {step}, staleness {group['staleness']}" if step is not None else group["status"]
        yield f"group     {group['group_id']}: dispatched at version {group['dispatch_version']}, {consumed}, rewards {group['rewards'] or '-'}"
    emitted = sum(row["n_output"] for row in record.requests)
    agents = len({row["agent_id"] for row in record.requests if row["agent_id"]})
    yield f"calls     {len(record.requests)} model calls, {agents} sub-agents, {record.tokens - emitted} tokens supplied, {emitted} emitted"


def _trajectories(record: ExecutionRecord) -> Iterator[str]:
    if not record.admissions:
        yield f"trajectories: none ({record.why_no_trajectories})"
        return
    limit = record.admissions[0]["max_trajectories"]
    yield f"trajectories: {len(record.admitted)} of {len(record.admissions)} candidates admitted (limit {limit or 'none'})"
    for item in record.admissions:
        name = f"T{item['trajectory']}" if item["admitted"] else "--"
        why = (
            ""
            if item["admitted"]
            else "   beyond the limit"
            if item["trajectory"] is not None
            else "   all its tokens are in other trajectories"
        )
        yield (
            f"  {name:<4}{item['role_class']:<13}{len(item['path_request_ids']):>4} calls {item['path_tokens']:>8} tokens"
            f" {item['target_tokens'] if item['admitted'] else 0:>8} targets{why}"
        )


def _assessments(record: ExecutionRecord) -> Iterator[str]:
    yield "assessments" if record.assessments else "assessments: none"
    for item in record.assessments:
        score = "-" if item["score"] is None else f"{item['score']:g}"
        mark = "the reward" if item["designated"] else ""
        yield f"  try {item['attempt']}  {item['validity']:<11}score {score:<6} {item['evaluator'] or ''}  {item['detail'] or ''}  {mark}".rstrip()


def _tree(record: ExecutionRecord) -> Iterator[str]:
    """Depth first, without recursion: the last child continues at its parent's indentation, the others branch."""
    roots = record.children.get("", [])
    waiting: list[tuple[dict[str, Any], int, str]] = [(row, 0, "●") for row in reversed(roots)]
    while waiting:
        row, depth, mark = waiting.pop()
        yield f"  {'  ' * depth}{mark} {_call(record, row)}"
        children = record.children.get(row["request_id"], [])
        waiting.extend((child, depth, "│") for child in children[-1:])
        waiting.extend((child, depth + 1, "├") for child in reversed(children[:-1]))
    if not roots:
        yield "  (no model call recorded)"


def _call(record: ExecutionRecord, row: dict[str, Any]) -> str:
    request_id = row["request_id"]
    trained = set(record.targets.get(request_id, {}).values())
    names = " ".join(f"T{number}{'*' if number in trained else ''}" for number in record.trajectories.get(request_id, []))
    versions = sorted({span["version"] for span in row["version_spans"]})
    notes = [f"agent {row['agent_id']}"] if row["agent_id"] else []
    if not row["trainable"]:
        notes.append(f"not trainable: {row['untrainable_reason']}")
    if row["reroutes"]:
        notes.append("moved " + " → ".join(row["engine_ids"]))
    return (
        f"#{row['sequence']:<4}{row['role_class']:<13}{row['branch_reason']:<11}{row['n_input']:>7} in {row['n_output']:>6} out"
        f"  v{','.join(map(str, versions)) or '-':<7}{names:<10} {'  '.join(notes)}"
    ).rstrip()


def _known(value: Any) -> str:
    return "?" if value is None else str(value)
