"""Served quantities for sim/presets/evidence.json: of published workloads, the rows that no fit used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fit_engines import FITS, halves

from sim.results.evidence import PublishedStep
from sim.serve.results.certainty import serving_features
from sim.serve.results.other_servers import other_server
from sim.serve.simulation import simulate_serving
from sim.validation.prediction import profile_named
from sim.validation.records import Measurement
from sim.validation.serving_rows import serving_scenario, value_of

SLOWER = 1.1  # times as long as a server takes, and times as quick as another, between which `power` is measured


def not_fitted(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return a table's rows that `tools/fit_engines.py` does not fit constants to."""
    used = {r.id for fit in FITS for r in halves(fit, rows)[0]}
    return [r for r in rows if r.id not in used]


def served_quantities(row: Measurement) -> list[PublishedStep]:
    """Simulate a row and return each measured quantity with the prediction."""
    scenario = serving_scenario(row, row.scenario)
    sim = simulate_serving(scenario, profile_named(scenario.calibration))
    others = None
    if sim.requests[-1].arrival_s > sim.requests[0].arrival_s:
        others = [other_server(sim, times).to_json() for times in (1 / SLOWER, SLOWER)]
    found = []
    for key, measured in row.measured.items():
        power = 1.0
        if others is not None:
            if "_per_s" in key:
                continue  # below saturation a rate says nothing of the server
            quick, slow = (value_of(other, row, key) for other in others)
            power = 1.0 + math.log(slow / quick) / (2 * math.log(SLOWER))  # in units of the server's own seconds
        value, host = float(f"{value_of(sim.result, row, key):.6g}"), round(sim.host_uncertainty, 4)
        features = serving_features(scenario)
        found.append(PublishedStep(row.table, row.id, measured, value, features, round(power, 3), host, key))
    return found
