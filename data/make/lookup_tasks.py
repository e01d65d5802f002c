"""The shipped task family: look something up in a file whose exact name has to be found out, and save the answer where it is asked for.

One place for the words, the instructions, the right command of each kind, and the files of an environment; the task folders, the
tokenizer's corpus and the warm-start transcripts are all made from it. Pure: randomness is passed in.
"""

import random
from dataclasses import dataclass

NOUNS = (
    "stock", "ports", "rooms", "birds", "trees", "songs", "tools", "books", "rivers", "lamps",
    "coins", "shirts", "boats", "bikes", "seeds", "cups", "maps", "bells", "stars", "doors",
)  # fmt: skip
EXTENSIONS = ("csv", "txt", "log", "dat")
COLOURS = ("red", "blue", "green", "black", "white", "pink", "grey", "gold")
ANSWER_FILE = "answer.txt"

KINDS = ("count", "first", "last", "lowest", "matches", "distinct")

WORDINGS = {
    "count": (
        "How many lines does the {noun} file have?",
        "Count the lines of the {noun} file.",
        "Find the number of lines in the {noun} file.",
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
    "matches": (
        "How many lines of the {noun} file contain {colour}?",
        "Count the lines with {colour} in the {noun} file.",
        "Find the number of {colour} lines in the {noun} file.",
    ),
    "distinct": (
        "How many different lines does the {noun} file have?",
        "Count the different lines of the {noun} file.",
        "Find the number of different lines in the {noun} file.",
    ),
}

COMMANDS = {
    "count": "wc -l < {file}",
    "first": "head -n 1 {file}",
    "last": "tail -n 1 {file}",
    "lowest": "sort {file} | head -n 1",
    "matches": "grep -c {colour} {file}",
    "distinct": "sort -u {file} | wc -l",
}


@dataclass(frozen=True)
class LookupTask:
    """One task: what is asked, and the files that hold the answer."""

    kind: str
    noun: str
    colour: str
    """The word looked for; used by kind `matches` only."""
    wording: int
    files: dict[str, str]
    """File name -> content; one of them is `{noun}.{extension}`, the other is a decoy of another noun."""

    @property
    def file(self) -> str:
        return next(name for name in self.files if name.split(".")[0] == self.noun)

    @property
    def instruction(self) -> str:
        question = WORDINGS[self.kind][self.wording].format(noun=self.noun, colour=self.colour)
        return f"{question} Save the answer in {ANSWER_FILE}."

    def command(self, file: str | None = None) -> str:
        """The shell command that prints the answer, reading `file` (the right one by default)."""
        return COMMANDS[self.kind].format(file=file or self.file, colour=self.colour)

    @property
    def answer(self) -> str:
        lines = self.files[self.file].splitlines()
        match self.kind:
            case "count":
                return str(len(lines))
            case "first":
                return lines[0]
            case "last":
                return lines[-1]
            case "lowest":
                return min(lines)
            case "matches":
                return str(sum(self.colour in line for line in lines))
            case "distinct":
                return str(len(set(lines)))
        raise ValueError(f"unknown kind {self.kind}")

    @property
    def listing(self) -> str:
        """What `ls` prints in the task's folder."""
        return "\n".join(sorted(self.files))


def heldout_pairs() -> set[tuple[str, str]]:
    """(kind, noun) pairs that neither training tasks nor the warm start ever use: four nouns of each kind."""
    return {(kind, NOUNS[(3 * index + 5 * offset) % len(NOUNS)]) for index, kind in enumerate(KINDS) for offset in range(4)}


def draw_task(draw: random.Random, kind: str, noun: str) -> LookupTask:
    """A task of this kind and noun with fresh file contents, extension, decoy and wording."""
    colour = draw.choice(COLOURS)
    decoy = draw.choice([other for other in NOUNS if other != noun])
    files = {f"{name}.{draw.choice(EXTENSIONS)}": _content(draw, colour) for name in (noun, decoy)}
    return LookupTask(kind, noun, colour, draw.randrange(3), files)


def _content(draw: random.Random, colour: str) -> str:
    """6 to 14 lines `colour number`, some twice, with 1 to 4 lines of the colour looked for."""
    others = [other for other in COLOURS if other != colour]
    lines = [f"{colour} {draw.randrange(10, 100)}" for _ in range(draw.randrange(1, 5))]
    lines += [f"{draw.choice(others)} {draw.randrange(10, 100)}" for _ in range(draw.randrange(4, 8))]
    lines += draw.sample(lines, draw.randrange(1, 3))
    draw.shuffle(lines)
    return "\n".join(lines) + "\n"
