"""`python -m sim.validate TABLE.json …`: predict what others measured, and say how far off.

Every row is predicted, or listed with the reason: `failed` are rows that the simulator should know and refused,
`not_simulated` operators it has no use for and fitted parameters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sim.command import bad_input_exits, run_main, write_json
from sim.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.overrides import with_overrides
from sim.published.predict import predict, quantity
from sim.published.prediction import NotSimulated
from sim.published.statistics import Error
from sim.published.tables import Row, Table, read_table
from sim.published.validation import Outcome, Validation

MARK = "<!-- written by sim.validate --markdown -->"
CHUNK = 12  # rows a process takes at a time


def validate_tables(
    tables: Sequence[Table], calibration: str | None = None, jobs: int | None = None, progress: bool = False
) -> list[Validation]:
    """Predict every row, in `jobs` processes (as many as there are cores, unless the work is small).

    `calibration` takes the place of the profiles that the tables name.
    """
    work = [(i, row, calibration) for i, table in enumerate(tables) for row in table.rows]
    jobs = jobs or min(8, os.cpu_count() or 1)
    done: list[list[Outcome]] = [[] for _ in tables]
    for outcome in _progress(_outcomes(work, jobs), len(work), progress):
        done[outcome.table].append(outcome)
    return [Validation(table, tuple(found)) for table, found in zip(tables, done, strict=True)]


def _outcomes(work: Sequence[tuple[int, Row, str | None]], jobs: int) -> Iterator[Outcome]:
    if jobs == 1 or len(work) < 2 * CHUNK:
        yield from map(_outcome, work)
        return
    from concurrent.futures import ProcessPoolExecutor

    from sim.layout.executors import stay_with

    with ProcessPoolExecutor(jobs, initializer=stay_with, initargs=(os.getpid(),)) as pool:
        yield from pool.map(_outcome, work, chunksize=CHUNK)


def _outcome(job: tuple[int, Row, str | None]) -> Outcome:
    index, row, calibration = job
    if not row.measured:
        return Outcome(index, row.id, (), False, "nothing measured: a fitted parameter or a formula's value")
    try:
        found = predict(row, calibration)
    except NotSimulated as reason:
        return Outcome(index, row.id, (), False, str(reason))
    except InputError as error:
        return Outcome(index, row.id, (), True, str(error))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:  # a row that lacks what its operator needs
        return Outcome(index, row.id, (), True, f"{type(error).__name__}: {error}")
    errors = tuple(
        Error(row.id, row.group, quantity(key), found[key].value, row.measured[key], found[key].low, found[key].high)
        for key in row.measured
        if key in found
    )
    return Outcome(index, row.id, errors, missing=tuple(key for key in row.measured if key not in found))


def _progress(outcomes: Iterator[Outcome], count: int, shown: bool) -> Iterator[Outcome]:
    if not shown:
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(outcomes, "predicting", total=count, console=Console(file=sys.stderr), transient=True)


def main(
    tables: Annotated[list[Path], typer.Argument(help="tables of published measurements", metavar="TABLE.json …")],
    json: Annotated[
        str | None, typer.Option(help="write all errors as JSON; - for standard output", metavar="FILE|-")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with scatter plots", metavar="FILE")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the same as Markdown", metavar="FILE")] = None,
    limit: Annotated[int | None, typer.Option(help="only the first N rows of each table", min=1, metavar="N")] = None,
    calibration: Annotated[str | None, typer.Option(help="a profile in place of those that tables name")] = None,
    jobs: Annotated[int | None, typer.Option(help="processes", min=1, max=256)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="override a key of every row's scenario", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Predict every row of TABLE.json … and print the errors per table and group."""
    with bad_input_exits():
        read = [_changed(read_table(path, limit), set_ or ()) for path in tables]
        if calibration is not None:
            from sim.prices.profiles import load_profile

            load_profile(calibration, "--calibration")
        done = validate_tables(read, calibration, jobs, progress=sys.stderr.isatty())
        _write(done, json, html, markdown)


def _changed(table: Table, overrides: Sequence[str]) -> Table:
    """The table with `KEY=VALUE` put over every row's scenario: what an assumption of it is worth."""
    rows = [
        replace(row, scenario=with_overrides(Source(row.id, dict(row.scenario)), overrides).data) for row in table.rows
    ]
    return replace(table, rows=tuple(rows)) if overrides else table


def _write(done: list[Validation], json: str | None, html: Path | None, markdown: Path | None) -> None:
    from sim.files import write_text

    tables = [v.as_dict() for v in done]
    data = {"format": "sim-validate/1", "tables": tables}
    if html is not None:
        from sim.views.accuracy_page import accuracy_page

        write_text(html, accuracy_page(done))
    if markdown is not None:
        from sim.views.accuracy_page import accuracy_markdown

        write_text(markdown, _kept(markdown) + accuracy_markdown(done))
    if json is not None:
        write_json(json, data)
    if json != "-":
        from sim.views.accuracy_summary import print_accuracy

        print_accuracy(tables)


def _kept(path: Path) -> str:
    """What stands above the mark in a file that is written again: the words that no command knows."""
    if not path.is_file():
        return ""
    head, found, _ = path.read_text(encoding="utf-8").partition(MARK)
    return f"{head}{MARK}\n\n" if found else ""


if __name__ == "__main__":
    run_main(main)
