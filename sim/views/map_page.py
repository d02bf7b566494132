"""The standalone page of a map: heat maps over model sizes and GPU counts, measured runs beside their simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.core.units import count, counted, n_bytes, percent, seconds
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import INK
from sim.views.scatter import SERIES, explained, scatter_plot
from sim.views.scenario_words import layout_words
from sim.views.search_page import mesh_words, schedule_words

Result = Mapping[str, Any]
Cell = Mapping[str, Any]

_NONE, _PALE = "#e3e8ee", "#ffffff"
_TIP = (
    "<div><b>@model on @gpus GPUs</b></div><div>@words</div><div>@step a step, @rate tokens/s/GPU</div>"
    "<div>MFU @mfu, @memory</div>"
)
_ROW_HEIGHT = 62  # pixels
NOTHING = "nothing fits"
RUN_HEAD = ("Model", "GPUs", "Measured layout", "Tokens/s/GPU", "Simulated", "Error", "MFU", "Simulated")
RUN_NUMBERS_FROM = 3  # columns of `RUN_HEAD`


def map_page(result: Result) -> str:
    """HTML of `sim-map/1` that opens without network."""
    limit = result["memory_limit_bytes"]
    plots = {
        "mfu": _heat(result, "mfu", lambda b: b["mfu"], lambda b: percent(b["mfu"])),
        "memory": _heat(
            result,
            "memory",
            lambda b: b["peak_memory_bytes"] / b["memory_limit_bytes"],
            lambda b: n_bytes(b["peak_memory_bytes"]),
        ),
        "layout": _heat(result, "layout", lambda b: b["mfu"], lambda b: _short(b["layout"])),
    }
    measured = result["measured"]
    if measured:
        plots["measured"] = _measured_figure(measured["rows"])
    return still_page(
        "map.html",
        "Map of model sizes and GPU counts",
        plots,
        what=f"{len(result['cells'])} searches, at most {n_bytes(limit)} a GPU, {', '.join(result['only'])}",
        headline=_headline(result),
        measured=measured,
        run_head=RUN_HEAD,
        run_numbers_from=RUN_NUMBERS_FROM,
        runs=[run_cells(row) for row in measured["rows"]] if measured else [],
        best=[_cells(cell) for cell in result["cells"]],
    )


def cell_words(cell: Cell) -> list[str]:
    """A cell in lines of text: MFU and memory, then the layout."""
    best = cell["best"]
    if best is None:
        return [NOTHING]
    return [f"{percent(best['mfu'])} {n_bytes(best['peak_memory_bytes'])}", _short(best["layout"])]


def _run_words(row: Mapping[str, Any]) -> str:
    """The layout of a measured run."""
    layout, training = row["scenario"]["parallelism"], row["scenario"]["training"]
    return f"{' '.join(layout_words(layout, short=True))} b{training['micro_batch_size']}"


def _short(layout: Mapping[str, Any]) -> str:
    words = [*layout_words(layout, short=True), f"b{layout['micro_batch_size']}"]
    if layout["virtual_stages"] > 1:
        words.append(f"v{layout['virtual_stages']}")
    if layout["recompute"] != "none":
        words.append(f"r:{layout['recompute']}")
    return " ".join(words)


def _headline(result: Result) -> list[Number]:
    fitting = [cell for cell in result["cells"] if cell["best"]]
    numbers = []
    if fitting:
        best = max(fitting, key=lambda c: c["best"]["mfu"])
        worst = min(fitting, key=lambda c: c["best"]["mfu"])
        numbers = [
            Number(f"{name} MFU", percent(c["best"]["mfu"]), f"{c['model']} on {counted(c['gpus'], 'GPU')}", mood)
            for name, c, mood in (("Highest", best, "good"), ("Lowest", worst, ""))
        ]
    legal = sum(cell["counts"]["legal"] for cell in result["cells"])
    empty, cells = len(result["cells"]) - len(fitting), counted(len(result["cells"]), "cell")
    return [
        *numbers,
        Number("Layouts looked at", count(legal), f"{empty} of {cells} without one that fits"),
        Number("Searches", seconds(result["wall_s"]), counted(result["cores"], "core")),
    ]


def _heat(result: Result, name: str, value: Callable[[Cell], float], text: Callable[[Cell], str]) -> Any:
    """A rectangle for each cell, coloured by `value` from the least to the most, with `text` in it."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.palettes import Viridis256

    places, models = [f"{n:,}" for n in result["gpus"]], list(reversed(result["models"]))
    height = 90 + _ROW_HEIGHT * len(models)
    plot = scatter_plot(name, "GPUs", None, height, "save", x_range=places, y_range=models)
    plot.grid.visible = False
    values = [value(cell["best"]) for cell in result["cells"] if cell["best"]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    shares = [_share(value(c["best"]), low, high) if c["best"] else 0.0 for c in result["cells"]]
    source = ColumnDataSource(
        {
            **_columns(result["cells"]),
            "fill": [
                Viridis256[round(s * 255)] if c["best"] else _NONE for s, c in zip(shares, result["cells"], strict=True)
            ],
            "ink": [_PALE if c["best"] and s < 0.6 else INK for s, c in zip(shares, result["cells"], strict=True)],
            "text": [text(c["best"]) if c["best"] else NOTHING for c in result["cells"]],
        }
    )
    tiles = plot.rect("x", "model", 0.98, 0.96, source=source, fill_color="fill", line_color=None)
    words = {"text_align": "center", "text_baseline": "middle", "text_color": "ink"}
    plot.text("x", "model", "text", source=source, text_font_size="11px" if name == "layout" else "14px", **words)
    plot.add_tools(HoverTool(renderers=[tiles], tooltips=_TIP))
    return plot


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 1.0


def _columns(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    texts = [_texts(c["best"]) if c["best"] else defaultdict(lambda: "–") for c in cells]
    gpus = [f"{c['gpus']:,}" for c in cells]
    columns: dict[str, list[Any]] = {"x": gpus, "model": [c["model"] for c in cells], "gpus": gpus}
    return columns | {key: [t[key] for t in texts] for key in ("words", "step", "rate", "mfu", "memory")}


def _texts(best: Mapping[str, Any]) -> Mapping[str, str]:
    """The figures of a cell's best layout."""
    return {
        "words": f"{mesh_words(best['layout'])}; {schedule_words(best['layout'])}",
        "step": seconds(best["step_time_s"]),
        "rate": count(best["tokens_per_s_per_gpu"]),
        "mfu": percent(best["mfu"]),
        "memory": n_bytes(best["peak_memory_bytes"]),
    }


def _cells(cell: Cell) -> tuple[str, ...]:
    best = cell["best"]
    start = (cell["model"], count(cell["gpus"]))
    if best is None:
        return (*start, NOTHING, "", "", "", "", "", "")
    x, texts = best["layout"], _texts(best)
    figures = [texts[key] for key in ("step", "rate", "mfu", "memory")]
    return (*start, texts["words"], str(x["micro_batch_size"]), x["recompute"], *figures)


def run_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A measured run beside its simulation, under `RUN_HEAD`."""
    measured, simulated = row["tokens_per_s_per_gpu"], row["simulated_tokens_per_s_per_gpu"]
    return (
        row["model"],
        count(row["gpus"]),
        _run_words(row),
        count(measured),
        count(simulated),
        f"{(simulated / measured - 1) * 100:+.1f} %",
        percent(row["mfu"]),
        percent(row["simulated_mfu"]),
    )


def _measured_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """MFU by number of GPUs: measured with dots, simulated dashed, a colour for each model."""
    from bokeh.models import ColumnDataSource

    places = [f"{n:,}" for n in sorted({row["gpus"] for row in rows})]
    highest = max(max(row["mfu"], row["simulated_mfu"]) for row in rows)
    plot = scatter_plot("measured", "GPUs", "MFU", 340, "save", x_range=places, y_range=(0, 1.1 * highest))
    dots: list[Any] = []
    for i, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == model]
        source = ColumnDataSource(
            {
                "x": [f"{row['gpus']:,}" for row in mine],
                "y": [row["mfu"] for row in mine],
                "simulated": [row["simulated_mfu"] for row in mine],
                "words": [_run_words(row) for row in mine],
                "id": [row["id"] for row in mine],
            }
        )
        same: dict[str, Any] = {"source": source, "color": SERIES[i % len(SERIES)]}
        plot.line("x", "simulated", line_dash="dashed", legend_label=f"{model}, the same layout simulated", **same)
        same["legend_label"] = f"{model}, measured"
        plot.line("x", "y", line_width=2, **same)
        dots.append(plot.scatter("x", "y", size=9, **same))
    return explained(plot, dots, "<div><b>@id</b></div><div>@words</div>")
