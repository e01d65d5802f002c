"""Classes of model calls: task-driving or summary, main agent or sub-agent; side requests are recorded and never trained.

Evidence, strongest first: the harness's agent-id header; its sub-agent mark in the attribution line; the tree (a root whose task text was
an argument of a call that we issued belongs to a sub-agent). System-prompt text decides nothing.
"""

from collections.abc import Sequence
from typing import Any

from gyre_lib.trajectories.history import Part, Supplied

MAIN_TASK = "main_task"
MAIN_SUMMARY = "main_summary"
SUB_TASK = "sub_task"
SUB_SUMMARY = "sub_summary"
SIDE = "side"
CLASSES = (MAIN_TASK, MAIN_SUMMARY, SUB_TASK, SUB_SUMMARY)
"""In order of admission priority."""

SUMMARY_MARKS = ("CRITICAL: Respond with TEXT ONLY", "Your task is to create a detailed summary of the conversation")
SUBAGENT_MARK = "cc_is_subagent=true"
TRAILING_MESSAGES = 4


def role_class(sub_agent: bool, summary: bool) -> str:
    if sub_agent:
        return SUB_SUMMARY if summary else SUB_TASK
    return MAIN_SUMMARY if summary else MAIN_TASK


def is_summary_request(trailing: Sequence[Any]) -> bool:
    """A compaction request: its instruction is a text of the last user message, which need not be the last message."""
    for message in reversed(trailing[-TRAILING_MESSAGES:]):
        if not isinstance(message, Supplied):
            return False
        if any(_asks_for_summary(part) for part in message.parts):
            return True
        if any(part.role != "system" for part in message.parts):
            return False
    return False


def _asks_for_summary(part: Part) -> bool:
    return part.role == "user" and part.text.lstrip().startswith(SUMMARY_MARKS)


def is_side_request(body: dict[str, Any], agent_id: str) -> bool:
    """Requests beside the task: session titles (a JSON-schema answer without tools) and server tools such as web search."""
    if agent_id:
        return False
    tools = body.get("tools") or []
    if any(
        isinstance(tool, dict) and tool.get("type") not in (None, "custom", "function") and "input_schema" not in tool for tool in tools
    ):
        return True
    output = body.get("output_config")
    shaped = isinstance(output, dict) and isinstance(output.get("format"), dict) and output["format"].get("type") == "json_schema"
    return shaped and not tools
