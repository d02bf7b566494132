"""Lines and tables for a person, in the width and the colours that the output has.

Written here because rich, which other commands take for their tables, needs a tenth of a short command's time.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TextIO

from msgspec import Struct

CODES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "blue": "34", "cyan": "36", "grey": "90"}  # of ECMA-48
USUAL_WIDTH = 80  # characters, where no stream is a terminal
INDENT = 2  # characters of lines that go on with a row
LEAST_WIDTH = 6  # characters that a column keeps, however narrow the terminal is


class Span(NamedTuple):
    """Text in one style: words of `CODES`, with spaces between."""

    text: str
    style: str = ""


Cell = str | tuple[Span, ...]
Line = Sequence[Span]


class Column(Struct, frozen=True):
    """A column of a table. `wraps`: long text takes several lines instead of being cut; `indents`: all of them but
    the first are indented; `most`: characters."""

    head: str = ""
    right: bool = False
    style: str = ""
    wraps: bool = False
    indents: bool = False
    most: int | None = None


class TextRow(Struct, frozen=True):
    """A row of a table; its style, if any, takes the place of the columns'."""

    cells: tuple[Cell, ...]
    style: str = ""


class TextTable(Struct, frozen=True):
    """A table without a frame: heads, where there are any, stand above a rule; `gap`: spaces between columns."""

    columns: tuple[Column, ...]
    rows: Sequence[TextRow]
    gap: int = 3


class Terminal(Struct, frozen=True):
    """Where a person reads: its width in characters, and whether it shows styles. `file` None: standard output."""

    width: int = USUAL_WIDTH
    styled: bool = False
    file: TextIO | None = None

    def print(self, text: str = "", style: str = "") -> None:
        """Text in as many lines as it needs."""
        for line in _wrapped(text, self.width):
            self._write([Span(line, style)])

    def print_table(self, table: TextTable) -> None:
        """A table no wider than the terminal."""
        widths = _widths(table, self.width)
        if any(column.head for column in table.columns):
            heads = TextRow(tuple(column.head for column in table.columns), "dim")
            for line in _lines(heads, table, widths):
                self._write(line)
            self._write([Span("─" * (sum(widths) + table.gap * (len(widths) - 1)))])
        for row in table.rows:
            for line in _lines(row, table, widths):
                self._write(line)

    def _write(self, line: Line) -> None:
        # Spaces at the end of a line are of no use in a file, and a narrow terminal would break the line for them.
        if not self.styled:
            print("".join(span.text for span in line).rstrip(), file=self.file)
            return
        parts = (
            f"\x1b[{';'.join(CODES[word] for word in style.split())}m{text}\x1b[0m" if style and text else text
            for text, style in line
        )
        print("".join(parts).rstrip(), file=self.file)


def standard_output() -> Terminal:
    """Standard output as it is, and as NO_COLOR (no-color.org), FORCE_COLOR, COLUMNS and TERM want it."""
    asked = os.environ.get
    refused = asked("NO_COLOR") or asked("TERM") in ("dumb", "unknown")
    # Older consoles of Windows print escape codes as they are.
    shows = sys.stdout.isatty() and (os.name != "nt" or asked("WT_SESSION") is not None)
    return Terminal(_columns(), not refused and bool(shows or asked("FORCE_COLOR")))


def _columns() -> int:
    """Characters in a line of whichever standard stream is a terminal: a pager shows the lines on that, too."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdigit() and int(stated):
        return int(stated)
    for stream in range(3):
        try:
            return os.get_terminal_size(stream).columns or USUAL_WIDTH
        except OSError:
            continue
    return USUAL_WIDTH


def _wrapped(text: str, width: int) -> list[str]:
    """Text in lines of whole words, a word that is longer than a line cut.

    >>> _wrapped("a step of 2 seconds", 11)
    ['a step of 2', 'seconds']
    """
    if columns_of(text) <= width and text.isprintable():
        return [text]
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        if columns_of(word) <= width:
            if columns_of(lines[-1] + gap + word) <= width:
                lines[-1] += gap + word
            else:
                lines.append(word)
            continue
        for character in gap + word:
            if columns_of(lines[-1] + character) > width:
                lines.append(character.strip())
            else:
                lines[-1] += character
    return lines


def columns_of(cell: Cell) -> int:
    """Columns on a terminal: a wide (East Asian) character takes two, a combining one none (Unicode's annex 11).

    >>> columns_of("step"), columns_of("模型")
    (4, 4)
    """
    if not isinstance(cell, str):
        return sum(columns_of(span.text) for span in cell)
    if cell.isascii():
        return len(cell)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in cell)
    return len(cell) + wide - sum(unicodedata.combining(character) > 0 for character in cell)


def _beginning(text: str, width: int) -> str:
    """Return as many of the first characters as fit into `width` columns."""
    end = len(text)
    while columns_of(text[:end]) > width:
        end -= 1
    return text[:end]


def _widths(table: TextTable, most: int) -> list[int]:
    """Characters of each column: as many as it needs; where that is too many, those that wrap lose some first."""
    columns = table.columns
    widths = [
        max([columns_of(c.head), *(columns_of(row.cells[i]) for row in table.rows)]) for i, c in enumerate(columns)
    ]
    widths = [min(width, column.most or width) for width, column in zip(widths, columns, strict=True)]
    wrapping = [i for i, column in enumerate(columns) if column.wraps]
    over = sum(widths) + table.gap * (len(columns) - 1) - most
    for shrinking in (wrapping, range(len(columns))):
        while over > 0 and any(widths[i] > LEAST_WIDTH for i in shrinking):
            widths[max(shrinking, key=widths.__getitem__)] -= 1
            over -= 1
    return widths


def _lines(row: TextRow, table: TextTable, widths: Sequence[int]) -> Iterator[list[Span]]:
    """A row as lines; cells are filled up to their column's width."""
    cells = [_fitted(*each) for each in zip(row.cells, table.columns, widths, strict=True)]
    for parts in zip_longest(*cells, fillvalue=()):
        line = list[Span]()
        for part, column, width in zip(parts, table.columns, widths, strict=True):
            blank = Span(" " * (width - columns_of(tuple(part))))
            style = row.style or column.style
            styled = [Span(span.text, span.style or style) for span in part]
            line += [blank, *styled] if column.right else [*styled, blank]
            line.append(Span(" " * table.gap))
        yield line


def _fitted(cell: Cell, column: Column, width: int) -> list[Line]:
    """A cell's lines, each no longer than its column is wide."""
    if not isinstance(cell, str):
        return [_cut(cell, width)]
    if column.wraps:
        first, *rest = _wrapped(cell, width)
        # Of rows of one or two lines, an indent tells which line begins a row.
        further = _wrapped(" ".join(rest), width - INDENT) if rest and column.indents else rest
        indent = " " * INDENT * column.indents
        return [[Span(first)], *([Span(indent + line)] for line in further)]
    return [[Span(cell if columns_of(cell) <= width else f"{_beginning(cell, width - 1)}…")]]


def _cut(spans: Sequence[Span], width: int) -> list[Span]:
    """The first characters of styled text."""
    kept, left = list[Span](), width
    for text, style in spans:
        kept.append(Span(_beginning(text, left), style))
        left -= columns_of(kept[-1].text)
    return kept
