"""Train the tiny policy's tokenizer on rendered transcripts: byte-level BPE with Qwen3's special tokens, any text encodes.

python data/make/make_tokenizer.py [FOLDER]        (default data/models/tiny-qwen3; seconds)
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from lookup_tasks import EXTENSIONS, KINDS, NOUNS, draw_task
from renderers.qwen3 import _TOOLS_FOOTER as TOOLS_FOOTER
from renderers.qwen3 import _TOOLS_HEADER as TOOLS_HEADER
from rendering import RENDERER_TOOLS, with_system
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transcripts import Habits, draw_transcript
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As in Qwen's tokenizers these are tokens of their own but not "special": where they stand in text, they are meant.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY = 768
# Words keep their leading blank, digits stand alone, runs of punctuation stay together: commands split where their meaning does.
WORDS = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+"
# The constant phrases of the template's tool section and the JSON around a call may become single tokens: a prompt then costs a
# third of the tokens, and the few tokens a reply has are the ones that say something.
PHRASES = (
    r"You may call one or more functions to assist with the user query",
    r"You are provided with function signatures within ",
    r"For each function call, return a json object with function name and arguments within ",
    r'\{"type": "function", "function": \{"name": "',
    r'", "description": "',
    r'\.", "parameters": \{"type": "object", "properties": \{"',
    r'": \{"type": "string"\}(?:, ")?',
    r'\}, "required": \["',
    r'"\]\}\}+',
    r'\{"name": "(?:shell|read|write)", "arguments": \{"(?:command|path)": "',
)
SPLIT = "|".join((*PHRASES, WORDS))


def corpus(draws: int, seed: int) -> list[str]:
    """`draws` transcripts as the template writes them, and every noun with every extension, as plain text."""
    draw = random.Random(seed)
    lines = [f"{noun}\n {noun}.{extension}\n" for noun in NOUNS for extension in EXTENSIONS for _ in range(20)]
    for _ in range(draws):
        task = draw_task(draw, draw.choice(KINDS), draw.choice(NOUNS))
        lines.append(plain_text(with_system(draw_transcript(draw, task, Habits()))))
    return lines


def plain_text(messages: list[dict[str, Any]]) -> str:
    """The conversation in Qwen3's template without its special tokens."""
    tools = "\n".join(json.dumps(tool) for tool in RENDERER_TOOLS)
    parts = [f"{TOOLS_HEADER}\n{tools}{TOOLS_FOOTER}"]
    for message in messages:
        parts += [message["role"] + "\n", message["content"], message.get("reasoning_content", "")]
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
            parts.append('\n{"name": "' + name + '", "arguments": ' + arguments + "}\n")
    return "\n\n".join(parts)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL_TOKENS, *MARKUP_TOKENS, *VISION_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(600, seed=1), trainer)
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    tokenizer = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/models/tiny-qwen3")
    made = make_tokenizer()
    made.save_pretrained(folder)
    print(f"{folder}: {len(made)} tokens")
