"""Predicted against measured, as one HTML page or as Markdown: scatter per table, statistics, the worst rows."""

from __future__ import annotations

import html
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.core.units import count, counted, percent
from sim.results.figures import RATE, unit_of_measured
from sim.validation.report import TOO_LARGE, Validation
from sim.validation.statistics import Error, by_group, summary
from sim.views.headline import Number
from sim.views.page import asset, still_page
from sim.views.templating import signed

WORST = 10
SIZE, MARGIN, EDGE = 340, 62, 12
COLUMNS = ("rows", "mean", "mean by group", "median", "95 %", "max", "bias", "inside 90 % interval", "its width")
ERRORS = ("mean_abs", "mean_abs_by_group", "median_abs", "p95_abs", "max_abs", "bias")
KEYS = (*ERRORS, "inside_interval", "interval_width")


def accuracy_page(tables: Sequence[Validation]) -> str:
    """A standalone page; it needs no network."""
    from markupsafe import Markup

    rows = sum(len(v.outcomes) for v in tables)
    return still_page(
        "accuracy.html",
        "Predicted against measured",
        {},
        style=Markup(asset("accuracy.css")),
        what=f"{counted(rows, 'measured row')} in {counted(len(tables), 'table')}",
        headline=_headline(tables),
        columns=COLUMNS,
        overview=[
            (v.table.name, quantity, *(cell.replace("-", "−").replace("%", " %") for cell in cells))
            for v in tables
            for quantity, cells in _rows(v)
        ],
        tables=[_shown(v) for v in tables],
    )


def _headline(tables: Sequence[Validation]) -> list[Number]:
    """Mean errors of the quantities with most rows."""
    by_quantity = _by_quantity([e for v in tables for e in v.errors])
    numbers = []
    for quantity, errors in sorted(by_quantity.items(), key=lambda item: -len(item[1]))[:4]:
        found = summary(errors)
        median, bias = percent(found["median_abs"]), signed(found["bias"])
        note = f"mean of {counted(len(errors), 'row')}; median {median}, bias {bias}"
        name = f"Error of {quantity.replace('_per_', '/').replace('_', ' ').replace('gpu', 'GPU')}"
        numbers.append(Number(name, percent(found["mean_abs"]), note))
    return numbers


def _shown(v: Validation) -> Mapping[str, Any]:
    """A table's head, and for each quantity its scatter, groups and worst rows."""
    from markupsafe import Markup

    return {
        "name": v.table.name,
        "title": v.table.title,
        "citation": v.table.source.get("citation", "not named"),
        "counts": _counts(v),
        "quantities": [(Markup(scatter(x, name)), _groups(x), _worst(x)) for name, x in _by_quantity(v.errors).items()],
    }


def _by_quantity(errors: Sequence[Error]) -> dict[str, list[Error]]:
    out: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        out[error.quantity].append(error)
    return out


def accuracy_markdown(tables: Sequence[Validation]) -> str:
    """The overview and the worst rows of each table."""
    lines = ["| table | quantity | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * len(COLUMNS)]
    for v in tables:
        for quantity, cells in _rows(v):
            lines.append(f"| {v.table.name} | {quantity} | " + " | ".join(cells) + " |")
    for v in tables:
        lines += ["", f"### {v.table.name}", "", f"{v.table.title}. {_counts(v)}", ""]
        groups = by_group(v.errors)[1:]
        if 1 < len(groups) <= 40:
            lines += ["| group | quantity | rows | mean | bias |", "|---|---|---:|---:|---:|"]
            lines += [
                f"| {g['group']} | {q} | {g['rows']} | {s['mean_abs']:.1%} | {s['bias']:+.1%} |"
                for g in groups
                for q, s in g.items()
                if isinstance(s, dict)
            ]
            lines.append("")
        lines += ["| worst rows | quantity | predicted | measured | error |", "|---|---|---:|---:|---:|"]
        lines += [
            f"| {e.id} | {e.quantity} | {e.predicted:.4g} | {e.measured:.4g} | {e.error:+.1%} |"
            for e in _by_error(v.errors)[:WORST]
        ]
    return "\n".join(lines) + "\n"


def _by_error(errors: Sequence[Error]) -> list[Error]:
    return sorted(errors, key=lambda e: -abs(e.error))


def _rows(v: Validation) -> list[tuple[str, list[str]]]:
    sums = [(quantity, len(errors), summary(errors)) for quantity, errors in _by_quantity(v.errors).items()]
    return [(quantity, [f"{rows}", *(f"{s[k]:.1%}" for k in KEYS)]) for quantity, rows, s in sums]


def _counts(v: Validation) -> str:
    """Return how many rows were simulated, why others were not, and which are suspect."""
    left = Counter(("failed" if o.refused else "not simulated", o.reason) for o in v.outcomes if o.reason)
    left.update([("not believed", row.not_believed) for row in v.table.rows if row.not_believed])
    left.update(("not fitting", TOO_LARGE) for o in v.outcomes if o.too_large)
    why = "".join(f"; {n} {what}: {reason}" for (what, reason), n in left.most_common())
    return f"{sum(not o.reason for o in v.outcomes)} of {counted(len(v.outcomes), 'row')} simulated{why}."


def _groups(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for group in by_group(errors)[1:25]:
        s = next(x for x in group.values() if isinstance(x, dict))
        rows.append((str(group["group"]), str(group["rows"]), percent(s["mean_abs"]), signed(s["bias"])))
    return rows


def _worst(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    return [
        (e.id, quantity_text(e.key, e.predicted), quantity_text(e.key, e.measured), signed(e.error))
        for e in _by_error(errors)[:WORST]
    ]


def quantity_text(key: str, value: float) -> str:
    """A measured value in its key's unit.

    >>> quantity_text("max_allocated_bytes", 2.0**33), quantity_text("step_time_s", 0.25), quantity_text("mfu", 0.4)
    ('8.000 GiB', '250.0 ms', '40.0 %')
    """
    unit = unit_of_measured(key)
    return rate_text(value) if unit is RATE else unit.write(value)


def rate_text(value: float) -> str:
    """A rate: whole numbers, large ones shortened.

    >>> rate_text(5932.4), rate_text(4.1e14)
    ('5,932', '4.1e+14')
    """
    return count(value) if value < 1e7 else f"{value:.3g}"


def scatter(errors: Sequence[Error], title: str) -> str:
    """Measured across, predicted up, both logarithmic; the diagonal is a perfect prediction, dashed 10 % off."""
    dots = [e for e in errors if e.predicted > 0 and e.measured > 0]
    if not dots:
        return ""
    values = [math.log10(v) for e in dots for v in (e.predicted, e.measured)]
    low, high = min(values), max(values)
    pad = max(0.05, 0.05 * (high - low))
    low, high = low - pad, high + pad
    scale = (SIZE - MARGIN - EDGE) / (high - low)

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (x - low) * scale, SIZE - MARGIN - (y - low) * scale

    circles = []
    for e in dots:
        x, y = at(math.log10(e.measured), math.log10(e.predicted))
        said, real = (quantity_text(e.key, v) for v in (e.predicted, e.measured))
        tip = f"{e.id}: predicted {said}, measured {real}, {signed(e.error)}"
        circles.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{html.escape(tip)}</title></circle>')
    lines = []
    for factor, style in ((1.0, ""), (1.1, " stroke-dasharray=4"), (1 / 1.1, " stroke-dasharray=4")):
        shift = math.log10(factor)
        (x0, y0), (x1, y1) = (
            at(low + max(0.0, -shift), low + max(0.0, shift)),
            at(high - max(0.0, shift), high + min(0.0, shift)),
        )
        lines.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"{style} />')
    middle = (SIZE + MARGIN - EDGE) / 2
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{html.escape(title)}: predicted against measured">'
        f"{_axes(low, high, at, dots[0].key)}{''.join(lines)}{''.join(circles)}"
        f'<text x="{middle}" y="{SIZE - 8}" class="name">measured {html.escape(title.replace("_", " "))}</text>'
        f'<text x="12" y="{SIZE - middle}" class="name" transform="rotate(-90 12 {SIZE - middle})">predicted</text>'
        "</svg>"
    )


def _axes(low: float, high: float, at: Callable[[float, float], tuple[float, float]], key: str) -> str:
    """Grid lines with their values along both axes."""
    out = []
    unit = unit_of_measured(key).axis_scale  # round numbers of GiB
    for value in (unit * v for v in log_ticks(10**low / unit, 10**high / unit)):
        text = html.escape(re.sub(r"(\.\d*?)0+(?= )", r"\1", quantity_text(key, value)).replace(". ", " "))
        place = math.log10(value)
        (x, bottom), (_, top) = at(place, low), at(place, high)
        (left, y), (right, _) = at(low, place), at(high, place)
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{bottom:.1f}" x2="{x:.1f}" y2="{top:.1f}" />')
        out.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" />')
        out.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}">{text}</text>')
        out.append(f'<text x="{left - 5:.1f}" y="{y + 3:.1f}" class="left">{text}</text>')
    return "".join(out)


def log_ticks(low: float, high: float) -> list[float]:
    """Two to six round values between two others.

    >>> log_ticks(0.9, 2000.0), log_ticks(2.4, 3.1), log_ticks(0.4, 1.1)
    ([1.0, 10.0, 100.0, 1000.0], [2.5, 3.0], [0.5, 1.0])
    """
    found: list[float] = []
    for mantissas in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [v for k in powers for m in mantissas if low <= (v := round(m * 10.0**k, 12 - k)) <= high]
        if len(found) > 1:
            break
    if len(found) < 2:
        step = 10 ** math.floor(math.log10((high - low) / 2))
        step *= next(m for m in (5, 2, 1) if (high - low) / (m * step) >= 2)
        found = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return found[:: 1 + (len(found) - 1) // 6]
