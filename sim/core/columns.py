"""Columns of numbers: their types, and how they are made, expanded and grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def grouped(keys: Ints, values: Ints, count: int) -> list[list[int]]:
    """Return for each key from 0 to below `count` its values, in their order.

    >>> grouped(np.array([1, 0, 1]), np.array([7, 8, 9]), 3)
    [[8], [7, 9], []]
    """
    # Lists are much faster than arrays here, because the engines read them one number at a time.
    out: list[list[int]] = [[] for _ in range(count)]
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        out[key].append(value)
    return out


def ragged(counts: Ints, picks: Ints) -> tuple[Ints, Ints]:
    """Expand picked parts of a table, whose parts have `counts` rows: return for each row its pick and its index.

    >>> [x.tolist() for x in ragged(np.array([1, 2]), np.array([1, 0, 1]))]
    [[0, 0, 1, 2, 2], [1, 2, 0, 1, 2]]
    """
    return np.repeat(np.arange(len(picks)), counts[picks]), ragged_rows(counts, picks)


def ragged_rows(counts: Ints, picks: Ints) -> Ints:
    """Return the index in the table of each row of `ragged`."""
    many = counts[picks]
    # A row's index is the begin of its part in the table, minus the begin of the copy in the output, plus the row's
    # position in the output. With ten million rows, allocating a column costs more than filling it, so few are made.
    rows: Ints = np.repeat((np.cumsum(counts) - counts)[picks] - (np.cumsum(many) - many), many)
    rows += np.arange(len(rows))
    return rows


def ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    """Return numbers as a column, or as rows."""
    return np.array(values, dtype=np.int64)


def short(numbers: Ints) -> NDArray[np.integer[Any]]:
    """Numbers from 0 on in as few bytes as hold them: short ones are sorted digit by digit."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))
