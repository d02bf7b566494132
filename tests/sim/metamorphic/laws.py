"""Scenarios that are varied, and their results."""

from __future__ import annotations

from typing import Any

from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

SMALL: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100",
    "training": {"seq_len": 4096, "global_batch_size": 16},
}


def run(**keys: Any) -> dict[str, Any]:
    """The result of a scenario."""
    scenario = parse_scenario(keys)
    return simulate_serving(scenario).result if scenario.inference else simulate(scenario).result


def vary(scenario: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The result of a scenario with `section__key=value` changed, or with sections merged over it."""
    for path, value in changes.items():
        *sections, key = path.split("__")
        nested: Any = {key: value}
        for section in reversed(sections):
            nested = {section: nested}
        scenario = merge(scenario, nested)
    return run(**scenario)
