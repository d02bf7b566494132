"""What a simulated step shows of itself in a notebook: its headline numbers and its largest losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.advice import losses_of
from sim.views.headline import headline, layout_line
from sim.views.page import escape, marked
from sim.views.units import percent, seconds

if TYPE_CHECKING:
    from sim.simulation import Simulation

_LEFT = 'style="text-align:left"'


def simulation_html(simulation: Simulation) -> str:
    """A small table without scripts; `sim.run --html` and `sim.views.timeline_page` make the whole page."""
    result = simulation.result
    step = simulation.step_time_s or 1.0
    losses = "".join(
        f"<li>{escape(part.label)}: {seconds(part.seconds)}, {percent(part.seconds / step)}. {marked(remedy)}</li>"
        for part, remedy in losses_of(simulation)
    )
    body = "".join(
        f"<tr><th {_LEFT}>{escape(n.name)}</th><td {_LEFT}><b>{escape(n.value)}</b></td>"
        f"<td {_LEFT}>{escape(n.note)}</td></tr>"
        for n in headline(result)
    )
    title = f"{escape(simulation.scenario.name)}: {escape(layout_line(result))}"
    table = f"<table><caption {_LEFT}>{title}</caption><tbody>{body}</tbody></table>"
    return f"{table}<p>Largest losses:</p><ol>{losses}</ol>"
