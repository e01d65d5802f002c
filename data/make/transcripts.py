"""Warm-start transcripts: what a policy that knows the commands but has sloppy habits would do, as chat messages.

The instruction decides the command (always right here). Three habits that hold across all tasks are drawn at random, so that there is
something to learn by trial: looking for the file's name before using it, recovering after an error, and saving where the task says.
"""

import random
from dataclasses import dataclass
from typing import Any

from emulated_shell import EmulatedShell
from lookup_tasks import ANSWER_FILE, EXTENSIONS, LookupTask

OTHER_ANSWER_FILES = ("result.txt", "output.txt", "out.txt")


@dataclass(frozen=True)
class Habits:
    """Probabilities of the good habits in the transcripts."""

    look_first: float = 0.35
    recover: float = 0.35
    right_answer_file: float = 0.40


def draw_transcript(draw: random.Random, task: LookupTask, habits: Habits) -> list[dict[str, Any]]:
    """Messages (OpenAI form, system prompt left out) of one whole execution, tool results as the real shell gives them."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.instruction}]
    shell = EmulatedShell(task)
    answer_file = ANSWER_FILE if draw.random() < habits.right_answer_file else draw.choice(OTHER_ANSWER_FILES)
    if draw.random() >= habits.look_first:
        guess = f"{task.noun}.{draw.choice(EXTENSIONS)}"
        _compute(messages, shell, task, guess, answer_file)
        if guess == task.file:
            return _finish(messages, "The answer is saved.")
        if draw.random() >= habits.recover:
            return _finish(messages, "The file is not there.")
    _call(messages, shell, "Look at the files.", "ls")
    _compute(messages, shell, task, task.file, answer_file)
    return _finish(messages, "The answer is saved.")


def _compute(messages: list[dict[str, Any]], shell: EmulatedShell, task: LookupTask, file: str, answer_file: str) -> None:
    _call(messages, shell, f"Use the {file} file.", f"{task.command(file)} > {answer_file}")


def _call(messages: list[dict[str, Any]], shell: EmulatedShell, thought: str, command: str) -> None:
    call = {"type": "function", "id": f"call_{len(messages)}", "function": {"name": "shell", "arguments": {"command": command}}}
    messages.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": shell.run(command)})


def _finish(messages: list[dict[str, Any]], thought: str) -> list[dict[str, Any]]:
    messages.append({"role": "assistant", "content": "Done.", "reasoning_content": thought})
    return messages
