"""The explorer's page for one visitor: two panels, a link that restores both, and their YAML to save."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bokeh.document import Document
from bokeh.events import DocumentReady, Event
from bokeh.layouts import column, row
from bokeh.models import CustomJS, InlineStyleSheet
from bokeh.models.widgets import Button, TextInput, Toggle

from sim.inputs.scenario import Scenario, load_scenario
from sim.simulation import Simulation
from sim.views.explore_panel import WIDGETS, Panel, Simulated, styled
from sim.views.explore_state import controls_of, from_query, to_query
from sim.views.page import asset
from sim.views.templating import fragment

_LINK = "history.replaceState(null, '', cb_obj.value ? '?' + cb_obj.value : location.pathname)"
MARGIN = (14, 26, 30, 26)  # pixels around all of the page
_COPY = "navigator.clipboard.writeText(location.href)"


def open_explorer(document: Document, path: Path, base: tuple[str, ...] = ()) -> None:
    """Send a page that says what is simulated, and draw the explorer once a browser shows that."""
    scenario = load_scenario(path, base)
    css, script = asset("page.css"), asset("far.js")
    sheet = InlineStyleSheet(css=re.sub(r"(?s):root.*?\}", "", css) + asset("explorer.css"))
    page = asset("explorer.html") % (css, script, asset("theme.js"))
    document.template = page  # type: ignore[assignment]  # Bokeh makes a Template of text
    document.title = f"{scenario.name} · explore"
    waiting = styled(sheet, fragment("waiting", scenario.name), "waiting")
    waiting.margin = MARGIN
    document.add_root(waiting)

    def draw(_event: Event) -> None:
        if waiting in document.roots:  # a browser that comes back says again that it is ready
            document.remove_root(waiting)
            try:
                Explorer(document, scenario, path, base, sheet).show()
            except Exception as error:
                said = styled(sheet, fragment("failed", scenario.name, f"{type(error).__name__}: {error}"), "failed")
                said.margin = MARGIN
                document.add_root(said)
                traceback.print_exc()  # raised again, Bokeh would not send the page

    document.on_event(DocumentReady, draw)


class Explorer:
    """The page that one visitor sees. Everything a browser can send is a choice among stated options."""

    def __init__(
        self, document: Document, scenario: Scenario, path: Path, base: tuple[str, ...], sheet: InlineStyleSheet
    ) -> None:
        self._document, self._sheet = document, sheet
        self._controls, self._title = controls_of(scenario), scenario.name
        request: Any = getattr(document.session_context, "request", None)
        link = request.arguments if request is not None else {}
        self._verdict = styled(self._sheet, name="verdict")
        self._link = TextInput(visible=False, name="link")
        self._link.js_on_change("value", CustomJS(code=_LINK))
        self.panels = tuple(
            Panel(name, path, base, self._controls, from_query(name, link, self._controls), self._sheet, self._redraw)
            for name in ("a", "b")
        )
        self._critical = Toggle(
            label="Highlight critical path",
            name="mark-critical",
            active=link.get("critical") == [b"true"],
            visible=scenario.training is not None,
        )
        self._kept = Toggle(label="Keep GPUs", name="keep-gpus", active=link.get("gpus") != [b"free"])
        self._kept.on_change("active", lambda _a, _old, new: self._keep(bool(new)))
        self._critical.on_change("active", lambda _a, _old, new: self._outline(bool(new)))
        self._yaml = [TextInput(visible=False, name=f"yaml-{p.name}") for p in self.panels]

    def show(self) -> None:
        """Put the panels on the page and draw them."""
        a, b = self.panels
        root = column(
            styled(self._sheet, fragment("title", self._title)),
            row(*self._buttons(), sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            self._verdict,
            row(a.layout, b.layout, sizing_mode="stretch_width", spacing=36, styles={"flex-wrap": "wrap"}),
            self._link,
            *self._yaml,
            sizing_mode="stretch_width",
            margin=MARGIN,
        )
        self._outline(self._critical.active)
        self._keep(self._kept.active)
        self._document.add_root(root)

    def _buttons(self) -> list[Any]:
        a, b = self.panels
        buttons: list[Any] = []
        for text, source, target in (("Copy A to B", a, b), ("Copy B to A", b, a)):
            button = Button(label=text, name=text)
            button.on_click(lambda source=source, target=target: target.take(source.choices))
            buttons.append(button)
        link = Button(label="Copy link", name="copy-link")
        link.js_on_click(CustomJS(code=_COPY))
        buttons.append(link)
        for panel, written in zip(self.panels, self._yaml, strict=True):
            save = Button(label=f"Save {panel.name.upper()} as YAML", name=f"save-{panel.name}")
            save.js_on_click(CustomJS(args={"yaml": written, "name": panel.name}, code=asset("save.js")))
            buttons.append(save)
        buttons += [self._kept, self._critical]
        for button in buttons:
            button.stylesheets = [WIDGETS]
        return buttons

    def _keep(self, on: bool) -> None:
        """Tell whether degrees follow each other, so that each panel keeps the GPUs that it has now."""
        for panel in self.panels:
            panel.kept_gpus = panel.gpus if on else None
        self._redraw()

    def _outline(self, on: bool) -> None:
        for panel in self.panels:
            panel.outline(on)
        self._redraw()

    def _redraw(self) -> None:
        shown = [p.simulation for p in self.panels if p.simulation is not None]
        until_s = max((s.timeline.step_time_s for s in shown), default=0.0)
        most_bytes = max((s.outcome.peak_memory_bytes for s in shown), default=1.0)
        for panel, other, text in zip(self.panels, reversed(self.panels), self._yaml, strict=True):
            compared = panel is self.panels[1] and all(p.possible for p in self.panels)
            panel.draw(until_s, most_bytes, other.simulation if compared else None)
            text.value = panel.yaml()
        self._verdict.text = self._words()
        differing = [pair for p in self.panels for pair in to_query(p.name, p.choices, self._controls)]
        modes = [("critical", "true")] * self._critical.active + [("gpus", "free")] * (not self._kept.active)
        self._link.value = urlencode([*differing, *modes])

    def _words(self) -> str:
        """A against B in a sentence: throughput per GPU, for layouts may differ in size. Nothing while one of them
        shows what was possible before its last choice."""
        a, b = (p.simulation if p.possible else None for p in self.panels)
        if a is None or b is None:
            return ""
        (ours, first), (theirs, second) = _pace(a), _pace(b)
        if abs(ours / theirs - 1) < 1e-9:
            return fragment("equal")
        (better, high), (worse, low) = sorted((("A", ours), ("B", theirs)), key=lambda x: -x[1])
        what = "Steps" if isinstance(a, Simulation) else "Median latencies"
        return fragment("verdict", better, worse, high / low, what, first, second)


def _pace(simulation: Simulated) -> tuple[float, float]:
    """Tokens a second and GPU, trained or written, and the seconds of the step or of the median request."""
    if isinstance(simulation, Simulation):
        return simulation.outcome.tokens_per_s_per_gpu, simulation.timeline.step_time_s
    return simulation.outcome.output_tokens_per_s_per_gpu, simulation.outcome.request_latency_s.p50
