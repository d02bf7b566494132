"""Interpolations of OmegaConf's YAMLs (`${policy.precision}`), filled in with values of the same file.

omegaconf: a path from the root or, behind dots, from the value's own section, and `oc.select` with a default. NeMo RL's
own are add, sub, mul, div and max of two values (nemo_rl/utils/config.py).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.yaml_input import parse_yaml

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
TWO_VALUES: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
SELECT = "oc.select"
MOST_LOOKUPS = 50  # of one value, and sections within one another
MOST_VALUES, MOST_CHARACTERS = 100_000, 10_000  # of all that is filled in, and of one text: more only copies repeat
UNKNOWN = object()


def filled(file: Path, values: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The mapping with interpolations filled in by `root`, or else by itself; those of unknown names and of the
    environment stay as they are.

    Raises:
        InputError: for an interpolation that leads back to itself, or to copies of copies without an end.
    """
    left = iter(range(MOST_VALUES))
    whole = values if root is None else root
    return {key: _filled(file, value, whole, (key,), left) for key, value in values.items()}


def _filled(file: Path, value: Any, root: Mapping[str, Any], at: tuple[str, ...], left: Iterator[int]) -> Any:
    """A value whose place in the file is `at`; `left` counts those that may still come."""
    if next(left, None) is None or len(at) > MOST_LOOKUPS:
        raise _endless(file, value)
    if isinstance(value, dict):
        return {key: _filled(file, inner, root, (*at, str(key)), left) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(file, inner, root, (*at, ""), left) for inner in value]
    for _ in range(MOST_LOOKUPS):
        if not isinstance(value, str) or (found := INNERMOST.search(value)) is None:
            return value
        said = _said(found[1], root, at)
        whole = found[0] == value.strip()
        if said is UNKNOWN or (isinstance(said, (dict, list)) and not whole):
            return value  # an environment's variable (`${oc.env:HOME}`), or a text about data
        if isinstance(said, (dict, list)):
            return _filled(file, said, root, at, left)
        value = said if whole else value.replace(found[0], "null" if said is None else str(said))
        if len(str(value)) > MOST_CHARACTERS:
            break
    raise _endless(file, value)


def _endless(file: Path, value: Any) -> InputError:
    return InputError(
        f"{file}: found {show(value)}, an interpolation that leads back to itself or repeats copies without an end"
    )


def _said(words: str, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    """What an interpolation's inside stands for; `UNKNOWN` for what is left as it is."""
    name, colon, rest = words.partition(":")
    if not colon:
        return _at(words.strip(), root, at)
    if name == SELECT:
        path, comma, default = (part.strip() for part in rest.partition(","))
        found = _at(path, root, at)
        return parse_yaml(default, words)[0] if found in (UNKNOWN, None) and comma else found
    numbers = [_number(part) for part in rest.split(",")] if name in TWO_VALUES else []
    if len(numbers) != 2 or None in numbers:
        return UNKNOWN
    try:
        result = TWO_VALUES[name](*(number or 0.0 for number in numbers))
    except (ArithmeticError, ValueError):  # a division by zero
        return UNKNOWN
    if not math.isfinite(result):
        return UNKNOWN
    return int(result) if result == int(result) else result


def _at(path: str, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    """The value of a path; of one that begins with dots from the section of `at`, or as many further out."""
    inner = path.lstrip(".")
    before = at[: -(len(path) - len(inner))] if path != inner else ()
    found: Any = root
    for part in (*before, *inner.split(".")):
        if not isinstance(found, dict) or part not in found:
            return UNKNOWN
        found = found[part]
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
