"""The timeline and the memory plot as Bokeh models. `assets/page.js` brings them to life in the browser.

Sources hold plain columns, one source per kind of span: a kind can be hidden, and colours need no column.
Models that the scripts look for carry names: `timeline`, `memory`, `exact:F`, `far`, `labels`, `critical`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    LinearAxis,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from sim.core.timeline import COMPUTE_KINDS, Timeline
from sim.views.level_of_detail import add_clip, add_far
from sim.views.palette import BAD, FAINT, GRID, INK, MEMORY, OCHRE, ORANGE, VERMILION, Style, style_of
from sim.views.rows import Layout, Track, kinds_of, lanes_of, lay_out

if TYPE_CHECKING:
    from sim.results.step import SpanWaits

SPAN = {"y": "y", "left": "start", "right": "end", "height": "height"}  # a bar's place, by the columns of its source
NEAR_MOST = 5000  # spans in view that are drawn one by one
EDGED = 0.003  # of the axis: of a narrower bar a white edge would be all that shows
FONT = "Inter, 'Segoe UI', system-ui, sans-serif"
CLEAR: dict[str, Any] = {"outline_line_color": None, "background_fill_color": None, "border_fill_color": None}
WORDS = {"text_font_size": "11px", "text_font": {"value": FONT}}

TIME_TICKS = """
const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(tick) || 1
const [scale, unit] = step >= 0.5 ? [1, "s"] : step >= 0.0005 ? [1e3, "ms"] : [1e6, "µs"]
const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step * scale) - 1e-6)))
return (tick * scale).toFixed(digits) + " " + unit
"""
_BYTE_TICKS = "return window.stepsim ? stepsim.bytes(tick) : String(tick)"
_HOVER = "return window.stepsim ? stepsim.hover(format, special_vars) : ''"
_TIP = '<div class="tip"><b>{0}{{title}}</b><div style="white-space:pre-line">{0}{{body}}</div></div>'
_MEMORY_HOVER = "return window.stepsim ? stepsim.memoryHover(format, special_vars) : ''"


def timeline_figure(
    timelines: Sequence[Timeline],
    tracks: Sequence[Track],
    critical: Sequence[int] = (),
    until_s: float = 0.0,
    waits: SpanWaits | None = None,
) -> tuple[Any, Layout]:
    """A plot of one or more timelines on one axis: `tracks` tell which of their classes stand where.

    The axis reaches to the end of the longest, or to `until_s` if that is later. `waits` are of a single timeline.
    """
    layout = lay_out(timelines, tracks)
    end_s = max((t.step_time_s for t in timelines), default=0.0) or 1.0
    far_s = max(end_s, until_s)
    plot = _frame(
        "timeline",
        Range1d(start=0, end=far_s, bounds=(-0.02 * far_s, 1.02 * far_s), min_interval=end_s * 1e-7),
        Range1d(start=layout.height, end=0),
        int(layout.height) + 60,
    )
    longest = max((len(b[0]) for b in layout.bands), default=0)
    longest_row = max((len(row.stream) for row in layout.rows), default=0)
    plot.min_border_left = plot.min_border_left + max(0, longest - 6) * 8 + max(0, longest_row - 8) * 6
    _row_axes(plot, layout)
    _backgrounds(plot, layout, end_s)
    renderers = _bars(plot, timelines, layout, EDGED * far_s, waits)
    if len(critical):
        _critical(plot, timelines[0], layout, critical)
    _marks(plot)
    none = ColumnDataSource({"x": [], "y": [], "text": [], "color": []})
    placed = {"text_color": "color", "text_align": "center", "text_baseline": "middle"}
    plot.text("x", "y", "text", name="labels", source=none, **placed, **WORDS)
    plot.add_tools(
        HoverTool(
            renderers=renderers,
            formatters={"@start": CustomJSHover(code=_HOVER)},
            point_policy="follow_mouse",
            tooltips=_TIP.format("@start"),
        )
    )
    return plot, layout


def memory_figure(
    timeline: Any, limit_bytes: float, curve: Mapping[str, Sequence[float]], categories: Mapping[str, Style] = MEMORY
) -> Any:
    """Stacked areas of memory by category: of `curve` (time and the categories), then of a chosen rank."""
    tops = np.cumsum([curve[c] for c in categories], axis=0)
    base = np.zeros(len(curve["time"]))
    source = ColumnDataSource({"time": curve["time"], "base": base, **dict(zip(categories, tops, strict=True))})
    top = 1.08 * max(float(tops[-1].max(initial=0.0)), 1.0)
    plot = _frame("memory", timeline.x_range, Range1d(start=0, end=top), 260)
    plot.xaxis.axis_label = "time"
    plot.min_border_left = timeline.min_border_left
    plot.yaxis.formatter = CustomJSTickFormatter(code=_BYTE_TICKS)
    plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2.0**i for i in range(10)], desired_num_ticks=5)
    below, areas = "base", {"x": "time", "step_mode": "after", "source": source, "fill_alpha": 0.92}
    for category, style in categories.items():
        plot.varea_step(y1=below, y2=category, fill_color=style.fill, name=f"memory:{category}", **areas)
        below = category
    total = plot.step(x="time", y=below, mode="after", source=source, line_color=INK, line_width=1, name="memory:total")
    probe = plot.line(x="time", y=below, source=source, line_alpha=0.0, name="memory:probe")
    # All categories at the time under the pointer, wherever it is over the line.
    plot.add_tools(
        HoverTool(
            renderers=[probe],
            mode="vline",
            line_policy="prev",
            attachment="right",
            formatters={"@time": CustomJSHover(code=_MEMORY_HOVER)},
            tooltips=_TIP.format("@time"),
        )
    )
    if limit_bytes:
        plot.hspan(y=limit_bytes, line_color=BAD, line_width=2, line_dash="dashed", name="limit")
    total.level = "glyph"
    return plot


def _frame(name: str, x_range: Any, y_range: Any, height: int) -> Any:
    zoom = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    pan, box = PanTool(dimensions="width"), BoxZoomTool(dimensions="width")
    plot = figure(
        x_range=x_range,
        y_range=y_range,
        height=height,
        sizing_mode="stretch_width",
        name=name,
        tools=[pan, box, zoom, ResetTool(), SaveTool(), CrosshairTool(dimensions="height", line_color=FAINT)],
        active_drag=box,
        active_scroll=zoom,
        toolbar_location=None,
        min_border_left=130,
        min_border_right=14,
        lod_threshold=None,
        **CLEAR,
    )
    plot.toolbar.logo = None
    plot.xgrid.grid_line_color = GRID
    plot.ygrid.grid_line_color = None
    plot.xaxis.formatter = CustomJSTickFormatter(code=TIME_TICKS)
    style_axes(plot)
    return plot


def style_axes(plot: Any) -> None:
    """Quiet axes in the page's font."""
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = None
        axis.minor_tick_line_color = None
        axis.major_tick_line_color = "#b8c1cb"
        axis.major_label_text_color = FAINT
        axis.major_label_text_font = FONT
        axis.axis_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = FAINT


def _row_axes(plot: Any, layout: Layout) -> None:
    """Streams beside their rows; outside of them, one label a track."""
    axis = plot.yaxis[0]
    thinnest = min((r.height for r in layout.rows), default=0.0)
    labelled = layout.rows if thinnest > 5 else ()
    axis.ticker = FixedTicker(ticks=[row.y for row in labelled])
    axis.major_label_overrides = {row.y: row.stream for row in labelled}
    axis.major_label_text_font_size = f"{max(7, min(11, int(thinnest)))}px"
    axis.major_tick_line_color = None
    every = 1 + int(14 * len(layout.bands) / max(layout.height, 1.0))  # labels need 14 pixels each
    bands = layout.bands[::every]
    middles = [(top + bottom) / 2 for _, top, bottom in bands]
    outer = LinearAxis(
        ticker=FixedTicker(ticks=middles),  # type: ignore[arg-type]
        axis_line_color=None,
        major_tick_line_color=None,
        minor_tick_line_color=None,
        major_label_text_color=INK,
        major_label_text_font=FONT,
        major_label_text_font_size="12px",
        major_label_text_font_style="bold",
    )
    outer.major_label_overrides = {m: band[0] for m, band in zip(middles, bands, strict=True)}
    plot.add_layout(outer, "left")


def _backgrounds(plot: Any, layout: Layout, end_s: float) -> None:
    """Bands that keep tracks apart, and in each row a pale bar: where it shows, nothing runs."""
    tops, bottoms = [b[1] for b in layout.bands][1::2], [b[2] for b in layout.bands][1::2]
    bands = {"left": [-end_s] * len(tops), "right": [2 * end_s] * len(tops), "top": tops, "bottom": bottoms}
    rows = {"y": [r.y for r in layout.rows], "height": [r.height for r in layout.rows], "left": 0, "right": end_s}
    behind = {"line_color": None, "level": "underlay"}
    plot.quad(**bands, **behind, fill_color="#f4f6f8", name="bands")
    plot.hbar(**rows, **behind, fill_color="#dfe5eb", fill_alpha=0.75, name="rows")


def _marks(plot: Any) -> None:
    """Frames of spans that were searched for, of the pinned one, and the shade of a range: all empty at first."""
    for name, colour, width in (("found", VERMILION, 1.5), ("pinned", INK, 3)):
        none = ColumnDataSource({"start": [], "end": [], "y": [], "height": []})
        plot.hbar(**SPAN, fill_color=None, line_color=colour, line_width=width, source=none, name=name)
    shade: dict[str, Any] = {"fill_color": ORANGE, "fill_alpha": 0.2, "line_color": OCHRE, "line_alpha": 0.8}
    plot.add_layout(BoxAnnotation(name="range", left=0, right=0, visible=False, **shade))


def axis_figure(timeline: Any) -> Any:
    """The time axis of a timeline by itself, to stay in sight while its rows are scrolled."""
    plot = _frame("axis", timeline.x_range, Range1d(start=0, end=1), 34)
    plot.line([0], [0], line_alpha=0.0)
    plot.update(min_border_left=timeline.min_border_left, min_border_top=0, min_border_bottom=0)
    plot.yaxis.visible = False
    plot.xgrid.visible = False
    plot.add_layout(plot.xaxis[0], "above")
    plot.below = []
    return plot


def _bars(
    plot: Any, timelines: Sequence[Timeline], layout: Layout, edged_s: float, waits: SpanWaits | None
) -> list[Any]:
    """Draw the spans, one renderer for each kind. With very many spans renderers start empty; those in view fill them.

    Computations of `edged_s` and more have white edges, which tell one from the next.
    """
    kinds = kinds_of(timelines)
    spans = _columns(timelines, layout, kinds)
    if waits is not None:
        spans |= {"task": waits.task.astype(np.int32), "after": waits.after.astype(np.int32)}
    many = len(spans["start"]) > NEAR_MOST
    renderers = []
    for i, kind in enumerate(kinds):
        mine = np.flatnonzero(spans["kind"] == i)
        columns = {key: values[mine[:0] if many else mine] for key, values in spans.items() if key != "kind"}
        fill = style_of(kind).fill
        edge: Any = fill
        if kind in COMPUTE_KINDS and not many:
            columns["edge"] = np.where(columns["end"] - columns["start"] >= edged_s, "#ffffff", fill).tolist()
            edge = "edge"
        look = {"fill_color": fill, "line_color": edge, "line_width": 0.5, "line_alpha": 0.8}
        look |= {"hover_line_color": INK, "hover_line_alpha": 1.0, "hover_fill_color": fill}
        source = ColumnDataSource(columns)
        renderers.append(plot.hbar(**SPAN, **look, name=f"exact:{kind}", source=source, visible=not many))
    if many:
        add_far(plot, spans, layout, kinds, renderers, NEAR_MOST, _TIP.format("$x"))
    else:
        add_clip(plot, layout, kinds, renderers)
    return renderers


def _columns(timelines: Sequence[Timeline], layout: Layout, kinds: Sequence[str]) -> dict[str, Any]:
    """Columns of every span: its place on the plot, what it is, and where its details stand."""
    parts, details = [], 0
    for timeline, row in zip(timelines, layout.row_of, strict=True):
        lane, lanes = lanes_of(row, timeline.start_s, timeline.end_s)
        places = np.array([kinds.index(k) if k in kinds else -1 for k in timeline.kinds], dtype=np.int32)
        parts.append(
            {
                **_geometry(layout, row, lane, lanes),
                "start": timeline.start_s,
                "end": timeline.end_s,
                "row": row.astype(np.int32),
                "lane": lane.astype(np.int32),
                "kind": places[timeline.kind],
                "stage": timeline.stage.astype(np.int32),
                "micro": timeline.micro_batch.astype(np.int32),
                "detail": (timeline.detail + details).astype(np.int32),
            }
        )
        details += len(timeline.details)
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _geometry(layout: Layout, row: Any, lane: Any, lanes: Any) -> dict[str, Any]:
    y = np.array([r.y for r in layout.rows])[row]
    height = np.array([r.height for r in layout.rows])[row]
    return {"y": y + height * ((lane + 0.5) / lanes - 0.5), "height": height / lanes}


def _critical(plot: Any, timeline: Timeline, layout: Layout, critical: Sequence[int]) -> None:
    """Lines under the spans that the step's end waits for, shown on demand."""
    chosen = np.asarray(critical, dtype=np.int64)
    row = layout.row_of[0]
    lane, lanes = lanes_of(row, timeline.start_s, timeline.end_s)
    where = _geometry(layout, row[chosen], lane[chosen], lanes[chosen])
    lines = {
        "y": where["y"] + 0.4 * where["height"],  # the axis points down
        "height": 0.2 * where["height"],
        "start": timeline.start_s[chosen],
        "end": timeline.end_s[chosen],
        "row": row[chosen].astype(np.int32),
    }
    black = {"fill_color": "#000000", "line_color": "#000000", "line_width": 1}
    plot.hbar(**SPAN, source=ColumnDataSource(lines), visible=False, name="critical", **black)
