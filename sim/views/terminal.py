"""Lines and tables for a person, in the width and the colours that the output has.

No table is cut: one that is too wide for the terminal stands row by row, with the names of its columns in each row.
Written here because rich needs a tenth of a short command's time.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TextIO

from msgspec import Struct

CODES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "blue": "34", "cyan": "36", "grey": "90"}  # of ECMA-48
USUAL_WIDTH = 80  # characters, where no stream is a terminal
PIPED_WIDTH = 240  # where tables of many columns are read by programs
INDENT = 2  # characters of lines that go on with a row
BETWEEN = 2  # characters between the cells of a row that stands by itself
READABLE = 20  # characters that a column keeps whose text needs more than two lines of them
LONGEST_WORD = 32  # characters; a longer one, such as a path, may be broken


class Span(NamedTuple):
    """Text in one style: words of `CODES`, with spaces between."""

    text: str
    style: str = ""


Cell = str | tuple[Span, ...]
Line = Sequence[Span]


class Column(Struct, frozen=True):
    """A column of a table. `wraps`: long text may take several lines; `indents`: all of them but the first are
    indented; `most`: characters, of which a longer cell has the first and an ellipsis."""

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

    columns: Sequence[Column]
    rows: Sequence[TextRow]
    gap: int = 3


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, gap: int = 3) -> TextTable:
    """A table whose first columns have words, which stand left; its others have numbers, which stand right."""
    columns = [Column(head, right=i >= words, wraps=i < words) for i, head in enumerate(heads)]
    return TextTable(columns, [TextRow(tuple(row)) for row in rows], gap)


def words_table(rows: Iterable[tuple[str, str]]) -> TextTable:
    """Names, and what there is to say about each."""
    return TextTable((Column(style="dim"), Column(wraps=True)), [TextRow(row) for row in rows], gap=2)


class Terminal(Struct, frozen=True):
    """Where a person reads: its width in characters, and whether it shows styles. `file` None: standard output."""

    width: int = USUAL_WIDTH
    styled: bool = False
    file: TextIO | None = None

    def print(self, text: str = "", style: str = "", whole: bool = False) -> None:
        """Text in as many lines as it needs; `whole`: in its own lines, such as a command that will be copied."""
        for part in text.split("\n"):
            for line in [part] if whole else _wrapped(part, self.width):
                self._write([Span(line, style)])

    def print_table(self, table: TextTable) -> None:
        """A table no wider than the terminal."""
        widths = _widths(table, self.width)
        heads = TextRow(tuple(column.head for column in table.columns), "dim")
        if widths is None:
            for line in _stacked(table, self.width):
                self._write(line)
            return
        if any(heads.cells):
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


def standard_output(piped_width: int | None = None) -> Terminal:
    """Standard output as it is, and as NO_COLOR (no-color.org), FORCE_COLOR, COLUMNS and TERM want it.

    piped_width: characters in a line where it is no terminal; None: as on whichever standard stream is one.
    """
    asked = os.environ.get
    refused = asked("NO_COLOR") or asked("TERM") in ("dumb", "unknown")
    # Older consoles of Windows print escape codes as they are.
    shows = sys.stdout.isatty() and (os.name != "nt" or asked("WT_SESSION") is not None)
    return Terminal(_columns(piped_width), not refused and bool(shows or asked("FORCE_COLOR")))


def _columns(piped_width: int | None) -> int:
    """Characters in a line of whichever standard stream is a terminal: a pager shows the lines on that, too."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdigit() and int(stated):
        return int(stated)
    if piped_width is not None and not sys.stdout.isatty():
        return piped_width
    for stream in range(3):
        try:
            return os.get_terminal_size(stream).columns or USUAL_WIDTH
        except OSError:
            continue
    return USUAL_WIDTH


def _wrapped(text: str, width: int) -> list[str]:
    """Text in lines of whole words, a word that is longer than a line cut; a number keeps its unit.

    >>> _wrapped("a step of 2 seconds", 11)
    ['a step of', '2 seconds']
    """
    if columns_of(text) <= width and text.isprintable():
        return [text]
    lines = [""]
    for word in _with_units(text.split(), width):
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


def _with_units(words: Sequence[str], width: int) -> list[str]:
    """Words, a number and the unit after it as one where they fit into a line.

    >>> _with_units(["90", "%", "of", "2", "steps"], 4)
    ['90 %', 'of', '2', 'steps']
    """
    out: list[str] = []
    for word in words:
        is_unit = bool(out) and out[-1][-1].isdigit() and (word[0].isalpha() or word[0] == "%")
        if is_unit and columns_of(f"{out[-1]} {word}") <= width:
            out[-1] += f" {word}"
        else:
            out.append(word)
    return out


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


def _widths(table: TextTable, most: int) -> list[int] | None:
    """Characters of each column: as many as it needs; where that is too many, those that wrap lose some. None where
    words would become hard to read."""
    columns = table.columns
    texts = [[column.head, *(row.cells[i] for row in table.rows)] for i, column in enumerate(columns)]
    widths = [max(map(columns_of, cells)) for cells in texts]
    widths = [min(width, column.most or width) for width, column in zip(widths, columns, strict=True)]
    least = [
        _least(cells, width) if column.wraps else width
        for cells, width, column in zip(texts, widths, columns, strict=True)
    ]
    over = sum(widths) + table.gap * (len(columns) - 1) - most
    while over > 0:
        wide = max(range(len(widths)), key=lambda i: widths[i] * (widths[i] > least[i]))
        if widths[wide] <= least[wide]:
            return None
        widths[wide] -= 1
        over -= 1
    return widths


def _least(cells: Sequence[Cell], width: int) -> int:
    """Characters that a column keeps: its longest word's, and either half of its longest text's or enough to read."""
    if any(not isinstance(cell, str) for cell in cells):  # bars, below a head of several words
        return max(columns_of(cell) for cell in cells if not isinstance(cell, str))
    words = (word for cell in cells if isinstance(cell, str) for word in cell.split())
    longest = min(LONGEST_WORD, max(map(columns_of, words), default=0))
    return min(width, max(longest, min(READABLE, (width + 1) // 2)))


def _stacked(table: TextTable, width: int) -> Iterator[Line]:
    """A table whose columns have no room side by side: below a row's first cell its others, with their heads."""
    bars = [any(not isinstance(row.cells[i], str) for row in table.rows) for i in range(len(table.columns))]
    heads = [column.head for column in table.columns]
    above = [head for i, head in enumerate(heads) if head and (i == 0 or bars[i])]
    yield from ([Span(line, "dim")] for head in above for line in _wrapped(head, width))
    if any(heads):
        yield [Span("─" * width)]
    for row in table.rows:
        line: tuple[Span, ...] = ()
        for i, (cell, column) in enumerate(zip(row.cells, table.columns, strict=True)):
            if not cell:
                continue
            named = (Span(f"{heads[i]} ", "dim"),) if heads[i] and i > 0 and not bars[i] else ()
            style = row.style or column.style
            part = (*named, *((Span(cell, style),) if isinstance(cell, str) else cell))
            if line and columns_of(line) + BETWEEN + columns_of(part) <= width:
                line += (Span(" " * BETWEEN), *part)
                continue
            indent = (Span(" " * INDENT),) if i > 0 else ()
            yield from [line] if line else ()
            *full, line = _flowed(part, width - columns_of(indent))
            yield from (indent + each for each in full)
            line = indent + line
        yield from [line] if line else ()


def _flowed(spans: tuple[Span, ...], width: int) -> list[tuple[Span, ...]]:
    """Styled text in lines; where it needs several, they have the last span's style."""
    if columns_of(spans) <= width:
        return [spans]
    return [(Span(line, spans[-1].style),) for line in _wrapped("".join(span.text for span in spans), width)]


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
        return [cell]
    if column.wraps:
        first, *rest = _wrapped(cell, width)
        # Of rows of one or two lines, an indent tells which line begins a row.
        further = _wrapped(" ".join(rest), width - INDENT) if rest and column.indents else rest
        indent = " " * INDENT * column.indents
        return [[Span(first)], *([Span(indent + line)] for line in further)]
    return [[Span(cell if columns_of(cell) <= width else f"{_beginning(cell, width - 1)}…")]]
