"""The shell that every page shares: styles, scripts and plots in one file that needs no network.

Whatever came from a scenario passes through `escape`; numbers through `sim.views.units`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape as _escape
from importlib.resources import files
from typing import Any

from sim.timeline import Timeline
from sim.views.palette import style_of
from sim.views.rows import Layout, kinds_of
from sim.views.units import count, finite

_CDN = "https://cdn.jsdelivr.net/"
_READY = """<script>
const waiting = setInterval(() => {
  if (window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle) {
    clearInterval(waiting)
    document.documentElement.dataset.ready = "true"
  }
}, 30)
</script>
"""  # marks the document when all is drawn
_SORT = """<script>
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], at = head.cellIndex
  const up = head.getAttribute("aria-sort") !== "ascending"
  const value = (row) => row.cells[at].dataset.value
  const order = (a, b) => value(a).localeCompare(value(b), "en", {numeric: true})
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort")
  head.setAttribute("aria-sort", up ? "ascending" : "descending")
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)))
})
</script>
"""
_SORT_STYLE = "th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }"


def escape(text: object) -> str:
    """Text for HTML, in element or attribute."""
    return _escape(str(text), quote=True)


def marked(text: str) -> str:
    """Escaped text in which `back-quoted` words are code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))


def page(title: str, body: str, plots: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """A document whose plots page.js brings to life; `data` is for it."""
    assets = files("sim.views") / "assets"
    own = f"<script>window.stepsim = {{data: {json_for_script(data)}}}</script>\n"
    own += f"<script>{(assets / 'far.js').read_text('utf-8')}{(assets / 'page.js').read_text('utf-8')}</script>\n"
    return document(title, body, plots, before=own, after="")


def document(
    title: str, body: str, plots: Mapping[str, Any], before: str = "", after: str = _READY, style: str = ""
) -> str:
    """A whole HTML document that fetches nothing: `body` holds a `data-plot` element for each plot.

    `before` stands before the script that draws the plots, `after` behind it.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, divs = components(dict(plots))
    for name, div in divs.items():
        body = body.replace(f'<div class="plot" data-plot="{name}"></div>', f'<div class="plot">{div}</div>')
    # The library would fetch MathJax for a label that looks like TeX; this page fetches nothing.
    library = Resources(mode="inline", components=["bokeh"]).render_js().replace(_CDN, "data:,")
    css = (files("sim.views") / "assets" / "page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{css}{style}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n{library}\n{before}{script}\n{after}</body></html>\n"
    )


def sortable_page(title: str, body: str, plots: Mapping[str, Any]) -> str:
    """A whole HTML document, as `document`; buttons in the heads of its tables sort them."""
    return document(title, body, plots, after=_READY + _SORT, style=_SORT_STYLE)


def json_for_script(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def view_data(timelines: Sequence[Timeline], layout: Layout) -> dict[str, Any]:
    """What page.js needs to know of the timelines beside the columns that Bokeh holds."""
    styles = {k: style_of(k) for k in kinds_of(timelines)}
    end_s = max((t.step_time_s for t in timelines), default=0.0) or 1.0
    return {
        "details": [[finite(v) for v in d] for t in timelines for d in t.details],
        "rows": [[r.track, r.stream, r.y - r.height / 2, r.y + r.height / 2] for r in layout.rows],
        "kinds": {k: {"label": s.label, "text": s.text} for k, s in styles.items()},
        "categories": [],
        "item": "micro-batch",
        "memory": [],
        "limit_bytes": 0.0,
        "end_s": end_s,
    }


def card(name: str, value: str, note: str = "", mood: str = "") -> str:
    """A headline number; `mood` is good, bad or nothing."""
    return (
        f'<div class="card {mood}"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """A table of cells that are HTML already; columns from `numbers_from` on stand right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        number = ' class="num"'
        return "".join(f"<{tag}{number if i >= numbers_from else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = cells("th", [escape(h) for h in head])
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def swatch(colour: str) -> str:
    """A small square of a colour."""
    return f'<span class="swatch" style="background:{escape(colour)}"></span>'


def legend(timelines: Sequence[Timeline]) -> str:
    """A button per kind that shows or hides it."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-kind="{escape(k)}">{swatch(style_of(k).fill)}'
        f"{escape(style_of(k).label)}</button>"
        for k in kinds_of(timelines)
    )
    return f'<div class="legend" role="group" aria-label="Show or hide kinds">{buttons}</div>'


def merged_note(spans: int) -> str:
    """What a page with many spans says about its wide view."""
    from sim.views.figures import NEAR_MOST

    if spans <= NEAR_MOST:
        return ""
    return (
        f'<p class="hint">{count(spans)} spans: while more than {count(NEAR_MOST)} are in view, a pixel shows the kind '
        "that fills most of its time, the paler the less; zoom in to see each.</p>"
    )


def zoom_controls() -> str:
    """Buttons for what mouse and keys do on the plot, and the sentence that says so."""
    buttons = "".join(
        f'<button type="button" data-zoom="{key}" aria-label="{label}">{text}</button>'
        for key, label, text in (
            ("left", "earlier", "←"),
            ("right", "later", "→"),
            ("in", "zoom in", "+"),
            ("out", "zoom out", "−"),
            ("whole", "whole", "Whole"),
        )
    )
    return (
        f'<div class="zoom" role="group" aria-label="Zoom">{buttons}</div>'
        '<p class="hint">Drag across to zoom in, Ctrl + wheel to zoom, double-click for the whole; '
        'keys: ← → + − 0. Showing <span id="view" aria-live="polite">the whole</span>.</p>'
    )
