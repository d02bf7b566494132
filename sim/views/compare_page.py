"""The standalone page of a comparison: simulated rows above measured ones on one axis, tables of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sim.timeline import Timeline
from sim.views.page import (
    card,
    escape,
    legend,
    merged_note,
    page,
    swatch,
    table,
    view_data,
    zoom_controls,
)
from sim.views.palette import in_order, style_of
from sim.views.rows import Track
from sim.views.units import n_bytes, percent, ranks_text, seconds

_GROUPS = ("tp", "cp", "ep", "dp", "model", "shard", "replica", "copies", "embedding")
Comparison = Mapping[str, Any]


def compare_page(compare: Comparison, simulated: Timeline, measured: Timeline) -> str:
    """HTML of a page that opens without network: `sim-compare/1` and the two timelines it compares."""
    from sim.views.figures import timeline_figure

    timelines = [_in_one_row(simulated), _in_one_row(measured)]
    chart, layout = timeline_figure(timelines, paired_tracks(simulated, measured))
    data = view_data(timelines, layout)
    title = f"{compare.get('scenario', 'step')}: simulated against measured"
    plot = (
        f'<section><h2>Timelines</h2><div class="bar">{legend(timelines)}</div>'
        f'<div class="bar">{zoom_controls()}</div>'
        f"{merged_note(len(simulated) + len(measured))}"
        '<div id="plots" tabindex="0" role="group" '
        'aria-label="Timelines; arrow keys move, plus and minus zoom">'
        '<div class="plot" data-plot="timeline"></div></div></section>'
    )
    body = "\n".join((_header(title, compare), _cards(compare), plot, _tables(compare)))
    return page(title, body, {"timeline": chart}, data)


def paired_tracks(simulated: Timeline, measured: Timeline) -> list[Track]:
    """Each simulated class of equal ranks, and below it those of its ranks that were measured."""
    tracks = []
    for k in sorted(range(len(simulated.classes)), key=lambda k: simulated.classes[k].rank):
        ranks = simulated.classes[k].ranks
        twins = sorted((c.rank, i) for i, c in enumerate(measured.classes) if c.rank in ranks)
        if twins:
            tracks.append(Track(f"{ranks_text(ranks)} simulated", 0, k))
        tracks += [Track(f"rank {rank} measured", 1, i) for rank, i in twins]
    return tracks


def _in_one_row(timeline: Timeline) -> Timeline:
    """Collectives of all groups share a row: a measured action does not say whose it was."""
    return replace(timeline, streams=tuple("collectives" if s in _GROUPS else s for s in timeline.streams))


def _header(title: str, compare: Comparison) -> str:
    steps = compare.get("steps") or {}
    words = [f"Profile {compare['profile']}" if compare.get("profile") else ""]
    if steps:
        words.append(f"{steps.get('count')} timed steps, {seconds(steps['min_s'])} to {seconds(steps['max_s'])}")
    line = " · ".join(w for w in words if w)
    return f'<header><h1>{escape(title)}</h1><p class="sub">{escape(line)}</p></header>'


def _cards(compare: Comparison) -> str:
    step = compare["step_time_s"]
    tolerance = compare.get("tolerance")
    verdict = "within" if compare.get("within_tolerance") else "out of"
    allowed = f" of {percent(tolerance)}" if tolerance is not None else ""
    low, high = compare.get("step_time_interval_s") or (step["simulated"], step["simulated"])
    cards = [
        card(
            "Error of step time",
            signed(step["error"]),
            f"{verdict} tolerance{allowed}",
            "good" if compare.get("within_tolerance") else "bad",
        ),
        card("Simulated", seconds(step["simulated"]), f"90 %: {seconds(low)} – {seconds(high)}"),
        card("Measured", seconds(step["measured"]), f"median; noise {percent(compare.get('noise') or 0.0)}"),
    ]
    ends = compare.get("action_ends")
    if ends:
        cards.append(
            card(
                "Ends of actions differ by",
                percent(ends["mean"]),
                f"of the step on average, {percent(ends['max'])} at most",
            )
        )
    return f'<dl class="cards">{"".join(cards)}</dl>'


def signed(error: float | None) -> str:
    """An error with its sign, or a dash where there is none."""
    return "–" if error is None else f"{error * 100:+.1f} %"


def _tables(compare: Comparison) -> str:
    ranks, memory = compare.get("ranks") or [], compare.get("memory") or []
    actions = compare.get("actions") or {}
    kinds = [(k, actions[k]) for k in in_order(tuple(actions))]
    halves = [
        _pairs(
            "actions",
            "Mean seconds of one action",
            [(swatch(style_of(k).fill) + escape(style_of(k).label), pair) for k, pair in kinds],
            seconds,
            "Communication without the wait for other ranks.",
        ),
        _pairs(
            "ranks",
            "Computing, rank by rank",
            [(f"rank {r['rank']}", r["compute_s"]) for r in ranks if "compute_s" in r],
            seconds,
        ),
        _pairs(
            "memory-table",
            "Peak memory",
            [(f"rank {m['rank']}", m["peak_bytes"]) for m in memory if "peak_bytes" in m],
            n_bytes,
        ),
        _pairs(
            "saved-table",
            "Saved for backward",
            [(f"rank {m['rank']}", m["saved_for_backward_bytes"]) for m in memory if "saved_for_backward_bytes" in m],
            n_bytes,
        ),
    ]
    return f'<div class="columns">{"".join(halves)}</div>'


def _pairs(
    identity: str, title: str, pairs: list[tuple[str, Mapping[str, Any]]], unit: Callable[[float], str], hint: str = ""
) -> str:
    """A table of simulated, measured, error; a side that has none of something shows a dash."""
    if not pairs:
        return ""
    rows = []
    for name, pair in pairs:
        missing = {side for side in ("simulated", "measured") if pair.get(f"{side}_count") == 0}
        error = None if missing else pair.get("error")
        mood = "" if error is None else "plus" if error > 0 else "minus"
        rows.append(
            (
                name,
                *("–" if side in missing else unit(float(pair[side])) for side in ("simulated", "measured")),
                f'<span class="{mood}">{signed(error)}</span>',
            )
        )
    body = table(("", "simulated", "measured", "error"), rows)
    note = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f'<section id="{identity}"><h2>{escape(title)}</h2>{note}{body}</section>'
