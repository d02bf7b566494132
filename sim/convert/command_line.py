"""Flags of a launch script, read as text and never run: assignments of plain values (`TP=8`), `$TP` and `${TP:-8}` are
put in, arrays and continued lines are joined."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

ASSIGNMENT = re.compile(r"(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s()]*)[ \t]*(?:#.*)?$")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
QUOTED = r"('[^']*'|\"[^\"]*\")"
MAX_CHARACTERS = 8 * 2**20


def words_of(file: Path, text: str, ends: bool = False) -> list[str]:
    """The words of a script, without comments and arrays' brackets, and with values for variables.

    `ends`: the end of a line is the word `;`.
    """
    text = text.replace("\\\n", " ")
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    text = re.sub(rf"{QUOTED}|[()]", lambda found: found[1] or " ", text).replace("[@]", "")
    for _ in range(4):  # a variable may be made of others
        text = _with_variables(text)
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"{file}: variables make it longer than {MAX_CHARACTERS:,} characters")
    text = re.sub(rf"{QUOTED}|\n", lambda found: found[1] or " ; ", text) if ends else text
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def flags_of(words: list[str], short: bool = False) -> dict[str, Any]:
    """Values by flag, without dashes and with `-` for `_`; True for a flag without one. `short`: one dash is enough."""
    start = re.compile("--?[A-Za-z]" if short else "--")
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if start.match(word):
            name, separator, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            flags[name] = value if separator else True
        elif name and flags[name] is True:
            flags[name] = word
            name = ""
        else:
            name = ""
    return flags


def _with_variables(text: str) -> str:
    """The text with values for variables that it assigns, and defaults (`${TP:-8}`) for others that have one."""
    variables: dict[str, str] = {name: value.strip("\"'") for name, value in ASSIGNMENT.findall(text)}

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name, found[0] if default is None else default)

    return VARIABLE.sub(value, text)
