"""Predicted against measured, as one HTML page or as Markdown: scatter per table, statistics, the worst rows."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence

from sim.published.statistics import Error, by_group, summary
from sim.published.validation import Validation

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
    parts = [_STYLE, "<h1>Predicted against measured</h1>", _overview(tables)]
    for v in tables:
        parts.append(
            f"<h2>{html.escape(v.table.name)}</h2><p>{html.escape(v.table.title)}. Source: "
            f"{html.escape(v.table.source.get('citation', 'not named'))}</p>"
        )
        parts.append(f"<p>{html.escape(_counts(v))}</p>")
        for quantity in dict.fromkeys(e.quantity for e in v.errors):
            mine = [e for e in v.errors if e.quantity == quantity]
            parts.append(f"<div class=row>{scatter(mine, quantity)}<div>{_groups(mine)}{_worst(mine)}</div></div>")
    return "<!doctype html><html lang=en><meta charset=utf-8><title>Accuracy</title>" + "\n".join(parts) + "</html>\n"


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


def _overview(tables: Sequence[Validation]) -> str:
    head = "".join(f"<th>{c}</th>" for c in ("table", "quantity", *COLUMNS))
    rows = [
        f"<tr><td>{html.escape(v.table.name)}</td><td>{q}</td>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        for v in tables
        for q, cells in _rows(v)
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _groups(errors: Sequence[Error]) -> str:
    rows = []
    for group in by_group(errors)[1:25]:
        s = next(x for x in group.values() if isinstance(x, dict))
        rows.append(
            f"<tr><td>{html.escape(group['group'])}</td><td>{group['rows']}</td><td>{s['mean_abs']:.1%}</td>"
            f"<td>{s['bias']:+.1%}</td></tr>"
        )
    return f"<table><tr><th>group</th><th>rows</th><th>mean</th><th>bias</th></tr>{''.join(rows)}</table>"


def _worst(errors: Sequence[Error]) -> str:
    rows = [
        f"<tr><td>{html.escape(e.id)}</td><td>{e.predicted:.4g}</td><td>{e.measured:.4g}</td><td>{e.error:+.1%}</td></tr>"
        for e in _by_error(errors)[:WORST]
    ]
    return (
        f"<table><tr><th>worst rows</th><th>predicted</th><th>measured</th><th>error</th></tr>{''.join(rows)}</table>"
    )


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


_STYLE = """<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1d2733; }
table { border-collapse: collapse; margin: .6rem 0; font-size: 13px; }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child { text-align: left; }
.row { display: flex; gap: 1.5rem; flex-wrap: wrap; align-items: flex-start; }
svg { width: 26rem; max-width: 100%; background: #f7f9fb; }
circle { fill: #1f6feb; fill-opacity: .55; } line { stroke: #8795a6; }
text { font-size: 9px; text-anchor: middle; fill: #4a5a6c; }
</style>"""
