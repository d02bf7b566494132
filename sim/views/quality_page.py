"""The standalone page of quality beside throughput and memory: two Pareto plots and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.core.units import count, n_bytes, seconds
from sim.studies.quality import BESIDE, QualityResult, ScoredModel
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import BLUE, GREY, INK
from sim.views.scatter import scatter_plot

HEAD = ("Model", "Score", "Tokens/s/GPU", "Pareto", "Memory", "Pareto", "TTFT p50", "TPOT p50")
THROUGHPUT, MEMORY = BESIDE
_ON, _OFF = BLUE, GREY


def quality_page(result: QualityResult) -> str:
    """HTML of `sim-quality/1` that opens without network."""
    rows = sorted(result.models, key=lambda row: -row.score)
    done = [row for row in rows if row.fits_in_memory]
    best = max(done, key=lambda row: row.score, default=None)
    fast = max(done, key=lambda row: row.figure(THROUGHPUT), default=None)
    numbers = [
        Number(name, row.model, f"score {row.score:g}, {count(row.figure(THROUGHPUT))} tokens/s/GPU")
        for name, row in (("Best score", best), ("Fastest", fast))
        if row is not None
    ]
    return still_page(
        "quality.html",
        "Quality beside throughput and memory",
        {
            "throughput": _plot(done, THROUGHPUT, "output tokens a second and GPU", 1.0),
            "memory": _plot(done, MEMORY, "GiB on the fullest GPU", 2.0**30),
        },
        what=f"{result.name}, scores of {result.scores}",
        headline=[*numbers, Number("Models", count(len(rows)), f"{count(len(done))} served within memory")],
        head=HEAD,
        rows=[cells(row) for row in rows],
        sources=sources(result.models),
    )


def sources(models: Sequence[ScoredModel]) -> list[str]:
    """Each source of scores, and the models that it has."""
    named: dict[str, list[str]] = {}
    for row in models:
        named.setdefault(row.source, []).append(row.model)
    return [f"{', '.join(of)}: {source}" for source, of in named.items() if source]


def cells(row: ScoredModel) -> tuple[str, ...]:
    """A line of the table."""
    if row.refused:
        return (row.model, f"{row.score:g}", "refused", "", row.refused[:60], "", "", "")
    return (
        row.model,
        f"{row.score:g}",
        count(row.figure(THROUGHPUT)),
        "✓" * row.is_best(THROUGHPUT),
        n_bytes(row.figure(MEMORY)) + " ✗" * (not row.fits_in_memory),
        "✓" * row.is_best(MEMORY),
        seconds(row.figure("time_to_first_token_s")),
        seconds(row.figure("time_per_output_token_s")),
    )


def _plot(rows: Sequence[ScoredModel], name: str, label: str, unit: float) -> Any:
    """Score against one figure; models on the Pareto line are coloured and joined."""
    from bokeh.models import ColumnDataSource

    plot = scatter_plot(name, label, "score", 380, "pan,wheel_zoom,reset,save")
    front = sorted((row for row in rows if row.is_best(name)), key=lambda row: row.figure(name))
    plot.line([row.figure(name) / unit for row in front], [row.score for row in front], color=_ON, line_width=2)
    values = [row.figure(name) for row in rows]
    in_right_half = [value > (min(values) + max(values)) / 2 for value in values]
    source = ColumnDataSource(
        {
            "x": [value / unit for value in values],
            "y": [row.score for row in rows],
            "model": [row.model for row in rows],
            "fill": [_ON if row.is_best(name) else _OFF for row in rows],
            # In the right half names stand left of their dots, where the plot has room for them.
            "align": ["right" if right else "left" for right in in_right_half],
            "shift": [-8 if right else 8 for right in in_right_half],
        }
    )
    plot.scatter("x", "y", source=source, size=10, color="fill")
    placed = {"text_align": "align", "x_offset": "shift", "y_offset": -5}
    plot.text("x", "y", "model", source=source, **placed, text_color=INK, text_font_size="12px")
    return plot
