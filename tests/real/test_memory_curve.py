"""Memory over the first four steps of a real training is what is simulated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from calibrate.memory_curve import SCENARIO, record, simulated  # noqa: E402
from sim.inputs.scenario import load_scenario  # noqa: E402
from sim.inputs.shipped import scenarios_folder  # noqa: E402
from sim.models.parameters import count_parameters  # noqa: E402


def test_four_steps_recorded_and_simulated() -> None:
    scenario = load_scenario(scenarios_folder() / SCENARIO)
    real, ours = record(scenario), simulated(scenario)
    states = 8.0 * count_parameters(scenario.model).total
    assert real[0].after - real[0].before == pytest.approx(states, rel=1e-3), "Adam's moments come in the first step"
    for mine, theirs in zip(ours, real, strict=True):
        assert mine.before == pytest.approx(theirs.before, rel=1e-3)
        assert mine.after == pytest.approx(theirs.after, rel=1e-3)
        assert mine.peak == pytest.approx(theirs.peak, rel=0.06)
    assert real[1].peak > real[0].peak
