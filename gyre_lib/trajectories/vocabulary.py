"""The text of token ids, for people who read trajectories; nothing that is trained passes through here."""

from pathlib import Path

import pyarrow as pa

VOCABULARY = pa.schema([("token_id", pa.int32()), ("text", pa.string()), ("bytes", pa.binary())])
"""`text` shows a token that is only a part of a character as U+FFFD; `bytes` is null where they are not known."""

_INSTALLATION = Path(__file__).resolve().parents[2]


def read_vocabulary(model_path: str) -> pa.Table:
    """Every token of a Hugging Face tokenizer folder; an empty table when there is none.

    A relative folder is looked for here, then in the installation (where the shipped models are).
    """
    paths = [folder / "tokenizer.json" for folder in (Path(model_path), _INSTALLATION / model_path) if model_path]
    path = next((path for path in paths if path.exists()), None)
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
