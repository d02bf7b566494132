"""The standalone page of one simulated step: headline, losses, timeline, memory, ranks, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.timeline import Timeline
from sim.views.curves import curve_columns, fullest
from sim.views.headline import headline, layout_line, memory_limit_bytes, rank_seconds, shares_of
from sim.views.losses import largest_losses, mean_seconds, parts_of_step
from sim.views.page import (
    card,
    escape,
    legend,
    marked,
    merged_note,
    page,
    swatch,
    table,
    view_data,
    zoom_controls,
)
from sim.views.palette import SERVING_KINDS, memory_styles, style_of
from sim.views.rows import kinds_of
from sim.views.serving_summary import cache_lines
from sim.views.units import count, n_bytes, percent, ranks_text, seconds

if TYPE_CHECKING:
    from sim.memory import MemoryCurve

Result = Mapping[str, Any]

MEMORY_POINTS = 200_000  # of all curves together
RANK_BARS = {"compute": "#0072b2", "communication": "#d55e00", "bubble": "#aab4bf", "other": "#e6eaee"}


def timeline_page(
    result: Result, timeline: Timeline, memory: Sequence[MemoryCurve], critical: Sequence[int] = ()
) -> str:
    """HTML of a page that opens without network: `sim-result/1`, its timeline and its memory over time.

    `critical` are the indices of the spans on the critical path, which the page can outline.
    """
    from sim.views.figures import memory_figure, timeline_figure
    from sim.views.rows import tracks_of

    until_s = max((float(c.time_s[-1]) for c in memory), default=0.0)
    chart, layout = timeline_figure([timeline], tracks_of(timeline), critical, until_s)
    limit = memory_limit_bytes(result)
    plots = {"timeline": chart}
    data = view_data([timeline], layout)
    data["end_s"] = max(data["end_s"], until_s)
    if memory:
        points = max(400, MEMORY_POINTS // len(memory))
        curves = [curve_columns(c, timeline.step_time_s, points) for c in memory]
        styles = memory_styles(result)
        plots["memory"] = memory_figure(chart, limit, curves[fullest(memory)], styles)
        data |= {"limit_bytes": limit, "memory": curves, "categories": [[c, s.label] for c, s in styles.items()]}
    title = str(result.get("scenario", {}).get("name") or "simulated step")
    if "output_tokens_per_s" in result:
        data["item"] = "iteration"
    body = "\n".join(
        (
            _header(title, result),
            _cards(result),
            _warnings(result),
            _losses(result, timeline),
            _serving(result, timeline),
            _plots(result, timeline, memory, bool(len(critical))),
            _ranks(result),
            _faults(result),
            _tables(result),
            _provenance(result),
        )
    )
    return page(f"{title} · simulated step", body, plots, data)


def _header(title: str, result: Result) -> str:
    return f'<header><h1>{escape(title)}</h1><p class="sub">{escape(layout_line(result))}</p></header>'


def _cards(result: Result) -> str:
    cards = "".join(card(n.name, n.value, n.note, n.mood) for n in headline(result))
    return f'<dl class="cards">{cards}</dl>'


def _warnings(result: Result) -> str:
    items = "".join(f"<li>{escape(w)}</li>" for w in result.get("warnings") or ())
    return f'<div class="warnings" role="note"><b>Note</b><ul>{items}</ul></div>' if items else ""


def _losses(result: Result, timeline: Timeline) -> str:
    parts = parts_of_step(result, timeline)
    step = float(result.get("step_time_s") or 0.0)
    if not parts:
        return ""
    bar = "".join(
        f'<span style="flex:{p.seconds / step:.5f};background:{p.colour};color:'
        f'{"#fff" if p.key == "useful" else "#1b2733"}" title="{escape(p.label)}: {seconds(p.seconds)}">'
        f"{percent(p.seconds / step) if p.seconds > 0.06 * step else ''}</span>"
        for p in parts
    )
    keys = "".join(f"<li>{swatch(p.colour)}{p.label} <b>{seconds(p.seconds)}</b></li>" for p in parts)
    items = "".join(
        f'<li style="border-color:{p.colour}"><strong>{i}. {p.label}: {seconds(p.seconds)}, '
        f"{percent(p.seconds / step)} of the step</strong><p>{marked(remedy)}</p></li>"
        for i, (p, remedy) in enumerate(largest_losses(result, timeline), 1)
    )
    return (
        '<section id="losses"><h2>Where the step goes</h2>'
        f'<div class="parts" role="img" aria-label="Parts of the step">{bar}</div>'
        f'<ul class="keys">{keys}</ul><ol class="losses">{items}</ol></section>'
    )


def _serving(result: Result, timeline: Timeline) -> str:
    """How the mean replica's time divides, and what became of requests and cache."""
    if "output_tokens_per_s" not in result:
        return ""
    end_s = timeline.step_time_s or 1.0
    lengths = {k: mean_seconds(timeline, k) for k in kinds_of([timeline]) if k in SERVING_KINDS}
    lengths["idle"] = max(end_s - sum(lengths.values()), 0.0)
    looks = {k: (style_of(k).label, style_of(k).fill) for k in SERVING_KINDS} | {"idle": ("Idle", "#d5dbe1")}
    bar = "".join(f'<span style="flex:{s / end_s:.5f};background:{looks[k][1]}"></span>' for k, s in lengths.items())
    keys = "".join(
        f"<li>{swatch(looks[k][1])}{looks[k][0]} <b>{seconds(s)}, {percent(s / end_s)}</b></li>"
        for k, s in lengths.items()
    )
    lines = table(("", ""), ((escape(name), escape(value)) for name, value in cache_lines(result)), 2)
    return (
        '<section id="serving"><h2>Where the time goes</h2>'
        f'<div class="parts" role="img" aria-label="Parts of the time">{bar}</div><ul class="keys">{keys}</ul>'
        f"</section><section><h2>Requests and their cache</h2>{lines}</section>"
    )


def _plots(result: Result, timeline: Timeline, memory: Sequence[MemoryCurve], critical: bool) -> str:
    toggle = '<label><input type="checkbox" id="critical"> Mark the critical path</label>' if critical else ""
    lower = ""
    if memory:
        names = {c.rank: ranks_text(c.ranks) for c in timeline.classes}
        peaks, worst = [float(c.total.max()) for c in memory], fullest(memory)
        options = "".join(
            f'<option value="{i}"{" selected" if i == worst else ""}>'
            f"{escape(names.get(c.rank, f'rank {c.rank}'))}, peak {n_bytes(peaks[i])}</option>"
            for i, c in enumerate(memory)
        )
        keys = "".join(f"<li>{swatch(s.fill)}{s.label}</li>" for s in reversed(memory_styles(result).values()))
        lower = (
            f'<div class="bar memory-bar"><label>Memory of <select id="rank">{options}</select></label>'
            f'<ul class="keys">{keys}</ul><p class="hint" id="memory-note"></p></div>'
            '<div class="plot" data-plot="memory"></div>'
        )
    return (
        f'<section><h2>Timeline</h2><div class="bar">{legend([timeline])}{toggle}</div>'
        f'<div class="bar">{zoom_controls()}</div>{merged_note(len(timeline))}'
        '<div id="plots" tabindex="0" role="group" '
        'aria-label="Timeline and memory; arrow keys move, plus and minus zoom">'
        f'<div class="plot" data-plot="timeline"></div>{lower}</div></section>'
    )


def _ranks(result: Result) -> str:
    step = float(result.get("step_time_s") or 0.0)
    if not step or not result.get("ranks"):
        return ""
    rows = [_rank_row(entry, step) for entry in result["ranks"]]
    body = table(("", "share of the step", "computing", "exposed communication", "bubble", "busy"), rows, 2)
    keys = "".join(
        f"<li>{swatch(RANK_BARS[k])}{n}</li>"
        for k, n in (
            ("compute", "computing"),
            ("communication", "exposed communication"),
            ("bubble", "bubble"),
            ("other", "other waiting"),
        )
    )
    return (
        f'<section id="ranks"><h2>Rank by rank</h2><ul class="keys">{keys}</ul>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="Rank by rank">{body}</div></section>'
    )


def _rank_row(entry: Mapping[str, Any], step_s: float) -> tuple[str, ...]:
    """A class of ranks: a bar of where its step goes, and the numbers."""
    busy, comm, bubble = rank_seconds(entry)
    other = max(step_s - busy - comm - bubble, 0.0)
    bar = "".join(
        f'<span style="flex:{max(s, 0) / step_s:.5f};background:{RANK_BARS[k]}"></span>'
        for k, s in {"compute": busy, "communication": comm, "bubble": bubble, "other": other}.items()
    )
    return (
        escape(ranks_text(entry.get("ranks", entry.get("rank", "?")))),
        f'<div class="rankbar">{bar}</div>',
        seconds(busy),
        seconds(comm),
        seconds(bubble),
        percent(busy / step_s),
    )


def _faults(result: Result) -> str:
    """What each fault costs the step, and who stands still for whom."""
    step = float(result.get("step_time_s") or 0.0) or 1.0
    lost = [
        (escape(row["cause"]), seconds(row["lost_s"]), percent(row["lost_s"] / step))
        for row in result.get("blame") or ()
    ]
    if not lost:
        return ""
    waits = [
        (escape(ranks_text(row["ranks"])), escape(ranks_text(row["for"])), seconds(row["seconds"]))
        for row in result.get("waiting") or ()
    ]
    hint = (
        "Lost: how much shorter the step is without that fault alone. Waiting: at collectives for the last to arrive, "
        "at messages for the sender; what a pipeline's bubble costs anyway is in it."
    )
    return (
        f'<section id="faults"><h2>Faults</h2><p class="hint">{hint}</p><div class="columns">'
        f"<section>{table(('Fault', 'lost', 'of the step'), lost)}</section>"
        f"<section>{table(('Ranks', 'wait for', 'seconds'), waits, 2)}</section></div></section>"
    )


def _tables(result: Result) -> str:
    halves = []
    if result.get("memory"):
        styles = memory_styles(result)
        rows = [
            (
                escape(ranks_text(e.get("ranks", "?"))),
                *(n_bytes(e.get(c, 0.0)) for c in styles),
                f"<b>{n_bytes(e.get('peak', 0.0))}</b>",
            )
            for e in result["memory"]
        ]
        body = table(("", *(s.label for s in styles.values()), "Peak"), rows)
        halves.append(
            f'<section id="memory-table"><h2>Memory, each at its maximum</h2><div class="scroll" '
            f'tabindex="0" role="group" aria-label="Memory">{body}</div></section>'
        )
    path = {k: float(v) for k, v in (result.get("critical_path") or {}).items() if v}
    if path:
        whole = sum(path.values())
        rows = [
            (swatch(style_of(k).fill) + escape(style_of(k).label), seconds(v), percent(v / whole))
            for k, v in sorted(path.items(), key=lambda item: -item[1])
        ]
        halves.append(
            f'<section id="critical-path"><h2>On the critical path</h2>'
            f"{table(('', 'seconds', 'share'), rows)}</section>"
        )
    return f'<div class="columns">{"".join(halves)}</div>'


def _provenance(result: Result) -> str:
    source, engine = result.get("provenance") or {}, result.get("engine") or {}
    shares = ", ".join(f"{percent(v)} {escape(k)}" for k, v in shares_of(source).items() if v)
    hardware = source.get("hardware")
    if isinstance(hardware, Mapping):
        hardware = ", ".join(str(v) for v in hardware.values() if v)
    words = [
        f"Profile <b>{escape(source.get('profile', 'none'))}</b>" if source else "",
        escape(source.get("date") or ""),
        escape(hardware) if hardware else "",
        f"costs: {shares}" if shares else "",
        f"{count(engine.get('tasks', 0))} tasks in "
        f"{seconds(engine.get('wall_s', 0.0))} ({escape(engine.get('path', ''))})"
        if engine
        else "",
    ]
    scenario = escape(json.dumps(result.get("scenario", {}), indent=2, ensure_ascii=False))
    return (
        "<details><summary>The scenario, every default written out</summary>"
        f"<pre>{scenario}</pre></details><footer>{' · '.join(w for w in words if w)}</footer>"
    )
