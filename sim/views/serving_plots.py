"""The small plots of a serving page: rates, queue and batch over time, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.core.units import count, counted, percent, seconds
from sim.results.figures import FIGURES
from sim.serve.results.records import STATISTICS
from sim.views.palette import BAD, GRID, INK, VERMILION

if TYPE_CHECKING:
    from sim.results.records import Record
    from sim.serve.results.latencies import Seconds
    from sim.serve.results.over_time import Level, OverTime
    from sim.serve.results.records import ServingResult
    from sim.studies.promised_latencies import Promise

LATENCIES = ("time_to_first_token_s", "time_per_output_token_s", "request_latency_s", "inter_token_latency_s")
DRAWN = (("p50", 50.0), ("p90", 90.0), ("p99", 99.0))
FAR_LIMIT = 3.0  # times p99: a promise beyond it is named in words, since the curve would be all at the left
# Lines: readable on white and on the dark page alike. The limit's red is that of the page, which changes with it.
_BLUE, _LIMIT_KEY = "#2b8cc9", "var(--bad)"
_POOLS = (_BLUE, VERMILION)
_TIP = '<div class="tip"><b>@when</b><div>@what</div></div>'
_HEIGHT = 220


class Plot(NamedTuple):
    """A plot with its heading and what its colours mean."""

    name: str
    title: str
    keys: tuple[tuple[str, str], ...]  # colour, words
    figure: Any


class ServingPlots(NamedTuple):
    """Plots of a workload's requests on its page. `table`: a row for each latency, under `head`."""

    over_time: tuple[Plot, ...]
    window_s: tuple[float, float]  # of rates, of levels
    latencies: tuple[Plot, ...]
    head: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    promises: bool  # whether there are limits to keep
    within: float | None  # the part of requests that keep them all by themselves


def serving_plots(
    result: ServingResult,
    history: OverTime,
    found: Mapping[str, Seconds],
    promises: Sequence[Promise] = (),
    within: float | None = None,
) -> ServingPlots:
    """Plots of a served workload, and of the latencies that it was to keep."""
    latencies = [key for key in LATENCIES if key in found]
    return ServingPlots(
        over_time=_over_time(history),
        window_s=(float(np.diff(history.rate_edges_s[:2])[0]), float(np.diff(history.level_edges_s[:2])[0])),
        latencies=tuple([_latency(key, result, found[key], promises) for key in latencies]),
        head=("", *(name.replace("mean", "Mean") for name in STATISTICS), "Slowest", *(["Limits"] if promises else [])),
        table=tuple([_row(key, result, found[key], promises) for key in latencies]),
        promises=bool(promises),
        within=within,
    )


def promise_words(promise: Promise, result: ServingResult) -> str:
    """A promise and whether it was kept."""
    value = getattr(getattr(result, promise.key), promise.statistic)
    kept = "✓ kept" if value <= promise.seconds else "✗ broken"
    return f"{promise.statistic} ≤ {seconds(promise.seconds)} {kept}"


def _row(key: str, result: ServingResult, found: Seconds, promises: Sequence[Promise]) -> tuple[str, ...]:
    stated: Record = getattr(result, key)
    values = [getattr(stated, name) for name in STATISTICS]
    asked = ", ".join([promise_words(p, result) for p in promises if p.key == key])
    return (
        FIGURES[key].name,
        *(seconds(v) for v in (*values, float(found[-1]))),
        *([asked or "–"] if promises else []),
    )


def _over_time(history: OverTime) -> tuple[Plot, ...]:
    from bokeh.models import Range1d

    start, end = float(history.level_edges_s[0]), float(history.level_edges_s[-1])
    time_axis = Range1d(start=start, end=end if end > start else start + 1.0)
    rates = _small("rate", time_axis)
    for colour, what, values in (
        (_BLUE, "arriving", history.arriving_per_s),
        (VERMILION, "finishing", history.finishing_per_s),
    ):
        words = [f"{counted(v, 'request')} a second {what}" for v in values.tolist()]
        _steps(rates, history.rate_edges_s, values, colour, words)
    several = len(history.running) > 1
    pools, on = (dict(zip(_POOLS, levels, strict=False)) for levels in (history.running, history.replicas))
    legend = tuple([(colour, level.name) for colour, level in pools.items()]) if several else ()
    scaled = (_levels("replicas", time_axis, history, on),) if on else ()
    return (
        Plot("rate", "Requests a second", ((_BLUE, "arriving"), (VERMILION, "finishing")), rates),
        Plot("queue", "Requests that wait", (), _levels("queue", time_axis, history, {_BLUE: history.waiting})),
        Plot(
            "batch",
            "Sequences that run",
            legend,
            _levels("batch", time_axis, history, pools),
        ),
        *(Plot("replicas", "Replicas that are on", legend, figure) for figure in scaled),
    )


def _levels(name: str, time_axis: Any, history: OverTime, levels: Mapping[str, Level]) -> Any:
    """Means as lines; up to the most of each window a pale band."""
    plot, edges = _small(name, time_axis), history.level_edges_s
    for colour, level in levels.items():
        most, band = level.most.tolist(), {"step_mode": "after", "fill_color": colour, "fill_alpha": 0.22}
        plot.varea_step(x=edges.tolist(), y1=[0.0] * len(edges), y2=[*most, most[-1]], **band)
    for colour, level in levels.items():  # after all areas, which would dim them
        pairs = zip(level.mean.tolist(), level.most.tolist(), strict=True)
        words = [f"{level.name}: {count(mean)} in the mean, {count(top)} at most" for mean, top in pairs]
        _steps(plot, edges, level.mean, colour, words)
    return plot


def _steps(plot: Any, edges_s: Any, values: Any, colour: str, words: Sequence[str]) -> None:
    """A value for each window between `edges_s`, and its words under the pointer."""
    from bokeh.models import ColumnDataSource, HoverTool

    times, heights = edges_s.tolist(), values.tolist()
    columns = {
        "x": times,
        "y": [*heights, heights[-1]],
        "when": [f"from {seconds(t)}" for t in times],
        "what": [*words, words[-1]],
    }
    source = ColumnDataSource(columns)
    plot.step(x="x", y="y", mode="after", source=source, line_color=colour, line_width=1.6)
    probe = plot.line(x="x", y="y", source=source, line_alpha=0.0)
    plot.add_tools(HoverTool(renderers=[probe], mode="vline", line_policy="prev", tooltips=_TIP))


def _latency(key: str, result: ServingResult, found: Seconds, promises: Sequence[Promise]) -> Plot:
    """The cumulative distribution of one latency, its percentiles, and the limits that it was to keep."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d

    from sim.serve.results.distributions import PERCENTS
    from sim.views.figures import WORDS

    name, stated = key.removesuffix("_s"), getattr(result, key)
    asked = [p for p in promises if p.key == key]
    near = [p for p in asked if p.seconds <= FAR_LIMIT * stated.p99]
    # Right of p99 there is room for its words; what is slower leaves the plot, and the table has the slowest.
    end = max([1.6 * stated.p99, *(1.15 * p.seconds for p in near)])
    plot = _small(name, Range1d(start=0, end=end or 1.0), Range1d(start=0, end=1.03))
    plot.yaxis.ticker = FixedTicker(ticks=[0, 0.25, 0.5, 0.75, 1])
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %")
    shares = PERCENTS / 100
    columns = {
        "x": found.tolist(),
        "y": shares.tolist(),
        "when": [seconds(v) for v in found.tolist()],
        "what": [f"{percent(share)} take no longer" for share in shares.tolist()],
    }
    source = ColumnDataSource(columns)
    line = plot.line(x="x", y="y", source=source, line_color=_BLUE, line_width=2, name=f"cumulative:{key}")
    plot.add_tools(HoverTool(renderers=[line], mode="hline", line_policy="nearest", tooltips=_TIP))
    marks = {
        "x": [getattr(stated, statistic) for statistic, _ in DRAWN],
        "y": [p / 100 for _, p in DRAWN],
        "text": [f"{statistic} {seconds(getattr(stated, statistic))}" for statistic, _ in DRAWN],
    }
    dots = ColumnDataSource(marks)
    plot.scatter(x="x", y="y", source=dots, size=7, fill_color=_BLUE, line_color=None, name=f"marks:{key}")
    below = {"x_offset": 7, "y_offset": 1, "text_baseline": "top", "text_color": INK}
    plot.text("x", "y", "text", source=dots, **below, **WORDS)
    if near:
        limits = [p.seconds for p in near]
        plot.vspan(x=limits, line_color=BAD, line_width=2, line_dash="dashed", name=f"limits:{key}")
    return Plot(name, FIGURES[key].name, tuple([(_LIMIT_KEY, promise_words(p, result)) for p in asked]), plot)


def _small(name: str, x_range: Any, y_range: Any = None) -> Any:
    """A plot that takes part of the page's width: no tools but tooltips, so a finger scrolls the page."""
    from bokeh.models import BasicTicker, CustomJSTickFormatter, DataRange1d, NumeralTickFormatter
    from bokeh.plotting import figure

    from sim.views.figures import CLEAR, TIME_TICKS, style_axes

    plot = figure(
        x_range=x_range,
        y_range=y_range or DataRange1d(start=0, range_padding=0.08),
        height=_HEIGHT,
        sizing_mode="stretch_width",
        name=name,
        tools="",
        toolbar_location=None,
        min_border_right=16,
        **CLEAR,
    )
    plot.toolbar.logo = None
    plot.grid.grid_line_color = GRID
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=4)
    plot.xaxis.formatter = CustomJSTickFormatter(code=TIME_TICKS)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    style_axes(plot)
    return plot
