"""What a simulated step shows of itself in a notebook: its headline numbers, and where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.timeline import Timeline
from sim.views.headline_html import LEFT, result_html
from sim.views.losses import Part, parts_of_step
from sim.views.page import escape, marked
from sim.views.units import percent, seconds

_RIGHT = "text-align:right;padding:2px 14px 2px 0;white-space:nowrap"


def step_html(name: str, result: Mapping[str, Any], timeline: Timeline, losses: Sequence[tuple[Part, str]]) -> str:
    """A step's numbers and parts, its largest losses with advice; `sim.views.timeline_page` makes the whole page."""
    remedies = {part.key: remedy for part, remedy in losses}
    parts = _parts(parts_of_step(result, timeline), float(result["step_time_s"]), remedies)
    return result_html(name, result, parts)


def _parts(parts: tuple[Part, ...], step_s: float, remedies: Mapping[str, str]) -> str:
    """A row a part, with a bar, and for the largest losses what would win them back."""
    longest = max((p.seconds for p in parts), default=0.0) or 1.0
    rows = "".join(
        f'<tr><th style="{LEFT};vertical-align:top;white-space:nowrap">{escape(p.label)}</th>'
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
