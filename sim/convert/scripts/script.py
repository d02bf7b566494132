"""A launch script as one reading of it: values that its user gives for its variables, and the branches that it takes.

A test that the file does not decide is tried both ways. Where all ways say the same scenario, or only one of them says
any, that is the reading; else the user has to say which one runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from sim.convert.scripts.branches import OpenTest, taken_branches
from sim.convert.scripts.command_line import ASSIGNMENT, VARIABLE, with_values
from sim.convert.scripts.loops import unrolled
from sim.convert.settings import Converted
from sim.core.errors import InputError

NAME = re.compile(r"[A-Za-z_]\w*")
ARGUMENT = re.compile(r"\$(?:(\d)|\{(\d+)(?::?[-=?+][^{}]*)?\})")
SHIFTS = re.compile(r"(?m)(?:^|[;\s])(?:shift|getopts)(?=[\s;]|$)")
# `: "${TP:=8}"`, which gives a variable its default.
DEFAULTS = re.compile(r"(?m)^([ \t]*):[ \t]+(.*\$\{\w+:?=.*)$")
DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")
ONE = r"[A-Za-z_]\w*\+?=(?:\"[^\"]*\"|'[^']*'|\$\(\([^\n]*?\)\)|[^\s();\"']*)"
# `export TP=4 PP=2`, and nothing behind it.
SEVERAL = re.compile(
    rf"(?m)(?:^|(?<=;))[ \t]*(?:(?:export|readonly|local|declare|typeset)(?:[ \t]+-\w+)*[ \t]+)?"
    rf"{ONE}(?:[ \t]+{ONE})+[ \t]*(?=;|#|$)"
)
MOST_KEYS = 4  # that a message names
MOST_TESTS = 50  # that are tried


class Given(Struct, frozen=True):
    """Hold what --var and --args say: values of `variables`, which the script's own assignments do not change, and its
    `arguments`; None without --args."""

    variables: Mapping[str, str] = {}
    arguments: tuple[str, ...] | None = None


def given_values(variables: tuple[str, ...], arguments: str | None) -> Given:
    """The values of `--var NAME=VALUE` and `--args 'FIRST SECOND'`.

    Raises:
        InputError: for a variable without a name or a value, or an open quote.
    """
    found: dict[str, str] = {}
    for text in variables:
        name, separator, value = text.partition("=")
        if not separator or not NAME.fullmatch(name):
            raise InputError(f"--var: found '{text[:60]}'; must be NAME=VALUE, such as MODEL_SIZE=7B")
        found[name] = value
    try:
        return Given(found, None if arguments is None else tuple(shlex.split(arguments)))
    except ValueError as error:
        raise InputError(f"--args: found '{str(arguments)[:60]}': {error}") from None


def read_script(file: Path, text: str, given: Given, convert: Callable[[str], Converted]) -> Converted:
    """The script's reading, by `convert` of the text that runs.

    Raises:
        InputError: for a test that decides about the scenario and that the file leaves open, and as `convert` does.
    """
    text = SEVERAL.sub(_apart, DEFAULTS.sub(_assigned, text))
    text = unrolled(_with_given(file, text, given))
    choices: dict[int, int] = {}
    for _ in range(MOST_TESTS):
        _, tests = taken_branches(text, given.variables, choices)
        test = next((test for test in tests if test.at not in choices), None)
        if test is None:
            return convert(taken_branches(text, given.variables, choices)[0])
        choices[test.at] = _choice(file, text, test, given, choices, convert)
    raise InputError(f"{file}: leaves more than {MOST_TESTS} tests open: give its variables by --var NAME=VALUE")


def _with_given(file: Path, text: str, given: Given) -> str:
    """The script with the values in it; assignments at its end overrule its own, where a variable is a bare name."""
    if (arguments := given.arguments) is not None:
        if SHIFTS.search(text):
            why = "the script takes its arguments one by one (shift, getopts), which is not read"
            raise InputError(f"{file}: --args: {why}: give the variables that it sets by --var NAME=VALUE")
        everything = " ".join(arguments)
        text = text.replace("$#", str(len(arguments))).replace("$@", everything).replace("$*", everything)
        text = ARGUMENT.sub(lambda found: _argument(found, arguments), text)
    if unknown := [name for name in given.variables if not re.search(rf"\b{name}\b", text)]:
        raise InputError(f"{file}: --var: the file has no variable {unknown[0]}")
    assigned = "".join(f"\n{name}={shlex.quote(value)}" for name, value in given.variables.items())
    return with_values(text, given.variables, set()) + assigned


def _apart(found: re.Match[str]) -> str:
    """Several assignments of a line as as many commands.

    >>> SEVERAL.sub(_apart, "export TP=4 PP='1 2'  # sizes\\nA=1 B=2 run")
    "export TP=4; PP='1 2'  # sizes\\nA=1 B=2 run"
    """
    ends = [one.end() for one in re.finditer(ONE, found[0])][:-1]
    text = found[0]
    for end in reversed(ends):
        text = f"{text[:end]};{text[end:]}"
    return text


def _assigned(found: re.Match[str]) -> str:
    """The assignments that a line of such defaults stands for."""
    return found[1] + "; ".join(f'{name}="${{{name}:-{value}}}"' for name, value in DEFAULT.findall(found[2]))


def _argument(found: re.Match[str], arguments: tuple[str, ...]) -> str:
    number = int(found[1] or found[2])
    return arguments[number - 1] if 1 <= number <= len(arguments) else found[0]


def _choice(
    file: Path, text: str, test: OpenTest, given: Given, choices: Mapping[int, int], convert: Callable[[str], Converted]
) -> int:
    """Which branch to read: any where that makes no difference, the only one that says a scenario, or the first where
    none does."""
    found: dict[int, Converted] = {}
    for choice in test.choices:
        try:
            found[choice] = convert(taken_branches(text, given.variables, {**choices, test.at: choice})[0])
        except InputError:
            continue
    kinds = list(found.values())
    differing = {key for one in kinds for key in _differing(kinds[0].scenario, one.scenario)}
    if differing:
        raise InputError(_open(file, text, test, differing))
    return next(iter(found), 0)


def _differing(one: Any, other: Any, path: str = "") -> set[str]:
    """Keys whose values differ, with their sections."""
    if not (isinstance(one, dict) and isinstance(other, dict)) or path.count(".") > 1:
        return set() if one == other else {path}
    return {
        found
        for key in one.keys() | other.keys()
        for found in _differing(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    }


def _open(file: Path, text: str, test: OpenTest, differing: set[str]) -> str:
    """Return the message for a test that the file leaves open although keys (`differing`) depend on it."""
    keys = sorted(differing)
    more = f" and {len(keys) - MOST_KEYS} more keys" if len(keys) > MOST_KEYS else ""
    tests = ", ".join(f"`{words[:60]}`" for words in test.tests[:8] if words != "else")
    problem = f"the file does not decide {tests}, and {', '.join(keys[:MOST_KEYS])}{more} depend on it"
    return f"{file}:{test.line}: {problem}: {_advice(text, test)}"


def _advice(text: str, test: OpenTest) -> str:
    """Return how a user decides the test: by --var, --args, or by editing the file."""
    assigned = {name: value for name, _, value in ASSIGNMENT.findall(text)}
    names = dict.fromkeys(a or b for words in test.tests for a, _, b in VARIABLE.findall(words))
    named = [name for name in names if NAME.fullmatch(name)]
    of_arguments = any(name.isdigit() for name in names) or any(
        ARGUMENT.fullmatch(assigned.get(name, "").strip("\"'")) for name in named
    )
    ways = [f"--var {' --var '.join(f'{name}=VALUE' for name in named)}"] if named else []
    if of_arguments:
        ways.append("--args 'FIRST SECOND …', the script's arguments")
    return f"give {' or '.join(ways)}" if ways else "keep only the branch that runs in the file"
