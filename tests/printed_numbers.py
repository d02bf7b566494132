"""The numbers in a text that a command prints, and those of a result that an expression reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

BYTES = {f"{prefix}iB": 1024.0**i for i, prefix in enumerate("KMGT", 1)}
TIMES = {"µs": 1e-6, "ms": 1e-3, "min": 60.0, "h": 3600.0, "days": 86400.0}
PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
NUMBER = re.compile(r"(?<![\w.])([\d,]*\.?\d+)(?: ?([A-Za-zµ%]+))?")


def scales(unit: str) -> list[float]:
    """What a number with this unit, or word, after it may stand for."""
    if unit == "%":
        return [0.01]
    return [1.0, *([BYTES[unit]] if unit in BYTES else []), *([TIMES[unit]] if unit in TIMES else []), *_prefix(unit)]


def _prefix(unit: str) -> list[float]:
    return [PREFIXES[unit[0]]] if unit[:1] in PREFIXES and unit not in BYTES else []


def shows(text: str, number: float) -> bool:
    """Tell whether a text has a number, as it rounds it."""
    for digits, unit in NUMBER.findall(text):
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        printed = float(digits.replace(",", ""))
        if any(abs(abs(number) - printed * by) <= (1.01 * half + 1e-9 * printed) * by for by in scales(unit)):
            return True
    return False


class Watched:
    """Notes the numbers that are read from what it wraps."""

    def __init__(self) -> None:
        self.read: list[float] = []

    def wrap(self, value: Any) -> Any:
        """The value, that notes what is read from it."""
        if isinstance(value, dict):
            return _WatchedDict(value, self)
        if isinstance(value, list):
            return _WatchedList(value, self)
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.read.append(float(value))
        return value


class _WatchedDict(dict[str, Any]):
    def __init__(self, value: dict[str, Any], watched: Watched) -> None:
        super().__init__(value)
        self._watched = watched

    def __getitem__(self, key: str) -> Any:
        return self._watched.wrap(super().__getitem__(key))


class _WatchedList(list[Any]):
    def __init__(self, value: list[Any], watched: Watched) -> None:
        super().__init__(value)
        self._watched = watched

    def __getitem__(self, place: Any) -> Any:
        return self._watched.wrap(super().__getitem__(place))

    def __iter__(self) -> Iterator[Any]:
        return (self._watched.wrap(value) for value in super().__iter__())
