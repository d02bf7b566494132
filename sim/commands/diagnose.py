"""`python -m sim.diagnose TRACE...`: which recorded rank is slow, who waits for it, and what its repair would gain.

TRACE: PyTorch profiler (Kineto) JSON, one file a rank, Chakra execution traces, or SQLite exports of Nsight Systems.
"""

from __future__ import annotations

from pathlib import Path

import click

from sim.commands.command import Command
from sim.commands.files_named import FILE
from sim.commands.options import Report, gathered, json_option, page_option

NO_TIMES = (
    "is a captured program, which has no recorded times; `stepsim replay` simulates one, and its --straggler slows "
    "a rank"
)


@click.command("diagnose", cls=Command)
@click.argument("traces", type=FILE, nargs=-1, required=True, metavar="TRACE...")
@click.option("--groups", type=FILE, metavar="FILE", help="Chakra: ASTRA-sim's communicator groups")
@click.option("--step", type=click.IntRange(0), metavar="N", help="profiler step; by default the one of median length")
@gathered(Report, "report", json_option, page_option)
def main(traces: tuple[Path, ...], groups: Path | None, step: int | None, report: Report) -> None:
    """Find the slow rank in recorded traces of several ranks: who waits for it, what its repair would gain, and the
    operators behind it."""
    from sim.core.errors import InputError
    from sim.traces.diagnosis import as_json, diagnose
    from sim.traces.reading import are_programs, load
    from sim.views.diagnosis import diagnosis_page, print_diagnosis

    if are_programs(traces):
        raise InputError(f"{traces[0]}: {NO_TIMES}")
    recording = load(traces, step, groups)
    found = diagnose(recording)
    report.show(
        as_json(found, recording),
        lambda _: diagnosis_page(found, recording),
        lambda _: print_diagnosis(found, recording),
    )
