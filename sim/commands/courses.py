"""`python -m sim.courses [ROW]`: what the lecture decks say, row by row, and the command that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sim.commands.command import Command
from sim.commands.options import json_option
from sim.core.errors import InputError
from sim.core.files import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.commands.course_rows import CourseRow


@click.command("courses", cls=Command)
@click.argument("row", type=int, required=False, metavar="[ROW]")
@json_option
def main(row: int | None, json: str | None) -> None:
    """List what the lecture decks say; of one ROW, run its command and show its figures. --json runs all rows."""
    from sim.commands.course_rows import rows, shown
    from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

    every = list(rows())
    wanted = every if row is None else [one for one in every if one.row == row]
    if not wanted:
        raise InputError(f"ROW: found {row}; allowed: {every[0].row} to {every[-1].row}")
    if row is None and json is None:
        lines = ((str(one.row), one.lines.partition(";")[0], one.statement) for one in every)
        return standard_output(PIPED_WIDTH).print_table(plain_table(("row", "deck", "says"), lines, words=3, gap=2))
    numbers = [(one, shown(one)) for one in wanted]
    if json is not None:
        write_json(json, {"rows": [one.to_json(found) for one, found in numbers]}, indent=1)
    if json != "-":
        for one, found in numbers:
            _print(one, found)


def _print(row: CourseRow, shown: Sequence[float | None]) -> None:
    """A row: statement, place, command, figures."""
    from sim.views.terminal import plain_table, standard_output

    terminal = standard_output()
    terminal.print(f"{row.row}. {row.statement} ({row.lines})\n", "bold")
    terminal.print(f"  {row.command}", whole=True)
    if row.command.startswith("stepsim ") and "--html" not in row.command:
        terminal.print("  with --html FILE: its picture")
    figures = [
        (f.name, f"{f.said:,.4g}", f"{100 * f.tolerance:.3g} %", "-" if n is None else f"{n:,.4g}", f.verdict(n))
        for f, n in zip(row.figures, shown, strict=True)
    ]
    if figures:
        terminal.print()
        terminal.print_table(plain_table(("figure", "said", "within", "shown", ""), figures, gap=2))
    for figure in row.figures:
        if figure.why:
            terminal.print(f"{figure.name}: {figure.why}", "dim")
    if row.note:
        terminal.print(f"\n{row.note}")
