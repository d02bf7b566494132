"""Check the files that options name: inputs and outputs, of which no two may be one file."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from sim.core.errors import InputError
from sim.core.outputs import Output

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
        """Return the text as a number."""
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            self.fail(f"found '{str(value)[:40]}'; must be a number", param, ctx)
        if not finite:
            self.fail(f"found {value}; must be a finite number", param, ctx)
        return float(super().convert(value, param, ctx))


class OutputSeries(OutputFile):
    """The common beginning of the names of several files to write; `rest`: what follows it, as a regular expression."""

    def __init__(self, rest: str) -> None:
        super().__init__()
        self.rest = rest


OUTPUT, JSON_OUTPUT = OutputFile(), OutputFile(standard_output=True)


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before a long measurement rather than after it.

    Raises:
        InputError: for a folder, or a file in a folder that is missing or cannot be written to.
    """
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder; allowed: a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option}: found {path}; {folder} is not a folder that can be written to")


def outputs_of(ctx: click.Context) -> list[Output]:
    """The options that name files to write, with the names of these files.

    Raises:
        InputError: where two of them are one file.
    """
    out, plain = list[Output](), list[tuple[str, str]]()
    for parameter in ctx.command.params:
        if isinstance(parameter.type, OutputFile):
            rest = parameter.type.rest if isinstance(parameter.type, OutputSeries) else ""
            path = _real_name(ctx.params.get(parameter.name or ""), bool(rest))
            if path is not None:
                out.append((parameter.opts[0], re.compile(re.escape(path) + rest)))
                plain += [] if rest else [(parameter.opts[0], path)]
    for option, path in plain:
        other = next((name for name, names in out if name != option and names.fullmatch(path)), None)
        if other is not None:
            raise InputError(f"{option}: is a file of {other} too; it would be overwritten")
    return out


def _real_name(name: object, several: bool) -> str | None:
    """A file's name, links followed; None for pipes and devices, which may be written by several."""
    if name is None or str(name) == STANDARD_OUTPUT:
        return None
    try:
        is_file = several or os.path.isfile(str(name)) or not os.path.exists(str(name))
        return os.path.realpath(str(name)) if is_file else None
    except (OSError, ValueError):  # no name that a file can have: whoever opens it says so
        return None
