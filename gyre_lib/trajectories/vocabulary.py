"""The text of token ids, for people who read trajectories; nothing that is trained passes through here."""

from pathlib import Path

import pyarrow as pa

from gyre_lib.config.layout import RunLayout

VOCABULARY = pa.schema([("token_id", pa.int32()), ("text", pa.string()), ("bytes", pa.binary())])
"""`text` shows a token that is only a part of a character as U+FFFD; `bytes` is null where they are not known."""

_INSTALLATION = Path(__file__).resolve().parents[2]


def find_tokenizer(layout: RunLayout, model_path: str) -> Path | None:
    """The run's tokenizer file: a published policy's own (it is what the run really used), else that of the model it started from.

    A relative model folder is looked for here, then in the installation (where the shipped models are). None when there is none.
    """
    published = sorted(layout.published.glob("*/tokenizer.json"))
    started_from = [folder / "tokenizer.json" for folder in (Path(model_path), _INSTALLATION / model_path) if model_path]
    return next((path for path in (*published, *started_from) if path.exists()), None)


def read_vocabulary(path: Path | None) -> pa.Table:
    """Every token of a tokenizer.json; an empty table for None."""
    if path is None:
        return VOCABULARY.empty_table()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    words = {token_id: word for word, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    ids = sorted(words)
    texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    alphabet = _byte_alphabet()
    return pa.table({"token_id": ids, "text": texts, "bytes": [_bytes(words[token_id], alphabet) for token_id in ids]}, VOCABULARY)


def _bytes(word: str, alphabet: dict[str, int]) -> bytes | None:
    try:
        return bytes(alphabet[character] for character in word)
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE vocabularies (GPT-2's and its successors') write bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + place): value for place, value in enumerate(others)}
