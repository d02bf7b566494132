"""`python -m sim.validate TABLE.json …`: predict what others measured, and say how far off.

Every row is predicted, or listed with the reason: `failed` are rows that the simulator should know and refused,
`not_simulated` operators it has no use for and fitted parameters. `not_believed` are rows predicted without a
batch limit that their table's own figures disprove (`sim.validation.running_requests`). `not_fitting` are training
rows that ran, although their predicted peak is more than the GPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from sim.commands.command import Command
from sim.commands.files_named import FILE, OUTPUT
from sim.commands.options import Report, report_options
from sim.core.errors import InputError
from sim.core.executors import local_workers, results, tracked
from sim.core.files import write_text
from sim.inputs.input_source import Source
from sim.inputs.overrides import with_overrides
from sim.validation.predict import predict, quantity
from sim.validation.prediction import NotSimulated, meant
from sim.validation.records import Measurement, Table
from sim.validation.report import Outcome, Validation
from sim.validation.statistics import Error, Verdict
from sim.validation.tables import read_table, unread_keys

MARK = "<!-- written by sim.validate --markdown -->"
CHUNK = 12  # rows a process takes at a time


def validate_tables(
    tables: Sequence[Table], calibration: str | None = None, jobs: int | None = None, programs: Path | None = None
) -> list[Validation]:
    """Predict every row, in `jobs` processes (as many as there are cores, unless the work is small).

    `calibration` takes the place of the profiles that the tables name. Rows that carry `program` are predicted from
    their captured ones in the folder `programs`, if one is given.
    """
    work = [(i, row, calibration, programs) for i, table in enumerate(tables) for row in table.rows]
    chunks = [(work[first : first + CHUNK],) for first in range(0, len(work), CHUNK)]
    jobs = 1 if len(work) < 2 * CHUNK else jobs or min(8, os.cpu_count() or 1)
    done: list[list[Outcome]] = [[] for _ in tables]
    with local_workers(jobs, start=None) as workers:
        outcomes = chain.from_iterable(results(workers, _chunk, chunks))
        for outcome in tracked(outcomes, "predicting", len(work)):
            done[outcome.table].append(outcome)
    return [Validation(table, tuple(found)) for table, found in zip(tables, done, strict=True)]


Job = tuple[int, Measurement, "str | None", "Path | None"]


def _chunk(work: Sequence[Job]) -> list[Outcome]:
    return [_outcome(job) for job in work]


def _outcome(job: Job) -> Outcome:
    index, row, calibration, programs = job
    if row.unreadable:
        return Outcome(index, row.id, (), True, row.unreadable)
    if not row.measured and not row.answers:
        return Outcome(index, row.id, (), False, "nothing measured: a fitted parameter or a formula's value")
    try:
        found, answers, known, fits = predict(row, calibration, programs)
    except NotSimulated as reason:
        return Outcome(index, row.id, (), False, str(reason))
    except InputError as error:
        return Outcome(index, row.id, (), True, str(error))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:  # a row that lacks what its operator needs
        return Outcome(index, row.id, (), True, f"{type(error).__name__}: {error}")
    errors = tuple(
        Error(
            row.id, row.group, quantity(key), key, found[key].value, row.measured[key], found[key].low, found[key].high
        )
        for key in row.measured
        if key in found
    )
    verdicts = tuple(
        Verdict(row.id, row.group, key, answers[key], said) for key, said in row.answers.items() if key in answers
    )
    missing = tuple(key for key in (*row.measured, *row.answers) if key not in found and key not in answers)
    like = {key: said for key in missing if (said := meant(key, known))}
    if not errors and not verdicts:
        question = next(iter(like.values()), "")
        return Outcome(index, row.id, (), False, f"nothing predicts {', '.join(missing)}{question}")
    too_large = not fits and "fits_in_memory" not in row.answers
    found_out = Outcome(index, row.id, errors, missing=missing, meant=like, verdicts=verdicts, too_large=too_large)
    return replace(found_out, unread=unread_keys(row.data))


@click.command("validate", cls=Command)
@click.argument("tables", type=FILE, nargs=-1, required=True, metavar="TABLE.json …")
@click.option("--markdown", type=OUTPUT, metavar="FILE", help="write the tables as Markdown")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="only the first N rows of each table")
@click.option("--calibration", metavar="NAME", help="a profile in place of the tables' own")
@click.option(
    "--programs",
    type=FILE,
    metavar="FOLDER",
    help="predict rows that have `program` from captured programs FOLDER/ROW_ID.json.gz",
)
@click.option("--jobs", type=click.IntRange(1, 256), metavar="N", help="number of processes")
@report_options
def main(
    tables: tuple[Path, ...],
    markdown: Path | None,
    limit: int | None,
    calibration: str | None,
    programs: Path | None,
    jobs: int | None,
    report: Report,
) -> None:
    """Predict every row of TABLE.json … and print the errors per table and group."""
    from sim.views.accuracy_page import accuracy_markdown, accuracy_page
    from sim.views.accuracy_summary import print_accuracy

    read = [_changed(read_table(path, limit), report.overrides) for path in tables]
    if calibration is not None:
        from sim.prices.profiles import load_profile

        load_profile(calibration, "--calibration")
    if programs is not None and not programs.is_dir():
        raise InputError(f"--programs: {programs} is not a folder; python -m calibrate.capture --table writes one")
    kept = "" if markdown is None else _kept(markdown)
    done = validate_tables(read, calibration, jobs, programs)
    if markdown is not None:
        write_text(markdown, kept + accuracy_markdown(done))
    result: dict[str, Any] = {"format": "sim-validate/1", "tables": [v.as_dict() for v in done]}
    for words in chain.from_iterable((*v.mistyped, *v.not_read) for v in done):
        click.echo(f"warning: {words}", err=True)
    report.show(result, lambda _: accuracy_page(done), lambda found: print_accuracy(found["tables"]))


def _changed(table: Table, overrides: Sequence[str]) -> Table:
    """The table with `KEY=VALUE` put over every row's scenario: what an assumption of it is worth."""
    rows = [
        replace(row, scenario=with_overrides(Source(row.id, dict(row.scenario)), overrides).data) for row in table.rows
    ]
    return replace(table, rows=tuple(rows)) if overrides else table


def _kept(path: Path) -> str:
    """Return the text above the mark in a file that is about to be written again: people wrote it, no command does.

    Raises:
        InputError: if there is such a file and it is no text.
    """
    if not path.is_file():
        return ""
    try:
        head, found, _ = path.read_text(encoding="utf-8").partition(MARK)
    except UnicodeDecodeError:
        raise InputError(f"--markdown: {path} is there and is not UTF-8 text; it would be overwritten") from None
    except OSError as error:
        raise InputError(f"--markdown: {path}: cannot be read: {error.strerror}") from None
    return f"{head}{MARK}\n\n" if found else ""
