"""Memory over time as a small SVG: categories stacked, one line for each step's begin."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from docs.figures.svg import BOTTOM, FAINT, GRID, HEIGHT, INK, INNER_W, LEFT, RIGHT, TOP, WIDTH
from sim.results.memory import MemoryCurve
from sim.views.palette import MEMORY

POINTS = 400  # places on the x axis; each shows its fullest moment


@dataclass(frozen=True, slots=True)
class Area:
    """What a picture shows: the memory of a rank over `steps` steps of `step_s` seconds."""

    title: str
    note: str
    curve: MemoryCurve
    step_s: float
    steps: int


def draw_area(area: Area) -> str:
    """The picture as an SVG document."""
    end_s, height = area.steps * area.step_s, HEIGHT - TOP - BOTTOM
    edges = np.linspace(0.0, end_s, POINTS + 1)
    total, chosen = area.curve.total, []
    for a, b in pairwise(edges):
        first = max(0, int(np.searchsorted(area.curve.time_s, a, side="right")) - 1)
        last = max(first + 1, int(np.searchsorted(area.curve.time_s, b, side="left")))
        chosen.append(first + int(total[first:last].argmax()))
    top = 10.0 * (int(total.max() / 1e10) + 1)  # GB
    x = [LEFT + INNER_W * i / POINTS for i in range(POINTS + 1)]
    body = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 22, area.title, 15, INK, "start", ' font-weight="600"'),
        _text(LEFT, 42, area.note, 12, FAINT, "start"),
    ]
    for tick in range(0, int(top) + 1, 10):
        y = TOP + height * (1 - tick / top)
        body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID if tick else FAINT}"/>')
        body.append(_text(LEFT - 6, y + 4, str(tick), 11, FAINT, "end"))
    low, place = np.zeros(POINTS), float(LEFT)
    for name, style in MEMORY.items():
        high = low + getattr(area.curve, name)[chosen] / 1e9
        body.append(f'<path d="{_band(x, low, high, top, height)}" fill="{style.fill}"/>')
        body.append(f'<rect x="{place:.1f}" y="55" width="11" height="11" fill="{style.fill}"/>')
        body.append(_text(place + 15, 65, style.label, 12, INK, "start"))
        low, place = high, place + 34 + 6.4 * len(style.label)
    for step in range(area.steps):
        middle = LEFT + INNER_W * (step + 0.5) / area.steps
        body.append(_text(middle, HEIGHT - BOTTOM + 18, f"step {step + 1}", 12, FAINT, "middle"))
    body.append(_text(16, TOP + height / 2, "GB", 12, FAINT, "middle"))
    label = escape(f"{area.title}. {area.note}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f"font-family=\"Inter, 'Segoe UI', system-ui, sans-serif\">\n" + "\n".join(body) + "\n</svg>\n"
    )


def _band(x: list[float], low: np.ndarray, high: np.ndarray, top: float, height: float) -> str:
    """The outline of one category, in steps."""

    def y(value: float) -> str:
        return f"{TOP + height * (1 - value / top):.1f}"

    there = [f"{x[i]:.1f} {y(v)} {x[i + 1]:.1f} {y(v)}" for i, v in enumerate(high)]
    back = [f"{x[i + 1]:.1f} {y(v)} {x[i]:.1f} {y(v)}" for i, v in reversed(list(enumerate(low)))]
    return "M" + "L".join([*there, *back]) + "Z"


def _text(x: float, y: float, text: str, size: int, colour: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{more}>'
        f"{escape(text)}</text>"
    )
