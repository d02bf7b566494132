"""The rows of the lecture decks: what each states, the command that shows it, and its figures as that command gives
them."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.shipped import scenarios_folder
from sim.inputs.yaml_input import parse_yaml

FILE = Path(__file__).parents[1] / "presets" / "courses.yaml"
MAX_BYTES = 1 << 20
PATIENCE_S = 300
WITHOUT_JSON = ("clusters", "models", "scenarios")  # commands of stepsim that print text alone


class Figure(NamedTuple):
    """A number that a deck says; `how`: an expression over the command's JSON (`value`), or over the text it prints;
    `why`: where the tolerance comes from."""

    name: str
    said: float
    tolerance: float
    how: str
    why: str = ""

    def verdict(self, shown: float | None) -> str:
        """Say of what a command shows that it is off the deck's number.

        >>> Figure("fall", 0.43, 0.1, "").verdict(0.4), Figure("fall", 0.43, 0.1, "").verdict(0.3)
        ('', 'off')
        """
        if shown is None:
            return "not run here"
        return "off" if abs(shown - self.said) > self.tolerance * abs(self.said) else ""


class CourseRow(NamedTuple):
    """One item of the decks. `lines`: deck:lines, or card, the project's own description; `note`: why partial, or why
    ours differs."""

    row: int
    statement: str
    lines: str
    status: str
    scenario: str
    command: str
    test: str
    figures: Sequence[Figure] = ()
    note: str = ""

    @property
    def deck(self) -> int | None:
        """Number of the deck; None for the project's own description."""
        return None if self.lines == "card" else int(self.lines.partition(":")[0])

    def to_json(self, shown: Sequence[float | None]) -> dict[str, Any]:
        """Plain data, with the figures as they are shown now."""
        figures = [
            {"name": f.name, "said": f.said, "tolerance": f.tolerance, "shown": number}
            for f, number in zip(self.figures, shown, strict=True)
        ]
        own = {"row": self.row, "deck": self.deck, "lines": self.lines, "statement": self.statement}
        return {**own, "command": self.command, "figures": figures, "note": self.note}


def sections() -> list[tuple[str, str, list[CourseRow]]]:
    """Letter, title and rows of each section."""
    data, _ = parse_yaml(read_text(FILE, MAX_BYTES), FILE.name)
    return [(s["letter"], s["title"], [_row(row) for row in s["rows"]]) for s in data["sections"]]


def _row(data: Mapping[str, Any]) -> CourseRow:
    return CourseRow(**{**data, "figures": [Figure(**figure) for figure in data.get("figures", ())]})


def rows() -> Iterator[CourseRow]:
    """All rows."""
    for *_, mine in sections():
        yield from mine


def shown(row: CourseRow) -> list[float | None]:
    """The row's figures as its command gives them now; None where the command cannot run here."""
    if not row.figures:
        return []
    try:
        found = result_of(row.command).found
    except InputError as error:
        print(f"row {row.row}: {error}", file=sys.stderr)
        return [None for _ in row.figures]
    return [value(figure.how, found) for figure in row.figures]


class Ran(NamedTuple):
    """What a command gave: its JSON, or the text again where it has none, and the text that it printed."""

    found: Any
    printed: str


@cache
def result_of(command: str) -> Ran:
    """What a command gives, run in this process if it is one of `stepsim`.

    It runs in a folder of its own, in which `scenarios` are the shipped ones.

    Raises:
        InputError: if the command does not end with 0; the message is its own.
    """
    with TemporaryDirectory() as folder, chdir(folder):
        Path("scenarios").symlink_to(scenarios_folder(), target_is_directory=True)
        name, *words = shlex.split(command)
        return _in_process(words) if name == "stepsim" else _as_process(words)


def _in_process(words: Sequence[str]) -> Ran:
    from sim.commands.stepsim import main

    out, printed, said = Path("result.json").resolve(), StringIO(), StringIO()
    wanted = [] if words[0] in WITHOUT_JSON else ["--json", str(out)]
    with redirect_stdout(printed), redirect_stderr(said):
        try:
            code = main.main([*words, *wanted], prog_name="stepsim", standalone_mode=False)
        except SystemExit as end:
            code = end.code
    if code:
        raise InputError(f"{shlex.join(['stepsim', *words])}: {said.getvalue().strip()}")
    text = printed.getvalue()
    return Ran(json.loads(out.read_text("utf-8")) if wanted else text, text)


def _as_process(words: Sequence[str]) -> Ran:
    line = [sys.executable, *words]
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE_S)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise InputError(f"{shlex.join(['python', *words])}: {''.join(last)}")
    return Ran(done.stdout, done.stdout)


OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _one(rows: Sequence[Mapping[str, Any]], key: str, value: object) -> Mapping[str, Any]:
    return next(row for row in rows if row[key] == value)


def _having(rows: Sequence[Mapping[str, Any]], key: str, pattern: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if re.fullmatch(pattern, str(row[key]))]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "len": len,
    "one": _one,
    "having": _having,
}


def value(how: str, found: Any) -> float:
    """A number out of a command's result: an expression of keys, places and +, -, *, /, **.

    A key of a list is the list of that key. `one(list, key, value)` is the first entry whose key is the value,
    `having(list, key, pattern)` all whose key the pattern matches whole. Of text, `printed('pattern')` is the
    number that the pattern's group finds.

    >>> value("rows[1].step_s / rows[0].step_s - 1", {"rows": [{"step_s": 2.0}, {"step_s": 3.0}]})
    0.5
    >>> value("sum(rows.step_s) + one(rows, 'step_s', 3.0).step_s", {"rows": [{"step_s": 2.0}, {"step_s": 3.0}]})
    8.0
    >>> value(r"printed('sum ([0-9.]+)')", "the sum 6.0")
    6.0
    """
    return float(_value(ast.parse(how, mode="eval").body, found))


def _value(node: ast.expr, found: Any) -> Any:
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return found[name]
        case ast.Attribute(value=inner, attr=key):
            return _at(_value(inner, found), key)
        case ast.Subscript(value=inner, slice=place):
            return _at(_value(inner, found), _value(place, found))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, found)
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATIONS[type(sign)](_value(left, found), _value(right, found))
        case ast.Call(func=ast.Name(id="printed"), args=[ast.Constant(value=str(pattern))]):
            hit = re.search(pattern, found)
            if hit is None:
                raise InputError(f"{pattern}: is not in what the command prints")
            return float(hit[1].replace(",", ""))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name](*(_value(argument, found) for argument in arguments))
    raise InputError(f"{ast.unparse(node)}: is no part of an expression over a result")


def _at(value: Any, place: str | int) -> Any:
    if isinstance(value, list) and isinstance(place, str):
        return [entry[place] for entry in value]
    return value[place]
