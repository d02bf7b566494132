"""Level of detail of a timeline with many spans: an image that assets/far.js draws zoomed out, bars zoomed in.

Bars are drawn of spans in view only, of few spans too: Bokeh draws an edge of those outside at the edge of the plot.

A plot of ten thousand bars takes seconds to draw where there is no graphics card. The picture has a line of PIXELS
pixels for each row; its cost does not grow with the number of spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, CustomJS, CustomJSHover, HoverTool

from sim.views.palette import style_of
from sim.views.rows import Layout

PIXELS = 1400
_REFINE = "window.stepsim?.refine?.({plot, spans, far, near, rows, kinds, colours, pixels, most})"
_CLIP = "window.stepsim?.refine?.({plot, near, rows, kinds, pixels, most: Infinity})"
_HOVER = "return window.stepsim?.farHover ? stepsim.farHover(format, special_vars, {plot, spans, rows, pixels}) : ''"


def add_far(
    plot: Any, spans: Mapping[str, Any], layout: Layout, kinds: Sequence[str], near: Sequence[Any], most: int, tip: str
) -> None:
    """Add the picture, and the callback that chooses between it and the bars of `near`, one renderer a kind.

    `spans` are columns of every span, `kind` counting in `kinds`; bars are drawn of up to `most` spans in view.
    """
    order = np.lexsort((spans["start"], spans["row"]))
    source = ColumnDataSource({key: values[order] for key, values in spans.items()})
    count = len(layout.rows)
    far = plot.image_rgba(
        image="image", x="x", y="y", dw="dw", dh="dh", name="far", source=_blank(spans, layout), level="glyph"
    )
    shared = {"plot": plot, "spans": source, "rows": count, "pixels": PIXELS}
    args = {
        **shared,
        "far": far,
        "near": list(near),
        "kinds": list(kinds),
        "most": most,
        # `#rrggbb` as the number whose bytes in memory are red, green, blue and a zero for opacity
        "colours": [int.from_bytes(bytes.fromhex(style_of(k).fill[1:]), "little") for k in kinds],
    }
    _on_moves(plot, CustomJS(args=args, code=_REFINE))
    hover = HoverTool(renderers=[far], tooltips=tip, point_policy="follow_mouse")
    hover.formatters = {"$x": CustomJSHover(args=shared, code=_HOVER)}
    plot.add_tools(hover)


def add_clip(plot: Any, layout: Layout, kinds: Sequence[str], near: Sequence[Any]) -> None:
    """Draw of `near`, one renderer a kind that holds all its spans, only those in view."""
    args = {"plot": plot, "near": list(near), "rows": len(layout.rows), "kinds": list(kinds), "pixels": PIXELS}
    _on_moves(plot, CustomJS(args=args, code=_CLIP))


def _on_moves(plot: Any, callback: CustomJS) -> None:
    plot.js_on_change("inner_width", callback)
    for end in ("start", "end"):
        plot.x_range.js_on_change(end, callback)


def _blank(spans: Mapping[str, Any], layout: Layout) -> ColumnDataSource:
    """An empty line of pixels for each row, one above the other where spans of a row overlap."""
    lanes = np.ones(len(layout.rows), dtype=np.int64)
    np.maximum.at(lanes, spans["row"], spans["lane"] + 1)
    height = np.array([r.height for r in layout.rows])
    return ColumnDataSource(
        {
            "image": [np.zeros((n, PIXELS), dtype=np.uint32) for n in lanes.tolist()],
            "x": np.zeros(len(lanes)),
            "dw": np.ones(len(lanes)),
            "y": np.array([r.y for r in layout.rows]) - height / 2,
            "dh": height,
        }
    )
