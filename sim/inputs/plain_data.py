"""Checks of plain data read from JSON. Each error names the place, the value found and the values allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sim.core.errors import InputError
from sim.inputs.input_source import show


def mapping(data: object, where: str, allowed: str = "a mapping") -> dict[str, Any]:
    """A mapping; InputError for anything else."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: found {show(data)}; allowed: {allowed}")
    return data


def listed(data: object, where: str) -> list[Any]:
    """A list; InputError for anything else."""
    if not isinstance(data, list):
        raise InputError(f"{where}: found {show(data)}; allowed: a list")
    return data


def text(data: object, where: str) -> str:
    """A text; InputError for anything else."""
    if not isinstance(data, str):
        raise InputError(f"{where}: found {show(data)}; allowed: text")
    return data


def one_of(data: object, known: Iterable[str], where: str) -> str:
    """A text that is among these; InputError for anything else."""
    if data not in list(known):
        raise InputError(f"{where}: found {show(data)}; allowed: {', '.join(known)}")
    return str(data)


def whole(data: object, where: str, least: int, most: int | None = None) -> int:
    """A whole number of these limits; InputError for anything else."""
    # JSON's true is an int in Python, but a mistake here.
    if type(data) is not int or data < least or (most is not None and data > most):
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{where}: found {show(data)}; allowed: a whole number {limits}")
    return data


def rows_of(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a table whose columns are lists of one length; InputError for anything else.

    A column that is not among `keys` may decide what a step takes, so that it is not passed over.
    """
    if unknown := [key for key in table if key not in keys]:
        raise InputError(f"{where}.{unknown[0]}: unknown column (of a newer version?); allowed: {', '.join(keys)}")
    for key in keys:
        if not isinstance(table.get(key), list) or len(table[key]) != len(table[keys[0]]):
            raise InputError(f"{where}.{key}: allowed: a list as long as {keys[0]}")
    return zip(*(table[key] for key in keys), strict=True)
