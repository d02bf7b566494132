"""A config of NeMo RL with what it inherits (`defaults`), and its interpolations (`${policy.precision}`) filled in.

nemo_rl/utils/config.py of NVIDIA-NeMo/RL: parents in order, the later ones and the file itself overruling; a mapping
with `_override_` replaces its parent's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.interpolations import filled
from sim.convert.yaml_aliases import parsed
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show

MAX_BYTES = 2**22
MOST_PARENTS = 20
DEFAULTS, OVERRIDE = "defaults", "_override_"


def whole(file: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its parents merged beneath it and interpolations filled in.

    Raises:
        InputError: for a parent that is not there or holds no mapping, and interpolations that lead nowhere.
    """
    merged = _inherited(file, data, file, 0)
    return filled(file, merged)


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
