"""Check what a program hands to `simulate`, `simulate_serving` and `simulate_rl`, which take no plain names."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.scenario import Scenario


def check_called(scenario: object, profile: object, engine: object) -> None:
    """Check the arguments that the three have in common.

    Raises:
        InputError: for a scenario that was not loaded, a profile by its name, or an unknown engine.
    """
    if not isinstance(scenario, Scenario):
        raise InputError(f"scenario: found {show(scenario)}; load_scenario(PATH) or parse_scenario(MAPPING) makes one")
    if isinstance(profile, str | Path):
        raise InputError(f"profile: found {show(str(profile))}; the scenario's key calibration takes a name or a file")
    if engine not in get_args(Engine):
        raise InputError(f"engine: found {show(engine)}; must be one of {', '.join(get_args(Engine))}")
