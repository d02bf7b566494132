"""Files that options name: those to read, those to write, and that no two of a command are one file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from sim.core.errors import InputError

FILE = click.Path(path_type=Path)
STANDARD_OUTPUT = "-"


class OutputFile(click.Path):
    """A file to write; `-` is standard output for `--json` alone, since two of them there could not be told apart."""

    def __init__(self, standard_output: bool = False) -> None:
        super().__init__(path_type=str if standard_output else Path)
        self.standard_output = standard_output

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; text where it may be standard output."""
        if str(value) == "":
            self.fail("found ''; must be the name of a file to write", param, ctx)
        if str(value) == STANDARD_OUTPUT and not self.standard_output:
            self.fail("found '-'; only --json writes to standard output", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds, and neither NaN nor infinite, which click lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As a number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"found {value}; must be a finite number", param, ctx)
        return number


OUTPUT, JSON_OUTPUT = OutputFile(), OutputFile(standard_output=True)


def refuse_one_file_twice(ctx: click.Context) -> None:
    """Raise where a command would write a file that it also reads, or write one twice.

    Raises:
        InputError: naming both.
    """
    read = {path: name for name, path, out in _named(ctx) if not out}
    written = dict[Path, str]()
    for name, path, out in _named(ctx):
        if out:
            other = read.get(path, written.get(path))
            if other is not None:
                raise InputError(f"{name}: is the file of {other} too; it would be overwritten")
            written[path] = name


def _named(ctx: click.Context) -> Iterator[tuple[str, Path, bool]]:
    """Options and arguments that name files, with the file, and whether it is written."""
    for parameter in ctx.command.params:
        if isinstance(parameter.type, click.Path):
            value = ctx.params.get(parameter.name or "")
            name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.make_metavar(ctx)
            for each in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
                path = _plain_file(each)
                if path is not None:
                    yield name, path, isinstance(parameter.type, OutputFile)


def _plain_file(name: object) -> Path | None:
    """The file of a name, links followed; None for pipes and devices, which may be written by several."""
    if name is None or str(name) == STANDARD_OUTPUT:
        return None
    try:
        path = Path(os.path.realpath(str(name)))
        return path if path.is_file() or not path.exists() else None
    except (OSError, ValueError):  # no name that a file can have: whoever opens it says so
        return None
