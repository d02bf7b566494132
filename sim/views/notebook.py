"""Results in a notebook: headline numbers, warnings and, for a step, where its time goes.

Colours of text are the notebook's own, light or dark; where a viewer takes styles away, plain tables are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.core.timeline import Timeline
from sim.results.losses import LossShare, parts_of_step
from sim.views.headline import headline
from sim.views.scenario_words import layout_line
from sim.views.templating import render

if TYPE_CHECKING:
    from sim.results.result import StepResult
    from sim.serve.results.records import ServingResult


def result_html(result: StepResult | ServingResult, **parts: Any) -> str:
    """The numbers of any result, on one line: a notebook that becomes Markdown ends HTML at an empty one."""
    values = {"parts": None, "result": result, "headline": headline(result), **parts}
    return "".join(render("notebook.html", layout_line=layout_line(result.scenario), **values).splitlines())


def step_html(result: StepResult, timeline: Timeline, losses: Sequence[tuple[LossShare, str]]) -> str:
    """A step's numbers and parts, its largest losses with advice; `sim.views.timeline_page` makes the whole page."""
    remedies = {part.key: remedy for part, remedy in losses}
    return result_html(result, parts=parts_of_step(result, timeline), remedies=remedies)
