"""The shell of every page: styles, scripts and plots in one file that needs no network. `templates` has its HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from sim.core.timeline import Timeline
from sim.core.units import finite
from sim.views.palette import style_of
from sim.views.rows import Layout, kinds_of
from sim.views.templating import render

TIMELINE_SCRIPTS = ("far.js", "page.js", "rows.js", "pin.js", "measure.js", "link.js")
_CDN = "https://cdn.jsdelivr.net/"


def page(template: str, title: str, plots: Mapping[str, Any], data: Mapping[str, Any], **values: Any) -> str:
    """A document whose plots page.js brings to life; `data` is for it."""
    from sim.views.figures import axis_figure

    own = f"window.stepsim = {{data: {json_for_script(data)}}}"
    scripts = "".join(asset(name) for name in TIMELINE_SCRIPTS)
    plots = {"axis": axis_figure(plots["timeline"]), **plots}
    return _document(template, title, plots, [own, scripts], [], **values)


def still_page(template: str, title: str, plots: Mapping[str, Any], **values: Any) -> str:
    """A document whose plots need no script of ours."""
    return _document(template, title, plots, [], [asset("ready.js")], **values)


def _document(
    template: str, title: str, plots: Mapping[str, Any], before: Sequence[str], after: Sequence[str], **values: Any
) -> str:
    """A whole HTML document that fetches nothing. `before` and `after` are scripts around that which draws `plots`.

    Light and dark, and what tables can do, are the same on every page.
    """
    from markupsafe import Markup

    library, draw, divs = _drawn(plots) if plots else ("", "", {})

    def scripts(texts: Sequence[str]) -> Markup:
        return Markup("".join(f"<script>{text}</script>\n" for text in texts))

    return render(
        template,
        title=title,
        css=Markup(asset("page.css")),
        library=Markup(library),
        draw=Markup(draw),
        before=scripts(before),
        after=scripts([*after, asset("theme.js"), asset("tables.js")]),
        plots={name: Markup(div) for name, div in divs.items()},
        **values,
    )


def _drawn(plots: Mapping[str, Any]) -> tuple[str, str, Mapping[str, str]]:
    """Bokeh itself, the script that draws, and the elements that it draws in."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    draw, divs = components(dict(plots))
    # The library would fetch MathJax for a label that looks like TeX; this page fetches nothing.
    return Resources(mode="inline", components=["bokeh"]).render_js().replace(_CDN, "data:,"), draw, divs


def asset(name: str) -> str:
    """A style sheet or script of the pages."""
    return (files("sim.views") / "assets" / name).read_text("utf-8")


def json_for_script(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def view_data(timelines: Sequence[Timeline], layout: Layout) -> dict[str, Any]:
    """Return what page.js needs to know of the timelines beside the columns that Bokeh holds."""
    styles = {k: style_of(k) for k in kinds_of(timelines)}
    end_s = max((t.step_time_s for t in timelines), default=0.0) or 1.0
    return {
        "details": [[finite(v) for v in d] for t in timelines for d in t.details],
        "rows": [[r.track, r.stream, r.y - r.height / 2, r.y + r.height / 2] for r in layout.rows],
        "bands": [list(band) for band in layout.bands],
        "sizes": {t.label: len(timelines[t.timeline].classes[t.class_index].ranks) for t in layout.tracks},
        "single": all(int(t.micro_batch.max(initial=-1)) <= 0 for t in timelines),
        "kinds": {k: {"label": s.label, "text": s.text} for k, s in styles.items()},
        "categories": [],
        "item": "micro-batch",
        "memory": [],
        "limit_bytes": 0.0,
        "end_s": end_s,
    }
