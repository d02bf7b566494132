"""The plot that pages of layouts, clusters, sweeps and models draw their points in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.views.palette import BLUE, GREEN, GREY, INK, OCHRE, ORANGE, PURPLE, SKY, VERMILION

TOOLS = "pan,wheel_zoom,box_zoom,reset,save"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # a colour for each (Okabe and Ito)
GROUPS = (*SERIES, OCHRE, INK, "#6b7280", GREY)  # groups beyond these share the last

# Lines between a toolbar's buttons, which Bokeh draws in a light grey on a dark page too.
DIVIDERS = ".bk-divider { background-color: var(--line) !important; }"

# A plot's first width may be a narrow one's, so that a legend goes both ways.
_LEGEND_PLACE = """
const [from, to] = cb_obj.outer_width < 600 ? ["right", "below"] : ["below", "right"]
if (cb_obj.outer_width > 0 && cb_obj[from].includes(legend)) {
  cb_obj.setv({[from]: cb_obj[from].filter((part) => part !== legend), [to]: [...cb_obj[to], legend]})
}
"""


def scatter_plot(
    name: str, x_label: str | None, y_label: str | None, height: int = 420, tools: str = TOOLS, **ranges: Any
) -> Any:
    """An empty Bokeh figure as wide as the page; `name` is what scripts and tests find it by; `ranges` as Bokeh's."""
    from bokeh.plotting import figure

    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        y_axis_label=y_label,
        tools=tools,
        active_drag="box_zoom" if tools == TOOLS else "auto",
        name=name,
        border_fill_color=None,  # of a white one a line is left at the edges of a dark page
        **ranges,
    )
    plot.toolbar.logo = None
    plot.toolbar.stylesheets = [DIVIDERS]
    return plot


def grouped_dots(plot: Any, kind: str, groups: Mapping[str, Mapping[str, Any]], **look: Any) -> list[Any]:
    """A renderer `KIND:NAME` and an entry of the legend for each group of dots; `groups`: columns, `x` and `y` among
    them, by name."""
    from bokeh.models import ColumnDataSource

    dots = []
    for i, (name, columns) in enumerate(groups.items()):
        look |= {"color": GROUPS[min(i, len(GROUPS) - 1)], "name": f"{kind}:{name}", "legend_label": name}
        dots.append(plot.scatter("x", "y", source=ColumnDataSource(dict(columns)), **look))
    return dots


def explained(plot: Any, dots: Sequence[Any], tip: str) -> Any:
    """The plot with `tip` for its dots, and a legend that hides what is clicked: beside it, on a telephone below it."""
    from bokeh.models import CustomJS, HoverTool

    plot.add_tools(HoverTool(renderers=list(dots), tooltips=tip))
    if plot.legend:
        plot.legend.click_policy = "hide"
        legend = plot.legend[0]
        plot.add_layout(legend, "right")
        plot.js_on_change("outer_width", CustomJS(args={"legend": legend}, code=_LEGEND_PLACE))
    return plot
