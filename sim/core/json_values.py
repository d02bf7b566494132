"""What a value of JSON or YAML is. Python counts `true` and `false` among its integers; a file's reader must not."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is an integer.

    >>> is_integer(3), is_integer(True), is_integer(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number, whole or not; infinities and NaN are.

    >>> is_number(3), is_number(0.5), is_number(False), is_number("3")
    (True, True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value is an integer of at least 1."""
    return is_integer(value) and value >= 1


def is_positive(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number above 0."""
    return is_number(value) and value > 0
