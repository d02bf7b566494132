"""`python -m sim.run` of a scenario with an `rl` section: simulate the step and show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.commands.options import write_trace
from sim.commands.run_options import RunOptions

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def run_rl(scenario: Scenario, options: RunOptions) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.rl.simulation import simulate_rl
    from sim.studies.spending import spending
    from sim.views.headline import spending_numbers
    from sim.views.rl_page import rl_page
    from sim.views.rl_words import print_rl
    from sim.views.terminal import standard_output

    simulation = simulate_rl(scenario, engine=options.engine)
    spent = None if options.price is None else spending(simulation.outcome, options.price)
    if options.trace is not None:
        write_trace(options.trace, simulation.timeline)
    whole = simulation.result | ({} if spent is None else {"spending": spent.to_json()})
    numbers = spending_numbers(spent)
    options.show(
        whole,
        lambda _: rl_page(simulation, numbers),
        lambda _: print_rl(simulation.outcome, standard_output(), numbers),
    )
    return simulation.outcome.fits_in_memory
