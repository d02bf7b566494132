"""What slows a recorded step, as tables for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.core.units import counted, n_bytes, percent, seconds
from sim.traces.diagnosis import Diagnosis, SlowRank, Waiting, verdict
from sim.traces.recording import Recording
from sim.views.difference import Cell, Rows
from sim.views.headline import Number
from sim.views.terminal import PIPED_WIDTH, plain_table, standard_output

RANKS_SHOWN = 5


def tables(found: Diagnosis) -> list[Rows]:
    """All tables that have rows, the largest gain first."""
    rank_rows = [
        (*_of_rank(row.rank), _time(row.compute_s), _time(row.peers_s), *_repaired(row.repaired_step_s, found))
        for row in found.slow_ranks[:RANKS_SHOWN]
    ]
    group_rows = [
        (
            _words(", ".join(map(str, row.ranks))),
            _words(f"{row.kind} of {n_bytes(row.bytes)}"),
            _time(row.seconds),
            _time(row.peers_s),
            *_repaired(row.repaired_step_s, found),
        )
        for row in found.slow_groups[:RANKS_SHOWN]
    ]
    uneven = [
        (
            *_of_rank(row.rank),
            Cell(row.inputs, f"{row.inputs:.2f} ×"),
            _time(row.compute_s),
            _time(row.peers_s),
            *_repaired(row.even_step_s, found),
        )
        for row in found.uneven_data[:RANKS_SHOWN]
    ]
    waited = [
        (*_of_rank(late), _time(total_s), *_of_rank(longest.rank), _time(longest.seconds))
        for late, (total_s, longest) in _waited_for(found.waits).items()
    ]
    hosts = [(*_of_rank(row.rank), _time(row.host_s), _time(row.peers_s)) for row in found.busy_hosts[:RANKS_SHOWN]]
    repaired = ("step if repaired", "gain")
    every = [
        Rows("Slow ranks", ("slow rank", "computes", "its peers", *repaired), rank_rows),
        *(_operators(row) for row in found.slow_ranks[:RANKS_SHOWN]),
        Rows("Slow groups", ("group of ranks", "transfer", "takes", "in other groups", *repaired), group_rows),
        Rows(
            "More data",
            ("rank with more data", "inputs", "their kernels", "its peers'", "step with even data", "gain"),
            uneven,
        ),
        Rows("Waiting", ("waited for", "by all others", "longest by", "seconds"), waited),
        Rows("Hosts that work alone (data loading, Python); not repaired here", ("host of", "alone", "others'"), hosts),
    ]
    return [table for table in every if table.rows]


def print_diagnosis(found: Diagnosis, recording: Recording) -> None:
    """Verdict and tables, on standard output."""
    terminal = standard_output(PIPED_WIDTH)
    terminal.print(f"{recording.name}: {_line(found, recording)}")
    terminal.print(verdict(found), "bold")
    for table in tables(found):
        terminal.print()
        rows = ([cell.shown for cell in row] for row in table.rows)
        terminal.print_table(plain_table(table.head, rows, gap=2))
    for warning in recording.warnings:
        terminal.print(f"note: {warning}")


def diagnosis_page(found: Diagnosis, recording: Recording) -> str:
    """HTML of a page that opens without network."""
    from sim.views.page import still_page

    first = found.slow_ranks[:1]
    return still_page(
        "difference.html",
        f"{recording.name}: {verdict(found)}",
        {},
        line=_line(found, recording),
        headline=[
            Number("Recorded step", seconds(found.step_s)),
            Number("Replayed unchanged", seconds(found.replayed_step_s)),
            *(
                Number(f"With rank {row.rank} repaired", seconds(row.repaired_step_s), _gain_words(row.gain_s, found))
                for row in first
            ),
        ],
        warnings=recording.warnings,
        tables=tables(found),
    )


def _line(found: Diagnosis, recording: Recording) -> str:
    ranks = f"{len(recording.ranks)} of {counted(recording.world_size, 'rank')}"
    return f"{ranks}, step {seconds(found.step_s)}"


def _operators(row: SlowRank) -> Rows:
    head = (f"operator of rank {row.rank}", "times", "takes", "peers' times", "its peers")
    rows = [
        (
            _words(operator.operator),
            Cell(operator.count, f"{operator.count:,}"),
            _time(operator.seconds),
            Cell(operator.peers_count, f"{operator.peers_count:g}"),
            _time(operator.peers_s),
        )
        for operator in row.operators
    ]
    return Rows(f"Operators of rank {row.rank} that take longer than its peers'", head, rows)


def _waited_for(waits: Iterable[Waiting]) -> dict[int, tuple[float, Waiting]]:
    """Ranks that others wait for: seconds in all, and who waits longest; most first."""
    total: dict[int, float] = {}
    longest: dict[int, Waiting] = {}
    for wait in waits:  # most seconds first
        total[wait.for_rank] = total.get(wait.for_rank, 0.0) + wait.seconds
        longest.setdefault(wait.for_rank, wait)
    most = sorted(total, key=lambda rank: -total[rank])[:RANKS_SHOWN]
    return {rank: (total[rank], longest[rank]) for rank in most}


def _words(text: str) -> Cell:
    return Cell(text, text)


def _time(time_s: float) -> Cell:
    return Cell(time_s, seconds(time_s))


def _of_rank(rank: int) -> Sequence[Cell]:
    return (Cell(rank, f"rank {rank}"),)


def _repaired(step_s: float, found: Diagnosis) -> tuple[Cell, Cell]:
    gain_s = found.replayed_step_s - step_s
    return _time(step_s), Cell(gain_s, _gain_words(gain_s, found))


def _gain_words(gain_s: float, found: Diagnosis) -> str:
    return "nothing" if gain_s <= 0 else f"{seconds(gain_s)}, {percent(gain_s / found.replayed_step_s)}"
