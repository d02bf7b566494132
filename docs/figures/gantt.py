"""Timelines as small SVG files: what ran when in a stretch of a simulated step, several steps below each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import numpy as np

from docs.figures.svg import FAINT, INK
from sim.core.timeline import row_stream
from sim.core.units import seconds
from sim.simulation import Simulation
from sim.views.palette import in_order, style_of

WIDTH, LEFT, RIGHT, ROW, GAP = 760, 84, 20, 13, 30
EMPTY = "#dfe5eb"
BOLD, RIGHTWARD = ' font-weight="600"', ' text-anchor="end"'
Bar = tuple[float, float, str]  # start and end in seconds since the stretch began, kind


@dataclass(frozen=True, slots=True)
class Strip:
    """A stretch of one step: a row of bars for each label."""

    title: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]


@dataclass(frozen=True, slots=True)
class Gantt:
    """Strips on one scale of time, `length_s` long."""

    title: str
    note: str
    length_s: float
    strips: tuple[Strip, ...]


def strip(
    title: str, simulation: Simulation, start_s: float, length_s: float, streams: Mapping[str, str], ranks: int = 1
) -> Strip:
    """Of the first `ranks` classes of ranks, what `streams` did; a stream's row is called by its value and the rank."""
    t, rows = simulation.timeline, []
    seen = np.flatnonzero((t.end_s > start_s) & (t.start_s < start_s + length_s))
    order = sorted(range(len(t.classes)), key=lambda i: (t.classes[i].pipeline_rank, t.classes[i].rank))[:ranks]
    for c in order:
        for stream, name in streams.items():
            mine = [i for i in seen[t.class_index[seen] == c].tolist() if row_stream(t.streams[t.stream[i]]) == stream]
            bars = tuple(
                (
                    max(0.0, float(t.start_s[i]) - start_s),
                    min(length_s, float(t.end_s[i]) - start_s),
                    t.kinds[t.kind[i]],
                )
                for i in mine
            )
            rows.append((name.format(t.classes[c].rank), bars))
    return Strip(title, tuple(rows))


def draw_gantt(chart: Gantt) -> str:
    """The chart as an SVG document."""
    kinds = in_order(tuple({kind for s in chart.strips for _, bars in s.rows for _, _, kind in bars}))
    body = [_text(LEFT, 22, chart.title, 15, INK, BOLD), _text(LEFT, 41, chart.note, 12, FAINT)]
    x, y, inner = float(LEFT), 50.0, WIDTH - LEFT - RIGHT
    for kind in kinds:
        style = style_of(kind)
        body += [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" fill="{style.fill}"/>',
            _text(x + 15, y + 10, style.label, 12, INK),
        ]
        x += 34 + 6.4 * len(style.label)
    per_s = inner / chart.length_s
    for s in chart.strips:
        y += GAP
        body.append(_text(LEFT, y, s.title, 12, INK, BOLD))
        y += 6
        for label, bars in s.rows:
            body.append(_text(LEFT - 6, y + ROW - 3, label, 10, FAINT, RIGHTWARD))
            body.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{inner}" height="{ROW - 2}" fill="{EMPTY}"/>')
            body += [
                f'<rect x="{LEFT + a * per_s:.2f}" y="{y:.1f}" width="{max((b - a) * per_s - 0.3, 0.3):.2f}" '
                f'height="{ROW - 2}" fill="{style_of(kind).fill}"/>'
                for a, b, kind in bars
            ]
            y += ROW
    y += 18
    body.append(_text(WIDTH - RIGHT, y, f"width: {seconds(chart.length_s)}", 11, FAINT, RIGHTWARD))
    label, height = escape(f"{chart.title}. {chart.note}", quote=True), f"{y + 10:.0f}"
    font = "Inter, 'Segoe UI', system-ui, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'font-family="{font}">\n<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
    ) + "\n".join([*body, "</svg>\n"])


def _text(x: float, y: float, text: str, size: int, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{more}>{escape(text)}</text>'
