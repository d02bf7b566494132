"""The console and the tables in which commands print many rows. rich is loaded only where something is printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sim.views.sorted_table import SortedTable


def console_of(piped_width: int = 240) -> Console:
    """Standard output. `piped_width`: characters in a line where it is not a terminal, wide enough for every table."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else piped_width)


def plain_table(gap: int = 1) -> Table:
    """A table without a frame; `gap`: spaces between columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0))


def as_printed(table: SortedTable) -> Table:
    """A page's table for a terminal: numbers stand right and are not cut."""
    out = plain_table()
    for i, (title, _) in enumerate(table.head):
        number = any(value != text for value, text in (row[i] for row in table.rows))
        out.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in table.rows:
        out.add_row(*(text for _, text in row))
    return out
