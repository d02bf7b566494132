"""The standalone page of a sweep: step time over one key, a line for each choice of the others, and all in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.units import count, n_bytes, percent, seconds

Result = Mapping[str, Any]
Row = Mapping[str, Any]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b2733")  # Okabe and Ito
MOST_LINES = 12  # of other keys' choices, those with the slowest steps
_TIP = "<div><b>@words</b></div><div>@step a step, @memory</div>"
_LOST = "<div>@lost lost to faults</div>"


def sweep_page(result: Result) -> str:
    """HTML of `sim-sweep/1` that opens without network."""
    title = f"Sweep: {result['name']}"
    what = f"{count(len(result['rows']))} steps over {', '.join(result['vary'])}"
    faults = about_faults(result)
    return still_page(
        "sweep.html",
        title,
        {"sweep": _figure(result)},
        what=what,
        headline=_headline(result),
        faults=faults,
        keys=list(result["vary"]),
        rows=[(row, () if row["refused"] else _cells(row, faults)) for row in result["rows"]],
    )


def words(values: Mapping[str, Any], without: str = "") -> str:
    """Keys by their last parts with their values.

    >>> words({"faults.stragglers.0.rank": 3, "faults.jitter.sigma": 0.1})
    'stragglers.0.rank 3, jitter.sigma 0.1'
    """
    return ", ".join(f"{k.partition('.')[2] or k} {v}" for k, v in values.items() if k != without)


def about_faults(result: Result) -> bool:
    """Whether faults are varied, or cost any of the steps something."""
    return any(key.startswith("faults") for key in result["vary"]) or any(row["lost_s"] for row in result["rows"])


def lost_words(row: Row) -> str:
    """Seconds lost to faults, and which part of the step that is."""
    return f"{seconds(row['lost_s'])} ({percent(row['lost_s'] / row['step_time_s'])})"


def memory_words(row: Row) -> str:
    """The fullest GPU's peak, marked where it is more than the GPU has."""
    return n_bytes(row["peak_memory_bytes"]) + ("" if row["fits_in_memory"] else " ✗")


def _headline(result: Result) -> list[Number]:
    done = [r for r in result["rows"] if not r["refused"]]
    worst = max(done, key=lambda r: r["step_time_s"])
    fitting = [r for r in done if r["fits_in_memory"]]
    fastest = min(fitting or done, key=lambda r: r["step_time_s"])
    left = len(result["rows"]) - len(done)
    numbers = [
        Number("Fastest step that fits", seconds(fastest["step_time_s"]), words(fastest["values"]), "good")
        if fitting
        else Number("Fastest step", seconds(fastest["step_time_s"]), f"{words(fastest['values'])}; none fits", "bad"),
        Number("Slowest step", seconds(worst["step_time_s"]), words(worst["values"])),
        Number("Simulated", count(len(done)), f"{count(left)} cannot be simulated" if left else ""),
    ]
    if about_faults(result):
        most = max(done, key=lambda r: r["lost_s"] / r["step_time_s"])
        numbers.insert(2, Number("Most lost to faults", lost_words(most), words(most["values"])))
    return numbers


def _figure(result: Result) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    faults = about_faults(result)
    key = max(result["vary"], key=lambda k: len(result["vary"][k]))
    names = [str(v) for v in result["vary"][key]]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in result["vary"][key])
    categories: dict[str, Any] = {} if numbers else {"x_range": list(dict.fromkeys(names))}
    plot = figure(
        height=460, sizing_mode="stretch_width", x_axis_label=key, y_axis_label="step time in seconds", name="sweep",
        tools="pan,wheel_zoom,box_zoom,reset,save", active_drag="box_zoom",
        **categories,
    )  # fmt: skip
    plot.toolbar.logo = None
    dots: list[Any] = []
    for i, (name, rows) in enumerate(_lines(result, key)):
        source = ColumnDataSource(_columns(rows, key, numbers))
        colour = _COLOURS[i % len(_COLOURS)]
        shown: dict[str, Any] = {"source": source, "color": colour, "legend_label": name or "step"}
        if faults:
            plot.line("x", "healthy", line_dash="dashed", line_alpha=0.6, **shown)
        plot.line("x", "y", line_width=2, **shown)
        dots.append(plot.scatter("x", "y", size=8, fill_alpha="fits", **shown))
    plot.add_tools(HoverTool(renderers=dots, tooltips=_TIP + _LOST * faults))
    plot.legend.click_policy = "hide"
    plot.add_layout(plot.legend[0], "right")
    return plot


def _lines(result: Result, key: str) -> list[tuple[str, list[Row]]]:
    """Rows by the choice of all keys but one; of many the slowest choices."""
    lines: dict[str, list[Row]] = {}
    for row in result["rows"]:
        if not row["refused"]:
            lines.setdefault(words(row["values"], without=key), []).append(row)
    slowest = sorted(lines, key=lambda name: -max(r["step_time_s"] for r in lines[name]))[:MOST_LINES]
    return [(name, rows) for name, rows in lines.items() if name in slowest]


def _columns(rows: Sequence[Row], key: str, numbers: bool) -> dict[str, list[Any]]:
    ordered = sorted(rows, key=lambda r: r["values"][key]) if numbers else rows
    return {
        "x": [r["values"][key] if numbers else str(r["values"][key]) for r in ordered],
        "y": [r["step_time_s"] for r in ordered],
        "healthy": [r["healthy_s"] for r in ordered],
        "fits": [float(r["fits_in_memory"]) for r in ordered],
        "words": [words(r["values"]) for r in ordered],
        "step": [seconds(r["step_time_s"]) for r in ordered],
        "lost": [lost_words(r) for r in ordered],
        "memory": [memory_words(r) for r in ordered],
    }


def _cells(row: Row, faults: bool) -> list[tuple[float, str]]:
    """Of each number its value and its text."""
    keys = ("step_time_s", "healthy_s", "lost_s") if faults else ("step_time_s",)
    return [
        *((row[k], seconds(row[k])) for k in keys),
        (row["peak_memory_bytes"], memory_words(row)),
        (row["tokens_per_s_per_gpu"], count(row["tokens_per_s_per_gpu"])),
    ]
