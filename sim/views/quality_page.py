"""The standalone page of quality beside throughput and memory: two Pareto plots and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.core.units import count, n_bytes, seconds
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import BLUE, GREY, INK
from sim.views.scatter import scatter_plot

JsonRow = Mapping[str, Any]
HEAD = ("Model", "Score", "Tokens/s/GPU", "", "Memory", "", "TTFT p50", "TPOT p50")
_ON, _OFF = BLUE, GREY


def quality_page(result: Mapping[str, Any]) -> str:
    """HTML of `sim-quality/1` that opens without network."""
    rows = result["models"]
    done = [row for row in rows if not row["refused"] and row["fits_in_memory"]]
    best = max(done, key=lambda row: row["score"], default=None)
    fast = max(done, key=lambda row: row["output_tokens_per_s_per_gpu"], default=None)
    numbers = [
        Number(name, row["model"], f"score {row['score']:g}, {count(row['output_tokens_per_s_per_gpu'])} tokens/s/GPU")
        for name, row in (("Best score", best), ("Fastest", fast))
        if row is not None
    ]
    return still_page(
        "quality.html",
        "Quality beside throughput and memory",
        {
            "throughput": _plot(done, "output_tokens_per_s_per_gpu", "output tokens a second and GPU", 1.0),
            "memory": _plot(done, "peak_memory_bytes", "GiB on the fullest GPU", 2.0**30),
        },
        what=f"{result['name']}, scores of {result['scores']}",
        headline=[*numbers, Number("Models", count(len(rows)), f"{count(len(done))} served within memory")],
        head=HEAD,
        rows=[cells(row) for row in sorted(rows, key=lambda row: -row["score"])],
        sources=list(dict.fromkeys(f"{row['model']}: {row['source']}" for row in rows if row["source"])),
    )


def cells(row: JsonRow) -> tuple[str, ...]:
    """A line of the table."""
    if row["refused"]:
        return (row["model"], f"{row['score']:g}", "refused", "", row["refused"][:60], "", "", "")
    memory = n_bytes(row["peak_memory_bytes"]) + ("" if row["fits_in_memory"] else " ✗")
    return (
        row["model"],
        f"{row['score']:g}",
        count(row["output_tokens_per_s_per_gpu"]),
        "✓" if row["best_by_output_tokens_per_s_per_gpu"] else "",
        memory,
        "✓" if row["best_by_peak_memory_bytes"] else "",
        seconds(row["time_to_first_token_s"]),
        seconds(row["time_per_output_token_s"]),
    )


def _plot(rows: list[JsonRow], name: str, label: str, unit: float) -> Any:
    """Score against one figure; models on the Pareto line are coloured and joined."""
    from bokeh.models import ColumnDataSource

    plot = scatter_plot(name, label, "score", 380, "pan,wheel_zoom,reset,save")
    front = sorted((row for row in rows if row[f"best_by_{name}"]), key=lambda row: row[name])
    plot.line([row[name] / unit for row in front], [row["score"] for row in front], color=_ON, line_width=2)
    values = [row[name] for row in rows]
    in_right_half = [value > (min(values) + max(values)) / 2 for value in values]
    source = ColumnDataSource(
        {
            "x": [row[name] / unit for row in rows],
            "y": [row["score"] for row in rows],
            "model": [row["model"] for row in rows],
            "fill": [_ON if row[f"best_by_{name}"] else _OFF for row in rows],
            # In the right half names stand left of their dots, where the plot has room for them.
            "align": ["right" if right else "left" for right in in_right_half],
            "shift": [-8 if right else 8 for right in in_right_half],
        }
    )
    plot.scatter("x", "y", source=source, size=10, color="fill")
    placed = {"text_align": "align", "x_offset": "shift", "y_offset": 4}
    plot.text("x", "y", "model", source=source, **placed, text_color=INK, text_font_size="12px")
    return plot
