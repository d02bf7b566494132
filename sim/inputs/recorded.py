"""A mapping of foreign data that remembers which of its keys were asked for, so that the others can be named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Recorded(dict[str, Any]):
    """Plain data as a mapping; mappings in it are recorded, too.

    Copies that `|`, `without` and `renamed` make share the memory. What a copy has in place of a value is not that
    value: asking for it does not count. Neither does `in`, which gives no value away. A copy with `{**mapping}` or
    `dict(mapping)` is a plain one, and asks for nothing.

    >>> config = Recorded({"layers": 2, "rope": {"theta": 1, "scale": 2}, "window": 4, "bias": True})
    >>> changed = {"heads": 8} | config | {"bias": False}
    >>> changed["layers"], changed.get("rope").get("theta"), changed["bias"], changed["heads"]
    (2, 1, False, 8)
    >>> [place for place, _ in config.unread()]
    ['rope.scale', 'window', 'bias']
    """

    __slots__ = ("_asked", "_names", "_parts")

    _asked: set[str]
    _names: dict[str, str]
    _parts: dict[str, Recorded]

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self._asked, self._parts = set(), {}
        self._names = {key: key for key in data}  # of the file's values that this copy has: their keys there

    def _copy(self, data: dict[str, Any], names: dict[str, str]) -> Recorded:
        made = Recorded(data)
        made._asked, made._parts, made._names = self._asked, self._parts, names
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(self), self._asked, self._names, self._parts)

    def _read(self, key: str, value: Any) -> Any:
        name = self._names.get(key)
        if name is None:
            return value
        self._asked.add(name)
        if type(value) is dict:
            return self._parts.setdefault(name, Recorded(value))
        return value

    def __getitem__(self, key: str) -> Any:
        return self._read(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        return self._read(key, super().get(key, default))

    def __setitem__(self, key: str, value: Any) -> None:
        self._names.pop(key, None)
        super().__setitem__(key, value)

    def items(self) -> Any:
        """All pairs, of which each counts as asked for."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """All values, of which each counts as asked for."""
        return [self[key] for key in self]

    def __or__(self, other: Mapping[str, Any]) -> Recorded:  # type: ignore[override]
        kept = {key: name for key, name in self._names.items() if key not in other}
        return self._copy(dict(self) | dict(other), kept)

    def __ror__(self, other: Mapping[str, Any]) -> Recorded:  # type: ignore[override]
        return self._copy(dict(other) | dict(self), self._names)

    def accept(self, keys: Iterable[str]) -> None:
        """Count keys as asked for, with all that their values hold."""
        for key in keys:
            if (name := self._names.get(key)) is not None:
                self._asked.add(name)
                self._parts.pop(name, None)

    def has_read(self, key: str) -> bool:
        """Tell whether somebody asked for a key's value in the file."""
        return self._names.get(key) in self._asked

    def unread(self, place: str = "") -> Iterator[tuple[str, Any]]:
        """Places and values of keys that nobody asked for, in the file's order; a mapping for which nobody asked is one
        of them."""
        for key, value in dict.items(self):
            part = self._parts.get(key)
            if key not in self._asked:
                yield f"{place}{key}", value
            elif part is not None:
                yield from part.unread(f"{place}{key}.")


def _restored(data: dict[str, Any], asked: set[str], names: dict[str, str], parts: dict[str, Recorded]) -> Recorded:
    made = Recorded(data)
    made._asked, made._names, made._parts = asked, names, parts
    return made


def without(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy that lacks a key."""
    kept = {name: value for name, value in dict.items(data) if name != key}
    if not isinstance(data, Recorded):
        return kept
    return data._copy(kept, {own: name for own, name in data._names.items() if own != key})


def renamed(data: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy with other names of some keys; of two that get one name the last counts."""
    found = {names.get(key, key): value for key, value in dict.items(data)}
    if not isinstance(data, Recorded):
        return found
    return data._copy(found, {names.get(own, own): name for own, name in data._names.items()})


def decided(data: Mapping[str, Any], *keys: str) -> None:
    """Count keys as asked for, about which others have decided: their values, whatever they are, change nothing."""
    if isinstance(data, Recorded):
        data.accept(keys)


def same(data: Mapping[str, Any], names: Iterable[str]) -> None:
    """Count keys as asked for that have the value of one that was, all of them names of one thing."""
    if isinstance(data, Recorded):
        there = [name for name in names if name in data]
        known = [dict.get(data, name) for name in there if data.has_read(name)]
        data.accept([name for name in there if dict.get(data, name) in known])
