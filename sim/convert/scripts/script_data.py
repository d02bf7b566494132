"""What the readers of trainers' arguments get of a launch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from msgspec import Struct, field

from sim.convert.scripts.state import Command

# `docker run -e NAME=value`, `env NAME=value`, `--runtime-env-json '{"env_vars": {"NAME": "1"}}'`
OF_WORD = re.compile(r"(?<![\w$#{.])([A-Z][A-Z0-9_]+)[\"']?(?:=|:[ \t]*)[\"']?([\w.:,^=/-]+)")
AT_LINE = re.compile(r"(.*?):(\d+): ")


class Script(Struct, frozen=True, dict=True):
    """`texts`: of the script and the files that it reads, by their paths; `variables`: their last values; `exported`:
    names; `files`: texts that it writes, by name; `directives`: Slurm's options in comments; `absent`: files that it
    reads and that are not there; `asked`: variables of the environment that a reader has read."""

    texts: Mapping[str, str] = {}
    commands: tuple[Command, ...] = ()
    variables: Mapping[str, str] = {}
    exported: frozenset[str] = frozenset()
    files: Mapping[str, str] = {}
    directives: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    asked: set[str] = field(default_factory=set)

    @cached_property
    def text(self) -> str:
        """All texts, the script's own first."""
        return "\n".join(self.texts.values())

    def placed(self, file: Path, message: str) -> str:
        """A message that begins with the script's name and a line of `text`, with the file and line of that line."""
        found = AT_LINE.match(message)
        if found is None or found[1] != str(file):
            return message
        line = int(found[2])
        for path, text in self.texts.items():
            if line <= (lines := text.count("\n") + 1):
                return f"{path}:{line}: {message[found.end() :]}"
            line -= lines
        return message

    @cached_property
    def started(self) -> str:
        """Each command on a line."""
        return "\n".join(" ".join(command.words) for command in self.commands)

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """The variables that its commands see from it, or that they give to what they start in turn."""
        found: dict[str, str] = {}
        for command in self.commands:
            found |= command.environment
            found |= {name: value for word in command.words for name, value in OF_WORD.findall(word)}
        if not any(word.startswith("-") for command in self.commands for word in command.words):
            found |= {name: self.variables.get(name, "") for name in self.exported}  # a file that others source
        return found

    def variable(self, name: str) -> str | None:
        """A variable of the environment that a reader uses."""
        self.asked.add(name)
        return self.environment.get(name) or None


NO_SCRIPT = Script()


def of_words(text: str) -> Script:
    """A command line whose words are known."""
    return Script({"": text}, (Command(tuple(shlex.split(text)), 1, "", {}),))
