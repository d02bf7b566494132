"""One side of the explorer: its controls, and the step that they describe, as Bokeh models."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, HoverTool, InlineStyleSheet
from bokeh.models.widgets import CategoricalSlider, Div, Select
from msgspec import Struct

from sim.core.errors import InputError
from sim.core.timeline import COMPUTE_KINDS, Timeline
from sim.core.units import change_percent, seconds
from sim.inputs.scenario import Scenario, load_mapping, load_scenario
from sim.serve.results.other_servers import with_intervals
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.simulation import Simulation, simulate
from sim.views.curves import curve_columns, fullest
from sim.views.explore_state import DEGREES, Choices, Control, keeping_gpus, overrides, too_large
from sim.views.figures import memory_figure, timeline_figure
from sim.views.headline import Number, headline, memory_limit_bytes
from sim.views.page import asset
from sim.views.palette import BLUE, memory_styles, style_of
from sim.views.rows import Layout, kinds_of, tracks_of, used_spans
from sim.views.scenario_words import layout_line
from sim.views.serving_summary import cache_lines
from sim.views.templating import fragment

EXPAND_UP_TO = 5000  # layers' forwards and backwards, of all classes of ranks: so few are drawn operator by operator
INSIDE_LAYERS = ("tp", "cp", "ep")  # groups whose messages have spans in a step that is drawn so, and few in others
MEMORY_POINTS = 1500
WIDGETS = asset("widgets.css")
Simulated = Simulation | ServingSimulation
_TIP = "<div class='tip'><b>@what</b><br>@where<br>@how_long</div>"


class Outcome(Struct, frozen=True):
    """A simulated step or serving workload, or why there is none."""

    simulation: Simulated | None
    problem: str = ""


def attempt(path: Path, chosen: list[str]) -> Outcome:
    """Simulate the file's scenario with overrides; a choice that is not legal comes back in words."""
    try:
        scenario = load_scenario(path, chosen)
        problem = too_large(scenario)
        return Outcome(None, problem) if problem else Outcome(_simulated(scenario))
    except InputError as error:
        place = rf"^({re.escape(str(path))}(:\d+)?: |[^:]+: (?=\w+\.\w+: ))?(--set )?"  # the reader is on the page
        return Outcome(None, re.sub(place, "", str(error)))


def _simulated(scenario: Scenario) -> Simulated:
    """A step operator by operator where that is little to draw."""
    if scenario.inference is not None:
        return simulate_serving(scenario)
    whole = simulate(scenario)
    # Spans would not do as a measure: where messages hinder an action it has one for each operator already.
    a_class = 2 * scenario.micro_batches * scenario.model.layers / scenario.parallelism.pp
    return whole if len(whole.plan.classes) * a_class > EXPAND_UP_TO else whole.by_operator()


def styled(sheet: InlineStyleSheet, text: str = "", name: str | None = None) -> Any:
    """Words on the page, in its style."""
    return Div(text=text, name=name, stylesheets=[sheet], sizing_mode="stretch_width")


class Panel:
    """Controls and pictures of one scenario. `changed` is called after each choice."""

    def __init__(
        self,
        name: str,
        path: Path,
        base: tuple[str, ...],
        controls: tuple[Control, ...],
        choices: Choices,
        sheet: InlineStyleSheet,
        changed: Callable[[], None],
    ) -> None:
        self.name, self.controls, self.choices = name, controls, dict(choices)
        self._path, self._base, self._sheet, self._changed = path, base, sheet, changed
        self._drawn: tuple[Simulated, float, float] | None = None
        self.simulation: Simulated | None = None  # the last one that was possible
        self.possible = False  # whether that is the chosen one
        self.critical = False
        self.kept_gpus: int | None = None  # other degrees follow a changed one, so that this is the number of GPUs
        self._widgets = {c.key: self._widget(c) for c in controls}
        parts = ("message", "facts", "losses")
        self._message, self._facts, self._losses = (styled(sheet, name=f"{part}-{name}") for part in parts)
        self._plots = column(styled(sheet), sizing_mode="stretch_width")
        sliders = [self._widgets[c.key] for c in controls if c.slider]
        menus = [self._widgets[c.key] for c in controls if not c.slider]
        half = (len(sliders) + 1) // 2
        halves = (column(*part, sizing_mode="stretch_width") for part in (sliders[:half], sliders[half:]))
        self.layout = column(
            styled(sheet, fragment("panel_title", name.upper())),
            row(*halves, sizing_mode="stretch_width", spacing=20),
            row(*menus, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            self._message,
            self._facts,
            self._plots,
            self._losses,
            sizing_mode="stretch_width",
            styles={"min-width": "min(440px, 100%)"},
        )
        self.simulate()

    def _widget(self, control: Control) -> Any:
        name = f"{self.name}.{control.key}"
        same: dict[str, Any] = {"title": control.label, "name": name, "value": self.choices[control.key]}
        same |= {"sizing_mode": "stretch_width", "stylesheets": [WIDGETS]}
        options: list[Any] = list(control.options)
        widget: Any = (
            CategoricalSlider(categories=options, bar_color=BLUE, **same)
            if control.slider
            else Select(options=options, styles={"min-width": "118px"}, **same)
        )
        changed = "value_throttled" if control.slider else "value"
        widget.on_change(changed, lambda _a, _old, new: self._choose(control, new))
        return widget

    def _choose(self, control: Control, option: str) -> None:
        if option in control.options and option != self.choices[control.key]:
            chosen = {**self.choices, control.key: option}
            if self.kept_gpus is not None and control.key in DEGREES:
                chosen = keeping_gpus(chosen, control.key, self.kept_gpus, self.controls)
            self.take(chosen)

    def take(self, choices: Choices) -> None:
        """Show other choices, such as the other panel's."""
        self.choices = dict(choices)
        for key, widget in self._widgets.items():
            widget.value = choices[key]
        self.simulate()
        self._changed()

    @property
    def gpus(self) -> int | None:
        """GPUs of the chosen layout."""
        return None if self.simulation is None else self.simulation.scenario.parallelism.ranks

    @property
    def overrides(self) -> list[str]:
        """The command line's and then the chosen ones."""
        return [*self._base, *overrides(self.choices, self.controls)]

    def simulate(self) -> None:
        """Simulate what is chosen; where that cannot be, say why and leave the last picture, faded."""
        outcome = attempt(self._path, self.overrides)
        self.possible = outcome.simulation is not None
        if outcome.simulation is None:
            self._message.text = fragment("problem", outcome.problem)
            self._plots.styles = self._facts.styles = self._losses.styles = {"opacity": "0.35"}
            return
        self.simulation = outcome.simulation
        self._plots.styles = self._facts.styles = self._losses.styles = {"opacity": "1"}
        self._message.text = fragment("notes", self.simulation.outcome.warnings)

    def draw(self, until_s: float, most_bytes: float, other: Simulated | None = None) -> None:
        """Draw the last step that was possible, on axes that reach at least to `until_s` and `most_bytes`; its numbers
        say how they differ from `other`'s."""
        if self.simulation is None:
            return
        self._facts.text = self._words(self.simulation, other)
        if self._drawn == (self.simulation, until_s, most_bytes):
            return
        self._drawn = (self.simulation, until_s, most_bytes)
        timeline = self.simulation.timeline
        self._plots.children = _pictures(self.simulation, max(until_s, timeline.step_time_s), most_bytes, self._sheet)
        self._losses.text = _largest(self.simulation)
        self.outline(self.critical)

    @staticmethod
    def _words(simulation: Simulated, other: Simulated | None) -> str:
        """The layout and the headline, with what differs from the other panel's."""
        batches = simulation.scenario.micro_batches
        plural = "es" * (batches != 1)
        more = f" · {batches} micro-batch{plural}" if simulation.scenario.training is not None else ""
        numbers = _headline(simulation)
        if other is not None:
            numbers = beside(numbers, _headline(other))
        return fragment("facts", layout_line(simulation.scenario) + more, numbers)

    def outline(self, on: bool) -> None:
        """Show or hide the critical path."""
        self.critical = on
        for chart in self._plots.children:
            for renderer in getattr(chart, "renderers", ()):
                if renderer.name == "critical":
                    renderer.visible = on

    def yaml(self) -> str:
        """The file as it stands with the choices made, as YAML; nothing where the file has become unreadable."""
        import yaml

        try:
            data = load_mapping(self._path, self.overrides)
        except InputError:
            return ""
        written: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        return written


@lru_cache(maxsize=2)
def _headline(simulation: Simulated) -> list[Number]:
    """The headline, with the 90 % intervals; kept for both panels, as those of serving take more simulations."""
    if isinstance(simulation, ServingSimulation):
        return headline(with_intervals(simulation))
    return headline(simulation.outcome)


def beside(mine: list[Number], theirs: list[Number]) -> list[Number]:
    """Headline numbers, each with how much it differs from the other scenario's."""
    known, out = {n.name: n.compared for n in theirs}, []
    for number in mine:
        before = known.get(number.name)
        if number.compared is not None and before and abs(number.compared / before - 1) >= 5e-4:
            number = number._replace(note=f"{change_percent(number.compared / before - 1)}; {number.note}")
        out.append(number)
    return out


def _largest(simulation: Simulated) -> str:
    """The largest losses of a step; of a serving workload, what became of requests and cache."""
    if isinstance(simulation, ServingSimulation):
        return fragment("requests", cache_lines(simulation.outcome))
    return fragment("largest", simulation.losses(), simulation.step_time_s or 1.0)


def _pictures(simulation: Simulated, until_s: float, most_bytes: float, sheet: InlineStyleSheet) -> list[Any]:
    whole = isinstance(simulation, ServingSimulation) or simulation.expanded
    kept = used_spans(simulation.timeline, () if whole else INSIDE_LAYERS)
    timeline = simulation.timeline.only(kept)
    critical = np.flatnonzero(np.isin(kept, simulation.critical_rows)).tolist()
    chart, layout = timeline_figure([timeline], tracks_of(timeline), critical)
    chart.x_range.update(start=0.0, end=until_s, bounds=(-0.02 * until_s, 1.02 * until_s))
    _explain(chart, timeline, layout)
    _number(chart)
    curve = simulation.memory[fullest(simulation.memory)]
    limit = memory_limit_bytes(simulation.outcome)
    styles = memory_styles(simulation.scenario)
    memory = memory_figure(chart, limit, curve_columns(curve, until_s, MEMORY_POINTS), styles)
    memory.tools = [t for t in memory.tools if not isinstance(t, HoverTool)]
    memory.y_range.end = 1.08 * (max(limit, most_bytes) if limit < 3 * most_bytes else most_bytes)
    kinds = [style_of(k) for k in kinds_of([timeline])]
    above = styled(sheet, fragment("keys", kinds))
    between = styled(sheet, fragment("keys", list(styles.values()), f"Memory of rank {curve.rank}: "))
    return [above, chart, between, memory]


def _explain(chart: Any, timeline: Timeline, layout: Layout) -> None:
    """Hovering with words made here, since two charts share the page."""
    chart.tools = [t for t in chart.tools if not isinstance(t, HoverTool)]
    bars = [r for r in chart.renderers if (r.name or "").startswith("exact:") and r.visible]
    for bar in bars:
        label, data = style_of(bar.name.partition(":")[2]).label, dict(bar.data_source.data)
        names = [timeline.details[i].name for i in data["detail"]]
        data["what"] = [label if name in ("", label) else f"{label}: {name}" for name in names]
        data["where"] = [
            ", ".join((layout.rows[r].track, layout.rows[r].stream, *_place(s, m)))
            for r, s, m in zip(data["row"], data["stage"], data["micro"], strict=True)
        ]
        data["how_long"] = [
            f"{seconds(float(e - s))}, from {seconds(float(s))}"
            for s, e in zip(data["start"], data["end"], strict=True)
        ]
        bar.data_source.data = data
    chart.add_tools(HoverTool(renderers=bars, tooltips=_TIP, point_policy="follow_mouse"))


def _place(stage: int, micro_batch: int) -> list[str]:
    return [f"{word} {n}" for word, n in (("stage", stage), ("micro-batch", micro_batch)) if n >= 0]


def _number(chart: Any) -> None:
    """Numbers of micro-batches on bars that are wide enough for them in the whole view."""
    columns: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "color": []}
    least_s = 0.022 * float(chart.x_range.end)
    for bar in (r for r in chart.renderers if (r.name or "").startswith("exact:") and r.visible):
        kind, data = bar.name.partition(":")[2], bar.data_source.data
        if kind not in COMPUTE_KINDS:
            continue
        for i in np.flatnonzero((data["end"] - data["start"] > least_s) & (data["micro"] >= 0)).tolist():
            columns["x"].append(float(data["start"][i] + data["end"][i]) / 2)
            columns["y"].append(float(data["y"][i]))
            columns["text"].append(str(data["micro"][i]))
            columns["color"].append(style_of(kind).text)
    label = next(r for r in chart.renderers if r.name == "labels")
    label.data_source = ColumnDataSource(columns)
