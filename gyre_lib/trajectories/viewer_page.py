"""An execution as one self-contained page: the tree at the left, the chosen path's tokens in the middle, what was assessed at the right."""

import json
from pathlib import Path
from typing import Any

from gyre_lib.trajectories.viewer import ExecutionRecord

TEMPLATE = Path(__file__).resolve().parents[2] / "data" / "pages" / "execution.html"
_CALL_FIELDS = (
    "request_id", "parent_id", "sequence", "agent_id", "role_class", "branch_reason", "input_ids", "output_ids", "version_spans", "trainable",
    "untrainable_reason", "finish_reason", "engine_ids", "reroutes", "attempts", "started_s", "ended_s",
)  # fmt: skip
_ASSESSMENT_FIELDS = ("attempt", "designated", "evaluator", "score", "validity", "detail", "artifact_ref", "artifact_digest", "request_id")


def render_page(record: ExecutionRecord, run_id: str) -> str:
    """The page as HTML; token texts are shown as text only, whatever they hold."""
    data = {
        "run": run_id,
        "execution": record.execution,
        "group": record.group,
        "calls": [_call(record, row) for row in record.requests],
        "admissions": record.admissions,
        "why_none": record.why_no_trajectories,
        "assessments": [{name: item[name] for name in _ASSESSMENT_FIELDS} for item in record.assessments],
        "texts": record.texts,
        "bytes": record.token_bytes,
    }
    # "<" never occurs in the data block: no token can end the script element.
    text = json.dumps(data, default=str).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace("/*DATA*/null", text, 1)


def _call(record: ExecutionRecord, row: dict[str, Any]) -> dict[str, Any]:
    call = {name: row[name] for name in _CALL_FIELDS}
    call["logprobs"] = [round(value, 4) for value in row["output_logprobs"]]
    targets = record.targets.get(row["request_id"], {})
    call["targets"] = [targets.get(place, -1) for place in range(row["n_output"])]
    call["trajectories"] = record.trajectories.get(row["request_id"], [])
    return call
