"""The standalone page of a map: heat maps over model sizes and GPU counts, measured runs beside their simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sim.core.units import count, counted, n_bytes, percent, seconds
from sim.search.found import BestLayout
from sim.search.space import Layout
from sim.validation.best_measured import MeasuredBest
from sim.validation.experiment_map import MapCell, MapResult
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import INK
from sim.views.scatter import SERIES, explained, scatter_plot
from sim.views.scenario_words import layout_words
from sim.views.search_page import memory_words, mesh_words, schedule_words

_NONE, _PALE = "#e3e8ee", "#ffffff"
_TIP = (
    "<div><b>@model on @gpus GPUs</b></div><div>@words</div><div>@step a step, @rate tokens/s/GPU</div>"
    "<div>MFU @mfu, @memory</div>"
)
_TEXTS = ("words", "step", "rate", "mfu", "memory")  # columns that `_TIP` shows
_ROW_HEIGHT = 62  # pixels
NOTHING = "nothing fits"
RUN_HEAD = ("Model", "GPUs", "Measured layout", "Tokens/s/GPU", "Simulated", "Error", "MFU", "Simulated MFU")
RUN_NUMBERS_FROM = 3  # columns of `RUN_HEAD`


def map_page(result: MapResult) -> str:
    """HTML of a map that opens without network."""
    plots = {
        "mfu": _heat(result, "mfu", lambda b: b.means.mfu, lambda b: percent(b.means.mfu)),
        "memory": _heat(
            result,
            "memory",
            lambda b: b.peak_reserved_bytes / b.memory_limit_bytes,
            lambda b: memory_words(b),
        ),
        "layout": _heat(result, "layout", lambda b: b.means.mfu, lambda b: _short(b.layout)),
    }
    measured = result.measured
    if measured is not None:
        plots["measured"] = _measured_figure(measured.rows)
    return still_page(
        "map.html",
        "Map of model sizes and GPU counts",
        plots,
        what=f"{result.not_measured}; "
        * bool(result.not_measured)
        + f"{counted(len(result.cells), 'search')}, at most {n_bytes(result.memory_limit_bytes)} a GPU, "
        f"{', '.join(result.only)}",
        headline=_headline(result),
        measured=measured,
        run_head=RUN_HEAD,
        run_numbers_from=RUN_NUMBERS_FROM,
        runs=[] if measured is None else [run_cells(row) for row in measured.rows],
        best=[_cells(cell) for cell in result.cells],
    )


def cell_words(cell: MapCell) -> list[str]:
    """A cell in lines of text: MFU and memory, then the layout."""
    best = cell.best
    if best is None:
        return [NOTHING]
    return [f"{percent(best.means.mfu)} {memory_words(best)}", _short(best.layout)]


def _run_words(row: MeasuredBest) -> str:
    """The layout of a measured run."""
    words = layout_words(row.scenario.parallelism.model_dump(), short=True)
    return f"{' '.join(words)} b{row.scenario.for_training.micro_batch_size}"


def _short(layout: Layout) -> str:
    words = [*layout_words(layout._asdict(), short=True), f"b{layout.micro_batch_size}"]
    if layout.virtual_stages > 1:
        words.append(f"v{layout.virtual_stages}")
    if layout.recompute != "none":
        words.append(f"r:{layout.recompute}")
    return " ".join(words)


def _headline(result: MapResult) -> list[Number]:
    fitting = [
        (cell.best.means.mfu, f"{cell.model} on {counted(cell.gpus, 'GPU')}") for cell in result.cells if cell.best
    ]
    numbers = []
    if fitting:
        (most, its_place), (least, other_place) = max(fitting), min(fitting)
        numbers = [
            Number("Highest MFU", percent(most), its_place, "good"),
            Number("Lowest MFU", percent(least), other_place),
        ]
    legal = sum(cell.counts["legal"] for cell in result.cells)
    empty, cells = len(result.cells) - len(fitting), counted(len(result.cells), "cell")
    return [
        *numbers,
        Number("Layouts looked at", count(legal), f"{empty} of {cells} without one that fits"),
        Number("Searches", seconds(result.wall_s), counted(result.cores, "core")),
    ]


def _heat(result: MapResult, name: str, value: Callable[[BestLayout], float], text: Callable[[BestLayout], str]) -> Any:
    """A rectangle for each cell, coloured by `value` from the least to the most, with `text` in it."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.palettes import Viridis256

    places, models = [f"{n:,}" for n in result.gpus], list(reversed(result.models))
    height = 90 + _ROW_HEIGHT * len(models)
    plot = scatter_plot(name, "GPUs", None, height, "save", x_range=places, y_range=models)
    plot.grid.visible = False
    values = [None if cell.best is None else value(cell.best) for cell in result.cells]
    known = [v for v in values if v is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    shares = [None if v is None else _share(v, low, high) for v in values]
    source = ColumnDataSource(
        {
            **_columns(result.cells),
            "fill": [_NONE if s is None else Viridis256[round(s * 255)] for s in shares],
            "ink": [_PALE if s is not None and s < 0.6 else INK for s in shares],
            "text": [NOTHING if cell.best is None else text(cell.best) for cell in result.cells],
        }
    )
    tiles = plot.rect("x", "model", 0.98, 0.96, source=source, fill_color="fill", line_color=None)
    words = {"text_align": "center", "text_baseline": "middle", "text_color": "ink"}
    plot.text("x", "model", "text", source=source, text_font_size="11px" if name == "layout" else "14px", **words)
    plot.add_tools(HoverTool(renderers=[tiles], tooltips=_TIP))
    return plot


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 1.0


def _columns(cells: Sequence[MapCell]) -> dict[str, list[Any]]:
    texts = [dict.fromkeys(_TEXTS, "–") if c.best is None else _texts(c.best) for c in cells]
    gpus = [f"{c.gpus:,}" for c in cells]
    columns: dict[str, list[Any]] = {"x": gpus, "model": [c.model for c in cells], "gpus": gpus}
    return columns | {key: [t[key] for t in texts] for key in _TEXTS}


def _texts(best: BestLayout) -> dict[str, str]:
    """The figures of a cell's best layout, by `_TEXTS`."""
    texts = (
        f"{mesh_words(best.layout)}; {schedule_words(best.layout)}",
        seconds(best.step_time_s),
        count(best.tokens_per_s_per_gpu),
        percent(best.means.mfu),
        memory_words(best),
    )
    return dict(zip(_TEXTS, texts, strict=True))


def _cells(cell: MapCell) -> tuple[str, ...]:
    best = cell.best
    start = (cell.model, count(cell.gpus))
    if best is None:
        return (*start, NOTHING, "", "", "", "", "", "")
    words, *figures = _texts(best).values()
    return (*start, words, str(best.layout.micro_batch_size), best.layout.recompute, *figures)


def run_cells(row: MeasuredBest) -> tuple[str, ...]:
    """A measured run beside its simulation, under `RUN_HEAD`."""
    measured, simulated = row.tokens_per_s_per_gpu, row.simulated_tokens_per_s_per_gpu
    return (
        row.model,
        count(row.gpus),
        _run_words(row),
        count(measured),
        count(simulated),
        f"{(simulated / measured - 1) * 100:+.1f} %",
        percent(row.mfu),
        percent(row.simulated_mfu),
    )


def _measured_figure(rows: Sequence[MeasuredBest]) -> Any:
    """MFU by number of GPUs: measured with dots, simulated dashed, a colour for each model."""
    from bokeh.models import ColumnDataSource

    places = [f"{n:,}" for n in sorted({row.gpus for row in rows})]
    highest = max(max(row.mfu, row.simulated_mfu) for row in rows)
    plot = scatter_plot("measured", "GPUs", "MFU", 340, "save", x_range=places, y_range=(0, 1.1 * highest))
    dots: list[Any] = []
    for i, model in enumerate(dict.fromkeys(row.model for row in rows)):
        mine = [row for row in rows if row.model == model]
        source = ColumnDataSource(
            {
                "x": [f"{row.gpus:,}" for row in mine],
                "y": [row.mfu for row in mine],
                "simulated": [row.simulated_mfu for row in mine],
                "words": [_run_words(row) for row in mine],
                "id": [row.id for row in mine],
            }
        )
        same: dict[str, Any] = {"source": source, "color": SERIES[i % len(SERIES)]}
        plot.line("x", "simulated", line_dash="dashed", legend_label=f"{model}, the same layout simulated", **same)
        same["legend_label"] = f"{model}, measured"
        plot.line("x", "y", line_width=2, **same)
        dots.append(plot.scatter("x", "y", size=9, **same))
    return explained(plot, dots, "<div><b>@id</b></div><div>@words</div>")
