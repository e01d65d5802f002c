"""A small byte-level BPE tokenizer with Qwen's control tokens, trained on the spot: for benchmarks and tests that need no weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_pad|>",
)
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
MODULES = (
    "argparse",
    "json",
    "subprocess",
    "asyncio.base_events",
    "inspect",
    "typing",
    "pathlib",
    "logging",
    "unittest.mock",
    "email.message",
)


def write_small_model(folder: Path, vocab_size: int = 4000, model_type: str = "qwen3") -> Path:
    """Write tokenizer.json and config.json (no weights) into `folder`; returns it. The same every time on one Python version."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL) - len(MARKUP), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": model_type, "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _corpus() -> list[str]:
    import importlib.util

    texts = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            texts.append(Path(spec.origin).read_text())
    return texts
