"""Write the standalone page of a replay: replayed rows above recorded ones on one axis, and each rank's seconds."""

from __future__ import annotations

from typing import Any

from sim.core.timeline import Timeline
from sim.core.units import change_percent, count, counted, n_bytes, percent, seconds
from sim.traces.replay import TIMES
from sim.traces.replayed import ReplayedRank, ReplayResult, Transfers
from sim.views.headline import Number
from sim.views.page import page, view_data
from sim.views.rows import Track, kinds_of


def replay_page(result: ReplayResult, replayed: Timeline, recorded: Timeline) -> str:
    """Return the HTML of a page that opens without network."""
    from sim.views.figures import NEAR_MOST, timeline_figure

    timelines = [replayed, recorded]
    chart, layout = timeline_figure(timelines, _tracks(replayed))
    step = f" · profiler step {result.profiler_step}" if result.profiler_step is not None else ""
    return page(
        "replay.html",
        f"Replay of {result.traces}",
        {"timeline": chart},
        view_data(timelines, layout),
        line=f"{len(result.ranks)} of {counted(result.world_size, 'rank')}{step}",
        headline=_headline(result),
        notes=result.warnings,
        kinds=kinds_of(timelines),
        spans=len(replayed) + len(recorded),
        near=NEAR_MOST,
        ranks=[_rank(row) for row in result.per_rank[:256]],
        transfers=[_transfer(row) for row in result.communication],
    )


def _tracks(replayed: Timeline) -> list[Track]:
    """Return the tracks: for each rank the replayed rows, then the recorded ones."""
    names = [(f"rank {c.rank}", i) for i, c in enumerate(replayed.classes)]
    return [Track(f"{name} {side}", t, i) for name, i in names for t, side in enumerate(("replayed", "recorded"))]


def _headline(result: ReplayResult) -> list[Number]:
    good = abs(result.error) <= 0.02
    numbers = [
        Number("Recorded step", seconds(result.recorded_step_s)),
        Number(
            "Replayed unchanged",
            seconds(result.replayed_step_s),
            change_percent(result.error, 2),
            "good" if good else "bad",
        ),
    ]
    if result.priced_on:
        numbers = [Number("Step", seconds(result.replayed_step_s), f"on {result.priced_on}")]
    if result.what_if:
        words = ", ".join(f"{k} {asked(v)}" for k, v in result.what_if.items())
        numbers.append(
            Number("With the change", seconds(result.step_time_s), f"{change_percent(result.change, 1)}: {words}")
        )
    return numbers


def asked(value: Any) -> str:
    """Return the text of an option's value; lists have no brackets."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _rank(row: ReplayedRank) -> tuple[str, ...]:
    pairs = [(getattr(row.after, name), getattr(row.before, name)) for name in TIMES]
    return (str(row.after.rank), *(f"{seconds(after)} ({seconds(before)})" for after, before in pairs))


def _transfer(row: Transfers) -> tuple[str, ...]:
    share = percent(row.seconds / row.recorded_s) if row.recorded_s else "–"
    return (
        row.kind,
        row.group,
        count(row.count),
        n_bytes(row.bytes),
        seconds(row.seconds),
        seconds(row.recorded_s),
        share,
    )
