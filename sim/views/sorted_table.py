"""A table of layouts: printed, and on a page, where a click on a head sorts it (its HTML: `templates/parts.html`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sim.core.units import percent
from sim.views.terminal import Column, TextRow, TextTable

Cell = tuple[str, str]  # the text to sort by, and the text shown; where the two differ, it is a number
NOTHING: Cell = ("", "–")


class SortedTable(NamedTuple):
    """A table: heads with what they mean, rows of cells, and what each row's buttons copy, as (name, text). `wide`: the
    column that gets the most room."""

    name: str
    head: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    copies: Sequence[Sequence[tuple[str, str]]] = ()
    wide: int = 0


def sorted_table(
    name: str,
    head: Mapping[str, str],
    rows: Sequence[Sequence[Cell]],
    copies: Sequence[Sequence[tuple[str, str]]] = (),
    wide: int = 0,
) -> SortedTable:
    """The table with those columns that have a value in some row. `head`: titles, and what they mean. `wide`: the
    column of `head` that gets the most room."""
    kept = [i for i in range(len(head)) if any(row[i] != NOTHING for row in rows)]
    titles = list(head.items())
    shown = [[row[i] for i in kept] for row in rows]
    return SortedTable(name, [titles[i] for i in kept], shown, copies, kept.index(wide) if wide in kept else 0)


def as_printed(table: SortedTable) -> TextTable:
    """The table for a terminal: numbers stand right, words wrap."""
    is_number = [any(value != text for value, text in (row[i] for row in table.rows)) for i in range(len(table.head))]
    columns = [
        Column(title, number, wraps=not number) for (title, _), number in zip(table.head, is_number, strict=True)
    ]
    return TextTable(columns, [TextRow(tuple(text for _, text in row)) for row in table.rows], gap=2)


def word(text: str) -> Cell:
    """A cell of text, or of a whole number."""
    return text, text


def share(value: float | None) -> Cell:
    """A cell of a fraction, if there is one."""
    return NOTHING if value is None else (f"{value:.12f}", percent(value))
