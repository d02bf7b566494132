"""`python -m sim.run` of a scenario with an `rl` section: simulate the step and show it."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.commands.options import write_page
from sim.core.errors import InputError
from sim.core.files import write_json, write_text

if TYPE_CHECKING:
    from sim.engine.shared_links import Engine
    from sim.inputs.scenario import Scenario


def refuse_beside_rl(path: Path, overrides: Sequence[str], options: Mapping[str, object]) -> None:
    """Raise for the first of the options that is given, where the scenario is an rl step."""
    from sim.inputs.scenario import load_mapping

    asked = [option for option, given in options.items() if given is not None]
    if asked and load_mapping(path, overrides).get("rl") is not None:
        raise InputError(f"{path}: {asked[0]}: is not for an rl step")


def run_rl(scenario: Scenario, json: str | None, html: Path | None, trace: Path | None, engine: Engine) -> bool:
    """Simulate and show; does it fit in memory?"""
    from sim.rl.simulation import simulate_rl

    simulation = simulate_rl(scenario, engine=engine)
    if html is not None:
        from sim.views.rl_page import rl_page

        write_page(html, rl_page(simulation))
    if trace is not None:
        from sim.views.trace import trace_events

        write_text(trace, json_module.dumps(trace_events(simulation.timeline)))
    if json is not None:
        write_json(json, simulation.result, indent=1)
    if json != "-":
        from rich.console import Console

        from sim.views.rl_summary import print_rl

        print_rl(simulation.outcome, Console())
    return simulation.outcome.fits_in_memory
