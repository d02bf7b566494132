"""The largest losses of a simulated step, with advice that knows the messages inside layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.losses import Part, largest_losses

if TYPE_CHECKING:
    from sim.simulation import Simulation

UNKNOWN = "Which messages are exposed, and what would hide them, is told by the page of `sim.run --html`."
EXPAND_UP_TO = 4000  # spans: expanding a step of so many takes well under a second


def losses_of(simulation: Simulation, n: int = 3) -> list[tuple[Part, str]]:
    """The n largest losses of a step, each with what would remove it.

    Which messages are exposed can only be told where those of layers (tp, cp, ep) have spans of their own, as in an
    expanded simulation. One is made where that is quick; else the advice on communication is not guessed.
    """
    from sim.simulation import simulate

    timeline, p = simulation.timeline, simulation.scenario.parallelism
    known = simulation.expanded or p.tp * p.cp * p.ep == 1
    if not known and len(timeline) <= EXPAND_UP_TO:
        timeline, known = simulate(simulation.scenario, simulation.profile, expand=True).timeline, True
    found = largest_losses(simulation.result, timeline, n)
    return [(part, remedy if known or part.key != "communication" else UNKNOWN) for part, remedy in found]
