"""What a simulation shows of itself in a notebook: its headline numbers, and where the time of a step goes.

Styles stand in the elements and nothing is fetched or run, so that a saved notebook shows the same everywhere. Colours
of text are the notebook's own, light or dark; where a viewer takes styles away, plain tables are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.views.advice import losses_of
from sim.views.headline import headline, layout_line
from sim.views.losses import Part, parts_of_step
from sim.views.page import escape, marked
from sim.views.units import percent, seconds

if TYPE_CHECKING:
    from sim.simulation import Simulation

_LEFT = "text-align:left;padding:2px 14px 2px 0"
_RIGHT = "text-align:right;padding:2px 14px 2px 0;white-space:nowrap"
_MOODS = {"bad": ";color:#c62828", "good": ";color:#2e7d32"}


def simulation_html(simulation: Simulation) -> str:
    """A step's numbers and parts; `sim.views.timeline_page` makes the whole page."""
    parts = parts_of_step(simulation.result, simulation.timeline)
    remedies = {part.key: remedy for part, remedy in losses_of(simulation)}
    return _wrapped(simulation.scenario.name, simulation.result, _parts(parts, simulation.step_time_s, remedies))


def result_html(name: str, result: Mapping[str, Any]) -> str:
    """The numbers of any result, such as a serving workload's."""
    return _wrapped(name, result, "")


def _wrapped(name: str, result: Mapping[str, Any], more: str) -> str:
    notes = "".join(f'<p style="margin:4px 0;color:#c77700">{escape(w)}</p>' for w in result.get("warnings") or ())
    return (
        '<div style="max-width:62em">'
        f'<p style="margin:0 0 4px"><b>{escape(name)}</b> · {escape(layout_line(result))}</p>'
        f"{_numbers(result)}{notes}{more}</div>"
    )


def _numbers(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th style="{_LEFT}">{escape(n.name)}</th><td style="{_LEFT}"><b>{escape(n.value)}</b></td>'
        f'<td style="{_LEFT}{_MOODS.get(n.mood, "")}">{escape(n.note)}</td></tr>'
        for n in headline(result)
    )
    return f'<table style="margin:0"><tbody>{rows}</tbody></table>'


def _parts(parts: tuple[Part, ...], step_s: float, remedies: Mapping[str, str]) -> str:
    """A row a part, with a bar, and for the largest losses what would win them back."""
    longest = max((p.seconds for p in parts), default=0.0) or 1.0
    rows = "".join(
        f'<tr><th style="{_LEFT};vertical-align:top;white-space:nowrap">{escape(p.label)}</th>'
        f'<td style="{_RIGHT};vertical-align:top">{seconds(p.seconds)}</td>'
        f'<td style="{_RIGHT};vertical-align:top">{percent(p.seconds / step_s)}</td>'
        f'<td style="text-align:left;width:100%;white-space:normal">'
        f'<div style="background:{p.colour};border-radius:3px;height:11px;margin:5px 0;'
        f'width:{100 * p.seconds / longest:.1f}%"></div>{marked(remedies.get(p.key, ""))}</td></tr>'
        for p in parts
    )
    return (
        '<p style="margin:10px 0 4px"><b>Where the step goes</b></p>'
        f'<table style="width:100%"><tbody>{rows}</tbody></table>'
    )
