"""Keys of a trainer's file that look like sizes and decide nothing: each is named.

Readers note what they did not take. Some choose among it, since their files list hundreds of defaults, or look only
into sections that they know. So each size that no note has, and that was not taken under its name, is changed, and the
file read again: where the scenario and the notes stay as they are, nothing reads that size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from msgspec.structs import replace

from sim.convert.settings import Converted
from sim.core.errors import InputError

_SIZE = re.compile(r"(^num|dim|heads|layers|rank|size|dtype|experts)(_|$)")
_TRIED = 40  # sizes: each takes as long as reading the file

Reader = Callable[[dict[str, Any]], Converted]


def with_sizes_left(data: dict[str, Any], read: Reader) -> Converted:
    """What `read` makes of a file, with a note of sizes that decide nothing."""
    found = read(deepcopy(data))
    asked, said = {_plain(name) for name in found.asked}, " ".join(found.notes).replace("-", "_")
    new = [path for path in _sizes(data) if _plain(path[-1]) not in asked and _plain(path[-1]) not in said]
    left = [".".join(path) for path in new[:_TRIED] if _decides_nothing(data, path, read, found)]
    return replace(found, notes=(*found.notes, f"not expressed here: {', '.join(left)}")) if left else found


def _decides_nothing(data: dict[str, Any], path: tuple[str, ...], read: Reader, found: Converted) -> bool:
    changed: dict[str, Any] = deepcopy(data)
    section = changed
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = _other(section[path[-1]])
    try:
        again = read(changed)
    except (ArithmeticError, InputError, LookupError, TypeError, ValueError):
        return False
    return (again.scenario, again.notes) == (found.scenario, found.notes)


def _other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*map(_other, value)]
    return value + 1 if isinstance(value, (int, float)) else f"{value}x"


def _sizes(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Places of keys that look like sizes and have a value that is one, in sections that are not switched off."""
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(key, str):
            yield from () if value.get("enabled") is False else _sizes(value, (*path, key))
        elif isinstance(key, str) and value and _SIZE.search(key.replace("-", "_")):
            yield (*path, key)


def _plain(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
