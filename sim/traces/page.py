"""The standalone page of a replay: replayed rows above recorded ones on one axis, and what each rank spent."""

from __future__ import annotations

from typing import Any

from sim.timeline import Timeline
from sim.views.page import card, escape, legend, merged_note, page, table, view_data, zoom_controls
from sim.views.rows import Track
from sim.views.units import n_bytes, percent, seconds

Result = dict[str, Any]


def replay_page(result: Result, replayed: Timeline, recorded: Timeline) -> str:
    """HTML of a page that opens without network: `sim-replay/1` and both timelines."""
    from sim.views.figures import timeline_figure

    timelines = [replayed, recorded]
    chart, layout = timeline_figure(timelines, _tracks(replayed))
    data = view_data(timelines, layout)
    plot = (
        f'<section><h2>Replayed above recorded</h2><div class="bar">{legend(timelines)}</div>'
        f'<div class="bar">{zoom_controls()}</div>{merged_note(len(replayed) + len(recorded))}'
        '<div id="plots" tabindex="0" role="group" aria-label="Timelines; arrow keys move, plus and minus zoom">'
        '<div class="plot" data-plot="timeline"></div></div></section>'
    )
    notes = "".join(f"<li>{escape(w)}</li>" for w in result["warnings"])
    warnings = f'<div class="warnings" role="note"><b>Note</b><ul>{notes}</ul></div>' if notes else ""
    title = f"Replay of {result['traces']}"
    step = f" · profiler step {result['profiler_step']}" if result["profiler_step"] is not None else ""
    line = f"{len(result['ranks'])} of {result['world_size']} ranks{step}"
    header = f'<header><h1>{escape(title)}</h1><p class="sub">{escape(line)}</p></header>'
    return page(title, "\n".join((header, _cards(result), warnings, plot, _tables(result))), {"timeline": chart}, data)


def _tracks(replayed: Timeline) -> list[Track]:
    """For each rank the replayed rows, then the recorded ones."""
    names = [(f"rank {c.rank}", i) for i, c in enumerate(replayed.classes)]
    return [Track(f"{name} {side}", t, i) for name, i in names for t, side in enumerate(("replayed", "recorded"))]


def _cards(result: Result) -> str:
    good = abs(result["error"]) <= 0.02
    cards = [
        card("Recorded step", seconds(result["recorded_step_s"])),
        card("Replayed unchanged", seconds(result["replayed_step_s"]), f"{result['error'] * 100:+.2f} %",
             "good" if good else "bad"),
    ]  # fmt: skip
    if result["what_if"]:
        words = ", ".join(f"{k} {asked(v)}" for k, v in result["what_if"].items())
        cards.append(
            card("With the change", seconds(result["step_time_s"]), f"{result['change'] * 100:+.1f} %: {words}")
        )
    return f'<dl class="cards">{"".join(cards)}</dl>'


def asked(value: Any) -> str:
    """What an option was given, lists without brackets."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _tables(result: Result) -> str:
    names = ("end_s", "compute_s", "exposed_comm_s", "exposed_wait_s", "host_s")
    rows = [(str(r["rank"]), *(f"{seconds(r[n])} ({seconds(r[f'recorded_{n}'])})" for n in names))
            for r in result["per_rank"][:256]]  # fmt: skip
    head = ("rank", "ends", "computing", "exposed transfers", "waiting for ranks", "host alone")
    ranks = f"<section><h2>Rank by rank, recorded in brackets</h2>{table(head, rows)}</section>"
    moved = [_transfer(c) for c in result["communication"]]
    if not moved:
        return ranks
    titles = ("transfer", "process group", "members", "bytes", "mean seconds", "recorded", "of recorded")
    return ranks + f"<section><h2>Transfers, waiting taken off</h2>{table(titles, moved, 2)}</section>"


def _transfer(row: Result) -> tuple[str, ...]:
    share = percent(row["seconds"] / row["recorded_s"]) if row["recorded_s"] else "–"
    names = (escape(row["kind"]), escape(row["group"]), str(row["count"]), n_bytes(row["bytes"]))
    return (*names, seconds(row["seconds"]), seconds(row["recorded_s"]), share)
