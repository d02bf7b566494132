"""Memory over the first steps of a run, simulated and recorded, as a plot of two lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEASURED, SIMULATED = "#1b2733", "#d9822b"


def fullest_rank(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The rank that had most in memory."""
    return max(rows, key=lambda row: max(b for _, b in row["measured"]))


def memory_steps_figure(row: Mapping[str, Any]) -> Any:
    """One rank's bytes over its steps: `row` as `sim.studies.memory_over_steps.over_steps` has it."""
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        height=260,
        sizing_mode="stretch_width",
        name="memory-over-steps",
        toolbar_location=None,
        x_axis_label="steps done",
        y_axis_label="MiB allocated",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    for side, colour, width in (("measured", MEASURED, 2), ("simulated", SIMULATED, 1)):
        x, y = ([p[k] for p in row[side]] for k in (0, 1))
        plot.step(x, [b / 2**20 for b in y], mode="after", line_color=colour, line_width=width, legend_label=side)
    plot.y_range.start = 0  # type: ignore[attr-defined]
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.legend.location = "bottom_right"
    return plot
