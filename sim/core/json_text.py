"""JSON text as plain data, or one message for what is wrong with it: file, line, key."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from msgspec import Struct

from sim.core.errors import InputError

_TOKEN = r'"(?:[^"\\]|\\.)*"|[{}\[\],]'
_STEPS = re.compile(r"elapsed time per iteration|\biteration +\d+/")  # what Megatron-LM logs for each step
_LOG = "; it looks like a training log: give its median step time to `stepsim run SCENARIO --measured 5.7s`"
MOST_READ = 100_000  # characters of a text that is no JSON
_SHOWN = 60  # characters of a key


def parse_json(text: str, label: str, finite: bool = True, line: int | None = None, unique: bool = True) -> Any:
    """The value of a JSON text; `label` starts error messages. `finite`: NaN and infinities are refused. `line`: the
    number of the one line of a file that the text is. `unique`: a key given twice is refused, as it is in YAML; else
    the last one counts.

    Raises:
        InputError: if it is empty, no JSON, nested too deeply, or says a key twice.
    """
    first = 1 if line is None else line
    place = label if line is None else f"{label}:{line}"
    if not text.strip():
        raise InputError(f"{place}: is empty")
    try:
        return json.loads(
            text, parse_constant=_refuse if finite else None, object_pairs_hook=_unique if unique else None
        )
    except _GivenTwice as error:
        raise InputError(f"{label}{_where(text, error.args[0], first)}") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # of some messages, such as "Unterminated string starting at"
        log = _LOG if _STEPS.search(text[:MOST_READ]) else ""
        raise InputError(
            f"{label}:{first - 1 + error.lineno}: is not JSON: {what} at column {error.colno}{log}"
        ) from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply") from None
    except ValueError as error:  # NaN, and integers of thousands of digits
        raise InputError(f"{place}: {str(error)[:200]}") from None


class _GivenTwice(ValueError):
    """A key, of an object that has it twice."""


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"found {text}; only finite numbers are allowed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise _GivenTwice(name)
            seen.add(name)
    return found


class _Level(Struct, frozen=True):
    """An object or a list that is open: the lines of its keys, and where in it the text stands."""

    lines: dict[str, int] | None  # None: a list
    at: list[Any]  # one entry: the present key or index


def _where(text: str, key: str, line: int) -> str:
    """Where a text of valid JSON first says a key twice. The parser tells the key alone."""
    levels, place, key_next = list[_Level](), 0, False
    for token in re.finditer(_TOKEN, text):
        line, place = line + text.count("\n", place, token.start()), token.start()
        mark = token[0]
        if mark in "{[":
            levels.append(_Level({} if mark == "{" else None, ["" if mark == "{" else 0]))
        elif mark in "}]":
            levels.pop()
        elif mark == "," and levels[-1].lines is None:
            levels[-1].at[0] += 1
        elif mark != "," and key_next and levels[-1].lines is not None:
            name, lines = json.loads(mark), levels[-1].lines
            levels[-1].at[0] = name
            if name in lines:
                return f":{line}: {_dotted(levels)}: is given twice (first in line {lines[name]})"
            lines[name] = line
        key_next = mark in "{,"
    return f": {_shown(key)}: is given twice"


def _dotted(levels: list[_Level]) -> str:
    parts = [f"[{x.at[0]}]" if x.lines is None else f".{_shown(x.at[0])}" for x in levels]
    return "".join(parts).removeprefix(".")


def _shown(key: str) -> str:
    cut = key if len(key) <= _SHOWN else key[: _SHOWN - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in cut)
