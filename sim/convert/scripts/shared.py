"""What all shells of a launch script have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sim.convert.scripts.parser import Heredoc, Source
from sim.convert.scripts.state import Command, Limits
from sim.convert.scripts.unknown import Site, Unknowns
from sim.core.errors import InputError
from sim.core.files import read_text

Run = Callable[..., int | None]
MAX_BYTES = 2**20
DIRECTIVES = re.compile(r"(?m)^#SBATCH[ \t]+(.*)$")


class Shared:
    """What all shells of a script have in common. `given`: variables that keep their values; `choices`: of branches;
    `run`: of a command's words; `run_written`: of assignments and words as they are written; `under`: the open tests
    around what runs now."""

    def __init__(self, given: Mapping[str, str], choices: Mapping[Site, int], run: Run, run_written: Run) -> None:
        self.given, self.choices, self.run, self.run_written = given, choices, run, run_written
        self.unknowns, self.limits = Unknowns(), Limits()
        self.commands: list[Command] = []
        self.shown: list[Command] = []
        self.under: list[Site] = []
        self.heredocs: list[Heredoc] = []
        self.absent: list[str] = []
        self.texts: dict[str, str] = {}
        self.directives: list[str] = []
        self._trees: dict[tuple[str, str, int], Source] = {}

    def read(self, file: Path, by: list[str] | None) -> str:
        """The text of a file that the script reads or starts; `by`: what starts it."""
        text = read_text(file, MAX_BYTES)
        if by is not None:
            options = " ".join(self.unknowns.shown(word) for word in by[1:]) if by[:1] == ["sbatch"] else ""
            self.directives += [*directives_of(text), *([options] if options else [])]
        self.texts[str(file)] = text
        return text

    def parsed(self, file: str, text: str, first_line: int) -> Source:
        key = (file, text, first_line)
        if key not in self._trees:
            self._trees[key] = Source(file, text, first_line, self.heredocs)
        return self._trees[key]


def placed(error: InputError, file: str) -> InputError:
    """An error that begins with its line, with the file before it."""
    return InputError(f"{file}{error}") if str(error).startswith(":") else error


def directives_of(text: str) -> list[str]:
    """The options of Slurm in a script's comments."""
    return DIRECTIVES.findall(text)
