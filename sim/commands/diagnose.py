"""`python -m sim.diagnose TRACE...`: which recorded rank is slow, who waits for it, and what its repair would gain.

TRACE: PyTorch profiler (Kineto) JSON, one file a rank, Chakra execution traces, or SQLite exports of Nsight Systems.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.command import Command
from sim.commands.files_named import FILE
from sim.commands.options import Report, gathered, json_option
from sim.core.units import counted

if TYPE_CHECKING:
    from sim.traces.diagnosis import Diagnosis, Waiting
    from sim.traces.recording import Recording

NO_TIMES = (
    "is a captured program, which has no recorded times; `stepsim replay` simulates one, and its --straggler slows "
    "a rank"
)
RANKS_SHOWN, WAITS_SHOWN, NAME = 5, 5, 60


@click.command("diagnose", cls=Command)
@click.argument("traces", type=FILE, nargs=-1, required=True, metavar="TRACE...")
@click.option("--groups", type=FILE, metavar="FILE", help="Chakra: ASTRA-sim's communicator groups")
@click.option("--step", type=click.IntRange(0), metavar="N", help="profiler step; by default the one of median length")
@gathered(Report, "report", json_option)
def main(traces: tuple[Path, ...], groups: Path | None, step: int | None, report: Report) -> None:
    """Find the slow rank in recorded traces of several ranks: who waits for it, what its repair would gain, and the
    operators behind it."""
    from sim.core.errors import InputError
    from sim.traces.diagnosis import as_json, diagnose
    from sim.traces.reading import are_programs, load

    if are_programs(traces):
        raise InputError(f"{traces[0]}: {NO_TIMES}")
    recording = load(traces, step, groups)
    found = diagnose(recording)
    report.show(as_json(found, recording), None, lambda _: _print(found, recording))


def _print(found: Diagnosis, recording: Recording) -> None:
    from sim.core.units import n_bytes, percent, seconds
    from sim.traces.diagnosis import verdict

    ranks = f"{len(recording.ranks)} of {counted(recording.world_size, 'rank')}"
    print(f"{recording.name}: {ranks}, step {seconds(found.step_s)}")
    print(f"{verdict(found)}\n")
    for row in found.slow_ranks[:RANKS_SHOWN]:
        more = f"{percent(row.compute_s / row.peers_s - 1)} longer than its peers" if row.peers_s else "alone"
        print(f"rank {row.rank} computes {seconds(row.compute_s)}, {more}")
        print(f"  repaired: step {seconds(row.repaired_step_s)}, {_gain(row.gain_s, found)}")
        for operator in row.operators:
            name = operator.operator if len(operator.operator) <= NAME else operator.operator[: NAME - 1] + "…"
            often = "" if operator.peers_count == operator.count else f"{operator.peers_count:g}× "
            print(
                f"  {name:{NAME}} {operator.count:5}× {seconds(operator.seconds):>10}, "
                f"peers {often}{seconds(operator.peers_s)}"
            )
    for group in found.slow_groups[:RANKS_SHOWN]:
        ranks = ", ".join(map(str, group.ranks))
        print(
            f"ranks {ranks}: {group.kind} of {n_bytes(group.bytes)} takes {seconds(group.seconds)}, "
            f"in other groups {seconds(group.peers_s)}"
        )
        print(f"  repaired: step {seconds(group.repaired_step_s)}, {_gain(group.gain_s, found)}")
    for uneven in found.uneven_data[:RANKS_SHOWN]:
        print(
            f"rank {uneven.rank}: kernels with inputs {uneven.inputs:.2f} times as large take "
            f"{seconds(uneven.compute_s)}, its peers' {seconds(uneven.peers_s)}"
        )
        print(f"  with even data: step {seconds(uneven.even_step_s)}, {_gain(uneven.gain_s, found)}")
    for late, (total_s, longest) in _waited_for(found).items():
        print(
            f"for rank {late} the others wait {seconds(total_s)} in all; "
            f"longest rank {longest.rank}, {seconds(longest.seconds)}"
        )
    for host in found.busy_hosts[:RANKS_SHOWN]:
        print(
            f"rank {host.rank}: its host works alone for {seconds(host.host_s)}, others' for {seconds(host.peers_s)}"
            " (data loading, Python, garbage collection); not repaired here"
        )
    for warning in recording.warnings:
        print(f"note: {warning}")


def _waited_for(found: Diagnosis) -> dict[int, tuple[float, Waiting]]:
    """Ranks that others wait for: seconds in all, and who waits longest; most first."""
    total: dict[int, float] = {}
    longest: dict[int, Waiting] = {}
    for wait in found.waits:  # most seconds first
        total[wait.for_rank] = total.get(wait.for_rank, 0.0) + wait.seconds
        longest.setdefault(wait.for_rank, wait)
    most = sorted(total, key=lambda rank: -total[rank])[:WAITS_SHOWN]
    return {rank: (total[rank], longest[rank]) for rank in most}


def _gain(gain_s: float, found: Diagnosis) -> str:
    from sim.core.units import percent, seconds

    if gain_s <= 0:
        return "which gains nothing"
    return f"a gain of {seconds(gain_s)} ({percent(gain_s / found.replayed_step_s)})"
