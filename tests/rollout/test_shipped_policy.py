"""What data/make made: the shipped tasks, the tokenizer, and the emulated shell that taught the warm start."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path("data/make").resolve()))

from emulated_shell import EmulatedShell
from lookup_tasks import COMMANDS, KINDS, draw_task, heldout_pairs, training_pairs
from make_tasks import make_tasks
from rendering import render_prompt, renderer_of, with_system
from transcripts import Habits, draw_transcript

from gyre_lib.rollout.artifacts import digest_tree
from gyre_lib.rollout.harnesses.builtin_agent import SYSTEM_PROMPT, TOOLS, run_tool
from proxy_app import anthropic
from proxy_app.rendering import Rendering

MODEL = Path("data/models/tiny-qwen3")


def test_the_shipped_tasks_are_what_the_script_makes(tmp_path: Path):
    make_tasks(tmp_path)
    for split in ("train", "heldout"):
        assert digest_tree(tmp_path / split)[0] == digest_tree(Path("data/tasks") / split)[0]


def test_heldout_pairs_are_never_trained_on():
    assert not set(training_pairs()) & heldout_pairs()


@pytest.mark.parametrize("kind", KINDS)
def test_the_emulated_shell_answers_as_the_real_tool(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(tmp_path)
    draw = random.Random(kind)
    task = draw_task(draw, kind, "stock")
    shell = EmulatedShell(task)
    Path(task.file).write_text(task.content)
    good, bad = COMMANDS[kind].format(file=task.file), COMMANDS[kind].format(file="none.csv")
    for command in (
        good,
        bad,
        f"{good} > answer.txt",
        "ls",
        f"{bad} > other.txt",
        "ls",
        "cat answer.txt",
        "cat none",
        "nosuch x",
        "ls > l.txt",
    ):
        assert shell.run(command) == run_tool("shell", {"command": command}, 20.0, 2000)[0], command
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == shell.files
    assert shell.files["answer.txt"] == task.answer + "\n"


def test_prompts_are_short_and_the_proxy_renders_what_was_trained_on():
    from transformers import AutoTokenizer

    rendering = Rendering(MODEL)
    renderer = renderer_of(AutoTokenizer.from_pretrained(MODEL))
    task = draw_task(random.Random(1), "first", "stock")
    messages = [{"role": "user", "content": task.instruction}]
    head = anthropic.read_head({"system": SYSTEM_PROMPT, "tools": TOOLS})
    prompt = rendering.head(head.system, head.tools, anthropic.read_messages(messages, 0))
    assert prompt == render_prompt(renderer, messages)
    assert len(prompt) < 200
    transcript = draw_transcript(random.Random(1), task, Habits(look_first=1.0))
    whole = renderer.render(with_system(transcript), add_generation_prompt=False).token_ids
    assert max(whole) < rendering.vocab_size


def test_any_text_encodes():
    tokenizer = Rendering(MODEL).tokenizer
    for text in ("", "Ünïcödé 🙂\x00\x7f", '{"a": [1, 2]}\n\t', "".join(map(chr, range(32, 1000)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_proxy_reads_the_policys_turn_as_thinking_and_a_call():
    torch = pytest.importorskip("torch")
    from transformers import Qwen3ForCausalLM

    rendering = Rendering(MODEL)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    head = anthropic.read_head({"system": SYSTEM_PROMPT, "tools": TOOLS})
    message = {"role": "user", "content": draw_task(random.Random(2), "first", "stock").instruction}
    prompt = rendering.head(head.system, head.tools, anthropic.read_messages([message], 0))
    output = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=rendering.stop_token_ids)
    turn = rendering.parse(prompt, output[0, len(prompt) :].tolist(), head.tools)
    assert turn.thinking
    assert turn.text == ""
    assert [call.name for call in turn.calls] == ["shell"]
