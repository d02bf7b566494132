"""Predicted against measured, as one HTML page or as Markdown: scatter per table, statistics, the worst rows."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.validation.report import Validation
from sim.validation.statistics import Error, by_group, summary
from sim.views.page import asset
from sim.views.templating import render

WORST = 10
SIZE, MARGIN = 300, 44
COLUMNS = ("rows", "mean", "mean by group", "median", "95 %", "max", "bias", "inside 90 % interval", "its width")
KEYS = (
    "mean_abs",
    "mean_abs_by_group",
    "median_abs",
    "p95_abs",
    "max_abs",
    "bias",
    "inside_interval",
    "interval_width",
)


def accuracy_page(tables: Sequence[Validation]) -> str:
    """A standalone page; it needs no network and runs no script."""
    from markupsafe import Markup

    return render(
        "accuracy.html",
        css=Markup(asset("accuracy.css")),
        columns=COLUMNS,
        overview=[(v.table.name, quantity, *cells) for v in tables for quantity, cells in _rows(v)],
        tables=[_shown(v) for v in tables],
    )


def _shown(v: Validation) -> Mapping[str, Any]:
    """A table's head, and for each quantity its scatter, groups and worst rows."""
    from markupsafe import Markup

    quantities = []
    for quantity in dict.fromkeys(e.quantity for e in v.errors):
        mine = [e for e in v.errors if e.quantity == quantity]
        quantities.append((Markup(scatter(mine, quantity)), _groups(mine), _worst(mine)))
    table = v.table
    citation = table.source.get("citation", "not named")
    return {
        "name": table.name, "title": table.title, "citation": citation, "counts": _counts(v), "quantities": quantities
    }  # fmt: skip


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
    out = []
    for quantity in dict.fromkeys(e.quantity for e in v.errors):
        s = summary([e for e in v.errors if e.quantity == quantity])
        count = sum(e.quantity == quantity for e in v.errors)
        out.append((quantity, [f"{count}", *(f"{s[k]:.1%}" for k in KEYS)]))
    return out


def _counts(v: Validation) -> str:
    """How many rows were simulated, and why others were not."""
    left = Counter(("failed" if o.refused else "not simulated", o.reason) for o in v.outcomes if o.reason)
    why = "".join(f"; {n} {what}: {reason}" for (what, reason), n in left.most_common())
    return f"{sum(not o.reason for o in v.outcomes)} of {len(v.outcomes)} rows simulated{why}."


def _groups(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for group in by_group(errors)[1:25]:
        s = next(x for x in group.values() if isinstance(x, dict))
        rows.append((str(group["group"]), str(group["rows"]), f"{s['mean_abs']:.1%}", f"{s['bias']:+.1%}"))
    return rows


def _worst(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    worst = _by_error(errors)[:WORST]
    return [(e.id, f"{e.predicted:.4g}", f"{e.measured:.4g}", f"{e.error:+.1%}") for e in worst]


def scatter(errors: Sequence[Error], title: str) -> str:
    """Measured across, predicted up, both logarithmic; the diagonal is a perfect prediction, dashed 10 % off."""
    values = [math.log10(v) for e in errors for v in (e.predicted, e.measured) if v > 0]
    low, high = min(values), max(values)
    pad = max(0.05, 0.05 * (high - low))
    low, high = low - pad, high + pad
    scale = (SIZE - 2 * MARGIN) / (high - low)

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (x - low) * scale, SIZE - MARGIN - (y - low) * scale

    dots = []
    for e in errors:
        if e.predicted > 0 and e.measured > 0:
            x, y = at(math.log10(e.measured), math.log10(e.predicted))
            dots.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{html.escape(e.id)} {e.error:+.1%}</title></circle>'
            )
    lines = []
    for factor, style in ((1.0, ""), (1.1, " stroke-dasharray=4"), (1 / 1.1, " stroke-dasharray=4")):
        shift = math.log10(factor)
        (x0, y0), (x1, y1) = (
            at(low + max(0.0, -shift), low + max(0.0, shift)),
            at(high - max(0.0, shift), high + min(0.0, shift)),
        )
        lines.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"{style} />')
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{html.escape(title)}: predicted against measured">'
        f"{''.join(lines)}{''.join(dots)}{_axes(low, high, at)}"
        f'<text x="{SIZE / 2}" y="{SIZE - 8}">measured {html.escape(title)}</text>'
        f'<text x="12" y="{SIZE / 2}" transform="rotate(-90 12 {SIZE / 2})">predicted</text></svg>'
    )


def _axes(low: float, high: float, at: Callable[[float, float], tuple[float, float]]) -> str:
    out = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, y = at(power, low)
        out.append(f'<text x="{x:.1f}" y="{y + 14:.1f}">{10.0**power:g}</text>')
        x, y = at(low, power)
        out.append(f'<text x="{x - 16:.1f}" y="{y + 4:.1f}">{10.0**power:g}</text>')
    return "".join(out)
