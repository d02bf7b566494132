"""Copies of offloaded activations take what the calibration measured, where it did."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from sim.prices.profile import CollectiveTable
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from tests.sim.cases import scenario_with


def test_measured_copies() -> None:
    scenario = scenario_with(
        {"seq_len": 64, "global_batch_size": 1, "precision": "fp32", "activation_offload": True},
        model={"layers": 2, "hidden": 64, "heads": 4, "vocab": 128},
        cluster="cpu-host",
    )
    size, none = np.array([1e3, 1e6]), np.zeros(2)
    profile = load_profile("cpu")
    tables = tuple(CollectiveTable(op, 1, size, size / rate, none) for op, rate in (("offload", 1e9), ("reload", 2e9)))
    simulation = simulate(scenario, replace(profile, collectives=(*profile.collectives, *tables)), expand=True)
    copies = [s for s in simulation.timeline.spans() if s.stream == "host" and s.detail.bytes > 1e3]
    assert {s.kind for s in copies} == {"OFFLOAD", "RELOAD"}
    for s in copies:
        rate = 1e9 if s.kind == "OFFLOAD" else 2e9
        assert s.end_s - s.start_s == pytest.approx(s.detail.bytes / rate)
        assert s.detail.source in ("measured", "interpolated")
