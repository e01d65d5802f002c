"""The one place of the proxy that turns text into tokens and back, through `renderers`.

Rendering is append-only by construction: a head (system, tools, first messages) once, then only what is new, each piece rendered behind a
fixed tail. So turn n costs O(new tokens), and a prompt always begins with its parent's prompt and sampled ids, exactly.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from renderers import Qwen3RendererConfig, Qwen35RendererConfig, Qwen36RendererConfig, Qwen38RendererConfig, create_renderer

from gyre_lib.config.errors import InputError
from gyre_lib.trajectories.history import Reply, Supplied, ToolSpec
from proxy_app.tokenizing import TextTokenizer

logger = logging.getLogger(__name__)

PARSE_TAIL_TOKENS = 16
CALL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TYPED = {
    "qwen3": lambda: Qwen3RendererConfig(thinking_retention="all"),
    "qwen35": lambda: Qwen35RendererConfig(enable_thinking=True, thinking_retention="all"),
    "qwen36": lambda: Qwen36RendererConfig(enable_thinking=True, preserve_thinking=True),
    "qwen38": lambda: Qwen38RendererConfig(enable_thinking=True, preserve_thinking=True),
}
MODEL_TYPES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35",
    "qwen3_6": "qwen36",
    "qwen3_8": "qwen38",
}


class RenderingRefused(ValueError):
    """The conversation cannot be put into the policy's template; the text says why, for the harness."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn as the harness will see it. Malformed calls are part of `text`."""

    text: str
    thinking: str
    calls: tuple[ParsedCall, ...]
    statuses: tuple[str, ...]
    """Parse status of each call attempt, for the record's metadata."""


class Rendering:
    """Messages to ids and ids to turns, for one policy."""

    def __init__(self, model_dir: Path, renderer: str = "auto") -> None:
        """Raises InputError for a model folder without a tokenizer or an unknown renderer name."""
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise InputError(f"{tokenizer_file}: the model folder has no tokenizer.json")
        config = _read_config(model_dir / "config.json")
        name = renderer if renderer != "auto" else MODEL_TYPES.get(str(config.get("model_type")), "default")
        if name in TYPED:
            self.tokenizer: Any = TextTokenizer(tokenizer_file)
            self._renderer: Any = create_renderer(self.tokenizer, TYPED[name]())
            self._reader: Any = create_renderer(TextTokenizer(tokenizer_file, control_tokens=True), TYPED[name]())
        elif name == "default":
            self.tokenizer, self._renderer = _default_renderer(model_dir)
            self._reader = self._renderer
            logger.warning(
                "%s: no typed renderer for model_type %s; its template cannot be bridged: every turn is rendered in full and"
                " becomes a new root where it does not extend the old one exactly",
                model_dir,
                config.get("model_type"),
            )
        else:
            raise InputError(f"model.renderer: no renderer {renderer}; there are auto, {', '.join(TYPED)}")
        self.name = name
        self.bridges = name in TYPED
        size = len(self.tokenizer) if name == "default" else self.tokenizer.vocab_size
        self.vocab_size = int(config.get("vocab_size") or size)
        if size > self.vocab_size:
            raise InputError(f"{tokenizer_file}: {size} tokens, but config.json says vocab_size {self.vocab_size}")
        self.stop_token_ids: list[int] = list(self._renderer.get_stop_token_ids())
        self._stop = frozenset(self.stop_token_ids)
        self._close_id = self.stop_token_ids[0]
        if self.bridges:
            dummy = [{"role": "user", "content": "x"}]
            closed = self._renderer.render_ids(dummy)
            self._dummy, self._dummy_ids = dummy, closed
            self.generation_prompt = list(self._renderer.render_ids(dummy, add_generation_prompt=True)[len(closed) :])
            self._stub = [*closed, *self.generation_prompt, self._close_id]
            self._dummy_follows = len(self._after_closed_turn(dummy))
            last = max(index for index, token in enumerate(closed) if token in self._stop)
            self._separator = list(closed[last + 1 :])

    def head(self, system: str, tools: tuple[ToolSpec, ...], messages: list[Supplied]) -> list[int]:
        """Ids of a conversation's beginning up to the first generation prompt. Raises RenderingRefused."""
        rendered = [{"role": "system", "content": system}] if system else []
        rendered += [part for message in messages for part in template_messages(message)]
        if not any(message["role"] == "user" for message in rendered):
            raise RenderingRefused("messages: at least one user message is needed before the first assistant message")
        try:
            return list(
                self._renderer.render_ids(rendered, tools=[tool.as_template() for tool in tools] or None, add_generation_prompt=True)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RenderingRefused(f"messages: {error}") from error

    def follow(self, tail: list[int], output_ids: list[int], messages: list[Supplied]) -> list[int]:
        """Ids to append after `... tail + output_ids`: the turn's close if it was cut, the separator, the messages, the generation prompt.

        `tail` are the last ids of the prompt that `output_ids` answered (TAIL_TOKENS are enough). Raises RenderingRefused.
        """
        new = [part for message in messages for part in template_messages(message)]
        if not new:
            raise RenderingRefused("messages: the conversation must end with a user or tool message")
        return self._close(tail, output_ids) + self._after_closed_turn(new)

    def _after_closed_turn(self, new: list[dict[str, Any]]) -> list[int]:
        """What follows a closed turn depends on the new messages only, so any closed turn stands for the real one."""
        bridged = self._renderer.bridge_to_next_turn(self._stub[:-1], self._stub[-1:], new)
        if bridged is None or bridged.token_ids[: len(self._stub)] != self._stub:
            raise RenderingRefused("messages: the template cannot continue this conversation")
        return list(bridged.token_ids[len(self._stub) :])

    def _close(self, tail: list[int], output_ids: list[int]) -> list[int]:
        """Ids that end a turn that was cut: the end of its thinking if that is open, and the end of turn."""
        if output_ids and output_ids[-1] in self._stop:
            return []
        before = len(tail) + len(output_ids)
        bridged = self._reader.bridge_to_next_turn(tail, output_ids, self._dummy)
        if bridged is not None and bridged.token_ids[:before] == tail + output_ids:
            closing = list(bridged.token_ids[before : len(bridged.token_ids) - self._dummy_follows])
            if closing and closing[-1] in self._stop:
                return closing
        return [self._close_id]

    def quoted(self, reply: Reply) -> list[int]:
        """Ids of an assistant turn that stands in a prompt as plain history, from its opening to its end of turn (no separator)."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.thinking:
            message["reasoning_content"] = reply.thinking
        if reply.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": _as_object(call.arguments)}} for call in reply.calls
            ]
        try:
            ids = self._renderer.render_ids([*self._dummy, message])
        except (ValueError, TypeError, KeyError) as error:
            raise RenderingRefused(f"messages: {error}") from error
        ids = ids[len(self._dummy_ids) :]
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in self._stop:
                return list(ids[: position + 1])
        return [*ids, self._close_id]

    def without_generation_prompt(self, ids: list[int]) -> list[int]:
        """The same ids without the generation prompt that `head` and `follow` end with."""
        length = len(self.generation_prompt)
        return ids[:-length] if length and ids[-length:] == self.generation_prompt else ids

    def closed(self, tail: list[int], output_ids: list[int]) -> list[int]:
        """Ids to append after a turn when another assistant turn follows it: its end if it was cut, and the separator."""
        return self._close(tail, output_ids) + self._separator

    def full(self, system: str, tools: tuple[ToolSpec, ...], messages: list[Supplied | Reply]) -> list[int]:
        """The whole prompt at once, for renderers that cannot bridge."""
        rendered: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for message in messages:
            if isinstance(message, Supplied):
                rendered += template_messages(message)
                continue
            turn: dict[str, Any] = {"role": "assistant", "content": message.text}
            if message.thinking:
                turn["reasoning_content"] = message.thinking
            if message.calls:
                turn["tool_calls"] = [
                    {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": _as_object(call.arguments)}}
                    for call in message.calls
                ]
            rendered.append(turn)
        try:
            return list(
                self._renderer.render_ids(rendered, tools=[tool.as_template() for tool in tools] or None, add_generation_prompt=True)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RenderingRefused(f"messages: {error}") from error
        except Exception as error:  # a model's Jinja template raises what it likes (jinja2 is not a dependency of ours)
            raise RenderingRefused(f"messages: {type(error).__name__}: {error}") from error

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def parse(self, tail: list[int], output_ids: list[int], tools: tuple[ToolSpec, ...]) -> ParsedTurn:
        """Read a sampled turn. Never raises for what a model wrote; what is no valid call becomes text."""
        specs = [tool.as_template() for tool in tools] or None
        parsed = self._reader.parse_response(output_ids, tools=specs, prompt_ids=tail[-PARSE_TAIL_TOKENS:])
        calls: list[ParsedCall] = []
        statuses: list[str] = []
        text = parsed.content or ""
        known = {tool.name for tool in tools}
        for attempt in parsed.tool_calls:
            status = str(getattr(attempt.status, "value", attempt.status))
            unknown = _call_of_unknown_tool(attempt.raw) if status != "ok" and tools else None
            if unknown is not None and unknown.name not in known:
                calls.append(unknown)
                statuses.append("unknown_tool")
                continue
            arguments = _as_object(attempt.arguments) if attempt.arguments is not None else {}
            sound = (
                bool(tools)
                and status in ("ok", "unknown_tool")
                and isinstance(attempt.name, str)
                and CALL_NAME.fullmatch(attempt.name) is not None
                and isinstance(arguments, dict)
                and attempt.raw.count("<parameter=") <= max(len(arguments), attempt.raw.count("</parameter>"))
                and _json_safe(arguments)
            )
            if sound:
                calls.append(ParsedCall(attempt.name, arguments))
                statuses.append(status)
            else:
                text += f"{chr(10) if text else ''}<tool_call>\n{attempt.raw}\n</tool_call>"
                statuses.append(status if status != "ok" else "not_a_call")
        return ParsedTurn(_scalar_text(text), _scalar_text(parsed.reasoning_content or ""), tuple(calls), tuple(statuses))


def template_messages(message: Supplied) -> list[dict[str, Any]]:
    """A supplied message as template messages, one form for every place in a conversation.

    System messages inside a conversation become user turns with a reminder mark: templates allow a system turn only at the start.
    """
    rendered: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            rendered.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for part in message.parts:
        if part.role == "user":
            texts.append(part.text)
            continue
        flush()
        if part.role == "system":
            rendered.append({"role": "user", "content": f"<system-reminder>\n{part.text}\n</system-reminder>"})
        else:
            rendered.append({"role": "tool", "content": part.text, "tool_call_id": part.call_id})
    flush()
    return rendered


def _call_of_unknown_tool(raw: str) -> ParsedCall | None:
    """A well-formed call in XML form; its values stay text, as no schema types them. The harness answers that there is no such tool.

    The library's parser types values by the schema and so calls it invalid when there is none.
    """
    text = raw.strip()
    if not text.startswith("<function=") or not text.endswith("</function>"):
        return None
    name, _, rest = text[len("<function=") : -len("</function>")].partition(">")
    if CALL_NAME.fullmatch(name) is None:
        return None
    arguments: dict[str, Any] = {}
    rest = rest.lstrip()
    while rest:
        if not rest.startswith("<parameter="):
            return None
        key, opened, rest = rest[len("<parameter=") :].partition(">")
        value, closed, rest = rest.partition("</parameter>")
        if not opened or not closed:
            return None
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
        rest = rest.lstrip()
    return ParsedCall(name, arguments)


def _as_object(arguments: Any) -> Any:
    """Arguments as an object where they are one; JSON text of an object counts, other text stays text."""
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments)
        except ValueError:
            return arguments
        return loaded if isinstance(loaded, dict) else arguments
    return arguments


def _json_safe(value: Any) -> bool:
    """What Python reads as JSON but cannot be sent as JSON: NaN and infinities, lone surrogates, integers beyond 64 bits."""
    try:
        json.dumps(value, allow_nan=False)
        orjson.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _scalar_text(text: str) -> str:
    """Text without lone surrogates (they cannot be sent)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    text_config = found.get("text_config")
    return {**text_config, **found} if isinstance(text_config, dict) else found


def _default_renderer(model_dir: Path) -> tuple[Any, Any]:
    from renderers import DefaultRendererConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    return tokenizer, create_renderer(tokenizer, DefaultRendererConfig())
