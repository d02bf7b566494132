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

    every = list(rows())
    wanted = every if row is None else [one for one in every if one.row == row]
    if not wanted:
        raise InputError(f"ROW: found {row}; allowed: {every[0].row} to {every[-1].row}")
    if row is None and json is None:
        for one in every:
            click.echo(f"{one.row:>3}  {one.lines.partition(';')[0]:14} {one.statement}")
        return
    numbers = [(one, shown(one)) for one in wanted]
    if json is not None:
        write_json(json, {"rows": [one.to_json(found) for one, found in numbers]}, indent=1)
    if json != "-":
        for one, found in numbers:
            _print(one, found)


def _print(row: CourseRow, shown: Sequence[float | None]) -> None:
    """A row in lines: statement, place, command, figures."""
    click.echo(f"{row.row}. {row.statement} ({row.lines})\n\n  {row.command}")
    if row.command.startswith("stepsim ") and "--html" not in row.command:
        click.echo("  with --html FILE: its picture")
    for figure, number in zip(row.figures, shown, strict=True):
        said = f"said {figure.said:,.4g}, within {100 * figure.tolerance:.3g} %"
        click.echo(f"  {figure.name}: {said}; shown {'-' if number is None else f'{number:,.4g}'}")
    if row.note:
        click.echo(f"\n  {row.note}")
