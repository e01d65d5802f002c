"""Text to ids and back, straight over `tokenizers`.

Control tokens (those the tokenizer marks as special) that stand in a message as text stay text: nothing a harness or a tool writes can
open or close a turn. Markup such as `<tool_call>`, which Qwen's tokenizers do not mark so, is read as tokens, as templates need it.

Plain ASCII text (most of what agents send) takes a short way: the tokenizer's own split pattern run by `re`, then one look-up per word in a
cache of words that the tokenizer's own BPE model encoded. It is used only for tokenizers whose pipeline is exactly split pattern plus
byte-level BPE, and only after a self-check at start; everything else goes through the library.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

MAX_WORDS = 200_000
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SELF_CHECK = (
    "def f(x):\n\treturn x  +  1 # it's\n\n\n   \n",
    '{"a": [1, 22, 333], "b": null}\r\n\r\n  trailing   ',
    "\x00\x01\x1c\x1f\x7f ~!@#$%^&*()_+ I'LL we'Re 'S don't\t\tx \n y\v\f z",
    "   leading, CamelCase snake_case 3.14e-10 http://a.b/c?d=e&f=g <think >< |im_start| >",
)


class TextTokenizer:
    """What `renderers` needs of a tokenizer (no offsets, no `transformers`)."""

    def __init__(self, path: Path, *, control_tokens: bool = False) -> None:
        """With `control_tokens`, text like `<|im_start|>` becomes the token: for reading sampled turns, never for what others wrote."""
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = not control_tokens
        self.name_or_path = str(path.parent)
        self.unk_token_id = None
        self.eos_token_id = self._tokenizer.token_to_id("<|im_end|>")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._words = None if control_tokens else _Words.of(self._tokenizer)
        if self._words is not None and any(self._words.encode(text) not in (None, self._slow(text)) for text in SELF_CHECK):
            logger.warning("%s: the short way of tokenising disagrees with the library and is not used", path)
            self._words = None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if self._words is not None and text.isascii() and not any(token in text for token in self._words.added):
            ids = self._words.encode(text)
            if ids is not None:
                return ids
        return self._slow(text)

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _slow(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


class _Words:
    """The short way for ASCII text. Thread-safe: the cache only ever gains what the model would say again."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str], added: tuple[str, ...]) -> None:
        self._split = pattern.findall
        self._model = tokenizer.model
        self._letters = {code: chr(code) if 33 <= code <= 126 else chr(256 + position) for position, code in enumerate(_unprintable())}
        self._cache: dict[str, list[int]] = {}
        self.added = added

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Words | None":
        """None where the tokenizer's pipeline is not exactly a split pattern and byte-level BPE."""
        parts = json.loads(tokenizer.to_str())
        pattern = _split_pattern(parts.get("pre_tokenizer"))
        model = parts.get("model") or {}
        normaliser = parts.get("normalizer")
        plain_model = (
            model.get("type") == "BPE"
            and not model.get("dropout")
            and not model.get("continuing_subword_prefix")
            and not model.get("end_of_word_suffix")
            and not model.get("byte_fallback")
        )
        if pattern is None or not plain_model or (normaliser or {}).get("type") not in (None, "NFC"):
            return None
        added = parts.get("added_tokens") or []
        if any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in added):
            return None
        try:
            compiled = re.compile(_ascii_pattern(pattern), re.ASCII)
        except re.error:
            return None
        if compiled.groups:
            return None
        return cls(tokenizer, compiled, tuple(token["content"] for token in added if not token["special"]))

    def encode(self, text: str) -> list[int] | None:
        """None where the pattern leaves a gap (the library keeps gaps as words of their own)."""
        cache = self._cache
        words = self._split(text)
        if sum(map(len, words)) != len(text):
            return None
        ids: list[int] = []
        for word in words:
            known = cache.get(word)
            if known is None:
                known = self._learn(word)
            ids += known
        return ids

    def _learn(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.translate(self._letters))]
        if len(self._cache) >= MAX_WORDS:
            self._cache = {}
        if len(word) <= 64:
            self._cache[word] = ids
        return ids


def _unprintable() -> list[int]:
    """Bytes that byte-level BPE writes as letters beyond 255, in order (of all 256; ASCII text meets the low ones)."""
    return [code for code in range(256) if not (33 <= code <= 126 or 161 <= code <= 172 or 174 <= code <= 255)]


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The split pattern of a pipeline that this module can follow."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2_SPLIT if byte_level.get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or byte_level.get("use_regex", True) or split.get("type") != "Split" or split.get("invert"):
        return None
    if split.get("behavior") != "Isolated":
        return None
    return split["pattern"].get("Regex")


def _ascii_pattern(pattern: str) -> str:
    """The pattern with Unicode classes narrowed to ASCII."""
    out: list[str] = []
    inside = False
    position = 0
    while position < len(pattern):
        piece = pattern[position : position + 5]
        if piece in (r"\p{L}", r"\p{N}"):
            letters = "A-Za-z" if piece == r"\p{L}" else "0-9"
            out.append(letters if inside else f"[{letters}]")
            position += 5
            continue
        if pattern[position] == "\\":
            out.append(pattern[position : position + 2])
            position += 2
            continue
        inside = {"[": True, "]": False}.get(pattern[position], inside)
        out.append(pattern[position])
        position += 1
    return "".join(out)
