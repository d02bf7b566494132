"""The plot that pages of layouts, clusters and sweeps draw their points in."""

from __future__ import annotations

from typing import Any


def scatter_plot(name: str, x_label: str, y_label: str, height: int = 420, **ranges: Any) -> Any:
    """An empty Bokeh figure as wide as the page; `name` is what scripts and tests find it by; `ranges` as Bokeh's."""
    from bokeh.plotting import figure

    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        y_axis_label=y_label,
        tools="pan,wheel_zoom,box_zoom,reset,save",
        active_drag="box_zoom",
        name=name,
        **ranges,
    )
    plot.toolbar.logo = None
    return plot
