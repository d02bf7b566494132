"""`python -m sim.run` of a serving workload: simulate it and show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.commands.options import write_trace
from sim.commands.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.inputs.scenario import Scenario
    from sim.serve.results.records import ServingResult
    from sim.serve.results.result import ServingSimulation
    from sim.studies.promised_latencies import Promise
    from sim.studies.starting import Load
    from sim.views.headline import Number


def run_serving(scenario: Scenario, load: Load, options: RunOptions) -> bool:
    """Simulate and show; does it fit in memory? `load`: the scenario with more overrides."""
    from sim.commands.serving_progress import progress
    from sim.serve.results.other_servers import with_intervals
    from sim.serve.simulation import simulate_serving
    from sim.studies.promised_latencies import parse_slo, share_within
    from sim.studies.spending import spending
    from sim.studies.starting import change_that_starts
    from sim.views.headline import spending_numbers
    from sim.views.serving_summary import print_serving
    from sim.views.terminal import standard_output

    promises = () if options.slo is None else parse_slo(options.slo)
    with progress() as shown:
        simulation = simulate_serving(scenario, engine=options.engine, watch=shown.watch)
        result = with_intervals(simulation)
        if result.does_not_start is not None:
            change = change_that_starts(load, simulation.profile)
            starts = f"starts with --set {change}" if change else "no change of one key makes it start"
            result = replace(result, does_not_start=f"{result.does_not_start}; {starts}")
    within = share_within(simulation, promises) if promises else None
    if options.trace is not None:
        write_trace(options.trace, simulation.timeline, simulation.memory)
    spent = None if options.price is None else spending(result, options.price)
    numbers = spending_numbers(spent)
    whole = result.to_json() | ({} if spent is None else {"spending": spent.to_json()})
    if promises:
        kept = [{"limit": p.text, "kept": p.kept(simulation.latencies)} for p in promises]
        whole |= {"slo": kept, "share_within_slo": within}
    options.show(
        whole,
        lambda _: _page(simulation, result, promises, within, numbers),
        lambda _: print_serving(result, standard_output(), numbers, promises, within),
    )
    return result.fits_in_memory


def _page(
    simulation: ServingSimulation,
    result: ServingResult,
    promises: Sequence[Promise],
    within: float | None,
    more: Sequence[Number],
) -> str:
    """The page of a serving workload."""
    from sim.serve.results.distributions import distributions
    from sim.serve.results.over_time import over_time
    from sim.views.serving_plots import serving_plots
    from sim.views.timeline_page import timeline_page

    plots = serving_plots(result, over_time(simulation), distributions(simulation), promises, within)
    return timeline_page(result, simulation.timeline, simulation.memory, served=plots, more=more)
