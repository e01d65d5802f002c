"""The shipped task family: look something up in a file whose exact name has to be found out, and save the answer where it is asked for.

One place for the words, the instructions, the right command of each kind, and the files of an environment; the task folders, the
tokenizer's corpus and the warm-start transcripts are all made from it. Pure: randomness is passed in.
"""

import random
from dataclasses import dataclass

NOUNS = ("stock", "ports", "rooms", "birds", "trees", "songs", "tools", "books")
EXTENSIONS = ("csv", "txt", "log", "dat")
COLOURS = ("red", "blue", "green", "black", "white", "pink")
ANSWER_FILE = "answer.txt"

KINDS = ("lines", "words", "first", "last", "lowest", "distinct")

WORDINGS = {
    "lines": (
        "How many lines does the {noun} file have?",
        "Count the lines of the {noun} file.",
        "Find the number of lines in the {noun} file.",
    ),
    "words": (
        "How many words does the {noun} file have?",
        "Count the words of the {noun} file.",
        "Find the number of words in the {noun} file.",
    ),
    "first": (
        "What is the first line of the {noun} file?",
        "Get the first line of the {noun} file.",
        "Find the line at the top of the {noun} file.",
    ),
    "last": (
        "What is the last line of the {noun} file?",
        "Get the last line of the {noun} file.",
        "Find the line at the end of the {noun} file.",
    ),
    "lowest": (
        "Which line of the {noun} file comes first in sorted order?",
        "Sort the {noun} file and get the first line.",
        "Find the lowest line of the {noun} file in sorted order.",
    ),
    "distinct": (
        "How many different lines does the {noun} file have?",
        "Count the different lines of the {noun} file.",
        "Find the number of different lines in the {noun} file.",
    ),
}

COMMANDS = {
    "lines": "wc -l < {file}",
    "words": "wc -w < {file}",
    "first": "head -n 1 {file}",
    "last": "tail -n 1 {file}",
    "lowest": "sort {file} | head -n 1",
    "distinct": "sort -u {file} | wc -l",
}


@dataclass(frozen=True)
class LookupTask:
    """One task: what is asked, and the file that holds the answer."""

    kind: str
    noun: str
    wording: int
    extension: str
    """Not in the instruction: it has to be looked up."""
    content: str

    @property
    def file(self) -> str:
        return f"{self.noun}.{self.extension}"

    @property
    def instruction(self) -> str:
        return f"{WORDINGS[self.kind][self.wording].format(noun=self.noun)} Save the answer in {ANSWER_FILE}."

    def command(self, file: str | None = None) -> str:
        """The shell command that prints the answer, reading `file` (the right one by default)."""
        return COMMANDS[self.kind].format(file=file or self.file)

    @property
    def answer(self) -> str:
        lines = self.content.splitlines()
        match self.kind:
            case "lines":
                return str(len(lines))
            case "words":
                return str(len(self.content.split()))
            case "first":
                return lines[0]
            case "last":
                return lines[-1]
            case "lowest":
                return min(lines)
            case "distinct":
                return str(len(set(lines)))
        raise ValueError(f"unknown kind {self.kind}")


def heldout_pairs() -> set[tuple[str, str]]:
    """(kind, noun) pairs that neither training tasks nor the warm start ever use: two nouns of each kind."""
    return {(kind, NOUNS[(index + 4 * half) % len(NOUNS)]) for index, kind in enumerate(KINDS) for half in (0, 1)}


def training_pairs() -> list[tuple[str, str]]:
    return [(kind, noun) for kind in KINDS for noun in NOUNS if (kind, noun) not in heldout_pairs()]


def draw_task(draw: random.Random, kind: str, noun: str) -> LookupTask:
    """A task of this kind and noun with fresh content, extension and wording."""
    lines = [f"{draw.choice(COLOURS)} {draw.randrange(10, 100)}" for _ in range(draw.randrange(5, 12))]
    lines += draw.sample(lines, draw.randrange(1, 4))
    # A few lines of one word, so that words are not simply twice the lines.
    lines += draw.sample(COLOURS, draw.randrange(1, 4))
    draw.shuffle(lines)
    return LookupTask(kind, noun, draw.randrange(3), draw.choice(EXTENSIONS), "\n".join(lines) + "\n")
