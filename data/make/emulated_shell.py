"""The built-in harness's shell tool for the few commands of the lookup tasks, emulated in Python: no process is started.

Warm-start transcripts and the learning simulation use it; a test holds it against the real tool. Any other command answers as an
unknown one, so the simulation never runs what a model wrote.
"""

import re

from lookup_tasks import LookupTask

NO_OUTPUT = "(no output)"
FILE = r"([A-Za-z0-9_.]+)"
PROGRAMS = (
    ("lines", re.compile(rf"wc -l < {FILE}")),
    ("words", re.compile(rf"wc -w < {FILE}")),
    ("first", re.compile(rf"head -n 1 {FILE}")),
    ("last", re.compile(rf"tail -n 1 {FILE}")),
    ("lowest", re.compile(rf"sort {FILE} \| head -n 1")),
    ("distinct", re.compile(rf"sort -u {FILE} \| wc -l")),
    ("show", re.compile(rf"cat {FILE}")),
)


class EmulatedShell:
    """One task's folder; `run` changes it as the command would."""

    def __init__(self, task: LookupTask) -> None:
        self.files = {task.file: task.content}

    def run(self, command: str) -> str:
        """The text that the harness hands to the model."""
        program, _, target = command.partition(" > ")
        if target and not re.fullmatch(FILE, target):
            return unknown(command)
        if program == "ls":
            if target:
                self.files[target] = ""
            return self._finish("\n".join(sorted(self.files)) + "\n", "", 0, target)
        for kind, pattern in PROGRAMS:
            match = pattern.fullmatch(program)
            if match:
                return self._finish(*self._run_program(kind, match, target), target)
        return unknown(command)

    def _run_program(self, kind: str, match: re.Match[str], target: str) -> tuple[str, str, int]:
        """(standard output, error output, exit code)"""
        file = match.group(1)
        if target and kind not in ("lines", "words"):
            self.files[target] = ""
        if file not in self.files:
            return self._missing(kind, file)
        lines = self.files[file].splitlines()
        match kind:
            case "lines":
                return f"{len(lines)}\n", "", 0
            case "words":
                return f"{len(self.files[file].split())}\n", "", 0
            case "first":
                return "".join(f"{line}\n" for line in lines[:1]), "", 0
            case "last":
                return "".join(f"{line}\n" for line in lines[-1:]), "", 0
            case "lowest":
                return "".join(f"{line}\n" for line in sorted(lines)[:1]), "", 0
            case "distinct":
                return f"{len(set(lines))}\n", "", 0
        return self.files[file], "", 0

    def _missing(self, kind: str, file: str) -> tuple[str, str, int]:
        none = "No such file or directory"
        match kind:
            case "lines" | "words":
                return "", f"/bin/bash: line 1: {file}: {none}", 1
            case "first":
                return "", f"head: cannot open '{file}' for reading: {none}", 1
            case "last":
                return "", f"tail: cannot open '{file}' for reading: {none}", 1
            case "lowest":
                return "", f"sort: cannot read: {file}: {none}", 0
            case "distinct":
                return "0\n", f"sort: cannot read: {file}: {none}", 0
        return "", f"cat: {file}: {none}", 1

    def _finish(self, output: str, error: str, code: int, target: str) -> str:
        """Sends the output to the target file, if any, and words the rest as the tool does."""
        if target and (target in self.files or not error):
            self.files[target] = output
            output = ""
        text = "\n".join(part for part in (error, output.rstrip("\n")) if part)
        if code:
            return f"{text}\n[exit {code}]".lstrip("\n")
        return text or NO_OUTPUT


def unknown(command: str) -> str:
    program = command.split(" ")[0][:40]
    return f"/bin/bash: line 1: {program}: command not found\n[exit 127]"
