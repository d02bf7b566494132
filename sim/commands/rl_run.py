"""`python -m sim.run` of a scenario with an `rl` section: simulate the step and show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.commands.options import write_page, write_trace
from sim.commands.run_options import RunOptions
from sim.core.files import write_json

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def run_rl(scenario: Scenario, options: RunOptions) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.rl.simulation import simulate_rl
    from sim.studies.spending import spending

    simulation = simulate_rl(scenario, engine=options.engine)
    spent = None if options.price is None else spending(simulation.outcome, options.price)
    if options.html is not None:
        from sim.views.rl_page import rl_page

        write_page(options.html, rl_page(simulation))
    if options.trace is not None:
        write_trace(options.trace, simulation.timeline)
    if options.json is not None:
        write_json(options.json, simulation.result | ({} if spent is None else {"spending": spent.to_json()}), indent=1)
    if options.json != "-":
        from sim.views.headline import spending_numbers
        from sim.views.rl_words import print_rl
        from sim.views.terminal import standard_output

        print_rl(simulation.outcome, standard_output(), spending_numbers(spent))
    return simulation.outcome.fits_in_memory
