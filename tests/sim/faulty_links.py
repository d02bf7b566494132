"""Scenarios with faults, of links among others."""

from __future__ import annotations

from typing import Any

from sim.inputs.scenario import Scenario, parse_scenario


def with_faults(scenario: Scenario, faults: dict[str, Any] | None) -> Scenario:
    return parse_scenario({**scenario.model_dump(mode="json"), "faults": faults}, scenario.name)


def links(a: int, b: int, scale: float) -> dict[str, Any]:
    return {"links": [{"between": [f"node{a}", f"node{b}"], "bandwidth_scale": scale}]}
