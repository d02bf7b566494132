"""A config of NeMo RL with what it inherits (`defaults`), and its interpolations (`${policy.precision}`) filled in.

nemo_rl/utils/config.py of NVIDIA-NeMo/RL: parents in order, the later ones and the file itself overruling; a mapping
with `_override_` replaces its parent's; add, sub, mul, div and max of two values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sim.convert.yaml_aliases import parsed
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show

MAX_BYTES = 2**22
MOST_PARENTS = 20
DEFAULTS, OVERRIDE = "defaults", "_override_"
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
TWO_VALUES: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
MOST_LOOKUPS = 50  # of one value


def whole(file: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its parents merged beneath it and interpolations filled in.

    Raises:
        InputError: for a parent that is not there or holds no mapping, and interpolations that lead nowhere.
    """
    merged = _inherited(file, data, file, 0)
    return {key: _filled(file, value, merged) for key, value in merged.items()}


def _inherited(file: Path, data: Mapping[str, Any], of: Path, depth: int) -> dict[str, Any]:
    own = {key: value for key, value in data.items() if key != DEFAULTS}
    named = data.get(DEFAULTS) or []
    found: dict[str, Any] = {}
    for name in [named] if isinstance(named, str) else named:
        parent = of.parent / str(name)
        if depth == MOST_PARENTS or not parent.is_file():
            why = "is not there" if depth < MOST_PARENTS else "inherits in a circle"
            problem = f"found {show(name)}, which {why}; put the configs that it inherits where {of.name} names them"
            raise InputError(f"{file}: {DEFAULTS}: {problem}")
        inner = parsed(read_text(parent, MAX_BYTES), str(parent))
        if not isinstance(inner, dict):
            raise InputError(f"{file}: {DEFAULTS}: {parent} holds no mapping; a config of NeMo RL does")
        found = _merged(found, _inherited(file, inner, parent, depth + 1))
    return _merged(found, own)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings, the second overruling key by key."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        if isinstance(value, dict):
            replaces = bool(value.get(OVERRIDE)) or not isinstance(before, dict)
            plain = {name: inner for name, inner in value.items() if name != OVERRIDE}
            found[key] = _merged({} if replaces else before or {}, plain)
        else:
            found[key] = value
    return found


def _filled(file: Path, value: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(file, inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(file, inner, root) for inner in value]
    for _ in range(MOST_LOOKUPS):
        if not isinstance(value, str) or (found := INNERMOST.search(value)) is None:
            return value
        said = _said(found[1], root)
        if isinstance(said, (dict, list)):
            return value  # an environment's variable (`${oc.env:HOME}`), or a text about data
        value = said if found[0] == value.strip() else value.replace(found[0], str(said))
    raise InputError(f"{file}: found {show(value)}, an interpolation without an end")


def _said(words: str, root: Mapping[str, Any]) -> Any:
    """What an interpolation's inside stands for; the text of what is not known, which is left as it is."""
    name, colon, rest = words.partition(":")
    if colon and name in TWO_VALUES:
        numbers = [_number(part) for part in rest.split(",")]
        if len(numbers) == 2 and None not in numbers:
            result = TWO_VALUES[name](*(number or 0.0 for number in numbers))
            return int(result) if result == int(result) else result
        return {}
    found: Any = root
    for part in words.strip().split("."):
        if not isinstance(found, dict) or part not in found:
            return {}
        found = found[part]
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
