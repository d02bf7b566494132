"""Steps of one rank in CPU time, which neighbours on the machine stretch least, beside their simulation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from calibrate.real_steps.profile_from_steps import profile_of_rounds
from calibrate.real_steps.timed_rounds import Calibration, Log, Step
from sim.inputs.scenario import Scenario
from sim.simulation import simulate


def measured_and_simulated(
    scenario: Scenario, run: Any, epilogue: Sequence[tuple[str, int]], calibrate: Callable[[], Calibration]
) -> tuple[float, float, list[float]]:
    """Seconds of a step: measured, and simulated with parts timed between the steps; and the losses."""
    log, seconds = Log(0), []
    for number in range(10):
        start = time.process_time()
        run.step(run.batch(number))
        seconds.append(time.process_time() - start)
        log.steps.append(Step(0, seconds[-1], [], run.loss(), 1.0))
        if number % 2:  # foreign_cores: so that CPU times count
            log.calibrations.append(replace(calibrate(), foreign_cores=1.0))
    facts = {"device": "cpu", "cores": 1}
    profile = profile_of_rounds(
        "here", "2026-01-01", [log], [epilogue], 4, scenario.parallelism, {"hardware": facts, "software": facts}
    )
    simulated = simulate(scenario, profile).result["step_time_s"]
    return statistics.median(seconds[2:]), simulated, [s.loss for s in log.steps]


def agree_within_a_quarter(attempt: Callable[[], tuple[float, float]]) -> None:
    """Measured and simulated seconds differ by less than 25 % in the best of five tries."""
    errors = []
    while len(errors) < 5:
        measured, simulated = attempt()
        errors.append(simulated / measured - 1)
        if abs(errors[-1]) < 0.25:
            return
    pytest.fail(f"simulated / measured - 1 = {errors}")
