"""Bar and line charts as small SVG files: axes with units, values on bars, colour-blind-safe colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

INK, FAINT, GRID, LIMIT = "#1b2733", "#5b6875", "#e3e8ee", "#b3261e"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito
HALO = ' paint-order="stroke" stroke="#ffffff" stroke-width="3"'  # readable over a line
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 54, 84, 52
INNER_W, INNER_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True, slots=True)
class Series:
    """A named row of values, one for each place on the x axis."""

    name: str
    values: tuple[float, ...]
    colour: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What a picture shows. `limit`: a dashed line at a value, with its name."""

    title: str
    note: str
    x_label: str
    y_label: str
    places: tuple[str, ...]
    series: tuple[Series, ...]
    kind: str  # grouped | stacked | lines
    limit: tuple[float, str] | None = None


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    top = _highest(chart)
    step = _nice(top / 5)
    top = math.ceil(top / step * 1.04) * step
    body = [_frame(chart), *_y_axis(chart, top, step), *_legend(chart)]
    body += {"grouped": _grouped, "stacked": _stacked, "lines": _lines}[chart.kind](chart, top)
    for i, place in enumerate(chart.places):
        body.append(_text(_x(i, len(chart.places)), HEIGHT - BOTTOM + 18, place, "middle", 12))
    label = escape(f"{chart.title}. {chart.note}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f"font-family=\"Inter, 'Segoe UI', system-ui, sans-serif\">\n" + "\n".join(body) + "\n</svg>\n"
    )


def _highest(chart: Chart) -> float:
    if chart.kind == "stacked":
        return max(
            max(sum(column) for column in zip(*(s.values for s in chart.series), strict=True)),
            chart.limit[0] if chart.limit else 0.0,
        )
    return max(max(s.values) for s in chart.series)


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= value * 0.999)


def _x(i: int, places: int) -> float:
    return LEFT + INNER_W * (i + 0.5) / places


def _y(value: float, top: float) -> float:
    return TOP + INNER_H * (1 - value / top)


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, colour: str = INK, more: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{more}>'
        f"{escape(text)}</text>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _frame(chart: Chart) -> str:
    middle = TOP + INNER_H / 2
    return "\n".join(
        (
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            _text(LEFT, 22, chart.title, size=15, more=' font-weight="600"'),
            _text(LEFT, 42, chart.note, size=12, colour=FAINT),
            _text(LEFT + INNER_W / 2, HEIGHT - 12, chart.x_label, "middle", 12, FAINT),
            _text(16, middle, chart.y_label, "middle", 12, FAINT, f' transform="rotate(-90 16 {middle:.1f})"'),
        )
    )


def _y_axis(chart: Chart, top: float, step: float) -> list[str]:
    out = []
    for k in range(round(top / step) + 1):
        y = _y(k * step, top)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID if k else FAINT}"/>')
        out.append(_text(LEFT - 6, y + 4, f"{k * step:,.10g}", "end", 11, FAINT))
    return out


def _legend(chart: Chart) -> list[str]:
    out, x = [], float(LEFT)
    for s in chart.series:
        out.append(f'<rect x="{x:.1f}" y="55" width="11" height="11" fill="{s.colour}"/>')
        out.append(_text(x + 15, 65, s.name))
        x += 34 + 6.4 * len(s.name)
    return out


def _bar(x: float, width: float, low: float, high: float, top: float, colour: str) -> str:
    y = _y(high, top)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_y(low, top) - y:.1f}" fill="{colour}"/>'


def _grouped(chart: Chart, top: float) -> list[str]:
    out, n = [], len(chart.series)
    width = INNER_W / len(chart.places) * 0.82 / n
    for j, s in enumerate(chart.series):
        for i, value in enumerate(s.values):
            x = _x(i, len(chart.places)) + (j - n / 2) * width
            out.append(_bar(x, width - 2, 0.0, value, top, s.colour))
            out.append(_text(x + width / 2 - 1, _y(value, top) - 4, _number(value), "middle", 10))
    return out


def _stacked(chart: Chart, top: float) -> list[str]:
    out, totals, width = [], [], min(90.0, INNER_W / len(chart.places) * 0.6)
    for i in range(len(chart.places)):
        low, x = 0.0, _x(i, len(chart.places)) - width / 2
        for s in chart.series:
            out.append(_bar(x, width, low, low + s.values[i], top, s.colour))
            low += s.values[i]
        totals.append(_text(x + width / 2, _y(low, top) - 4, _number(low), "middle", 11, more=HALO))
    if chart.limit:
        y, dashes = _y(chart.limit[0], top), 'stroke-width="2" stroke-dasharray="6 4"'
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{LIMIT}" {dashes}/>')
        out.append(_text(WIDTH - RIGHT + 5, y + 4, chart.limit[1], "start", 12, LIMIT))
    return out + totals


def _lines(chart: Chart, top: float) -> list[str]:
    out: list[str] = []
    labelled: list[tuple[float, float]] = []
    for s in chart.series:
        points = [(_x(i, len(chart.places)), _y(v, top)) for i, v in enumerate(s.values)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{s.colour}" stroke-width="2"/>')
        for (x, y), value in zip(points, s.values, strict=True):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{s.colour}"/>')
            if all(abs(x - a) > 1 or abs(y - b) > 12 for a, b in labelled):
                out.append(_text(x, y - 7, _number(value), "middle", 10))
                labelled.append((x, y))
    return out
