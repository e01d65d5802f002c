"""The exact token stream of the built-in harness's conversations: its system prompt and tools through the Qwen3 renderer."""

from typing import Any

from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig

from gyre_lib.rollout.harnesses.builtin_agent import SYSTEM_PROMPT, TOOLS

RENDERER_TOOLS = [
    {
        "type": "function",
        "function": {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]},
    }
    for tool in TOOLS
]


def renderer_of(tokenizer: Any) -> Any:
    """The renderer that the proxy uses for this policy."""
    return create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def with_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, *messages]


def render_transcript(renderer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """(token ids, which of them the policy emits) of a whole conversation."""
    rendered = renderer.render(with_system(messages), tools=RENDERER_TOOLS)
    return rendered.token_ids, rendered.sampled_mask


def render_prompt(renderer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of the prompt for the next model call."""
    return renderer.render_ids(with_system(messages), tools=RENDERER_TOOLS, add_generation_prompt=True)
