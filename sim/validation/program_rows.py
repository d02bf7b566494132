"""Training steps of a table predicted from their captured programs, in place of their descriptions."""

from __future__ import annotations

from pathlib import Path

import click

from sim.inputs.scenario import parse_scenario
from sim.results.fit import PEAK_UNCERTAINTY
from sim.simulation import Simulation, simulate
from sim.validation.prediction import NotSimulated, Prediction, Predictions, profile_named, spread
from sim.validation.records import Measurement

OF_LAYOUT = ("seq_len", "micro_batch_size", "global_batch_size")  # what a row's `training` says beside its program
OF_PROGRAMS = ("step_time_s", "peak_memory_bytes")  # what it may have measured


def program_predictions(row: Measurement, calibration: str | None, folder: Path) -> Predictions:
    """Step time and peak memory of a row whose program is `folder/ROW_ID.json.gz`.

    Raises:
        InputError: where there is no such program, or it is another's.
        NotSimulated: where the row measured neither.
    """
    step = captured_step(row, calibration, folder / f"{row.id}.json.gz")
    for name, launches in (step.outcome.provenance.priced_by_bytes or {}).items():
        click.echo(f"warning: {row.id}: {name} ({launches} launches) is not known; priced by its bytes", err=True)
    found: Predictions = {}
    if "step_time_s" in row.measured:
        found["step_time_s"] = Prediction(step.step_time_s, *step.outcome.step_time_interval_s)
    if "peak_memory_bytes" in row.measured:
        found["peak_memory_bytes"] = spread(step.outcome.peak_memory_bytes, PEAK_UNCERTAINTY)
    if not found:
        raise NotSimulated("a captured program tells step_time_s and peak_memory_bytes, and the row measured neither")
    return found


def captured_step(row: Measurement, calibration: str | None, path: Path) -> Simulation:
    """A row's layout with its captured program as the model; what else its scenario says describes the same in words.

    Raises:
        InputError: where the scenario contradicts the program.
    """
    data = {key: value for key, value in row.scenario.items() if key in ("cluster", "parallelism", "calibration")}
    training = {key: row.scenario["training"][key] for key in OF_LAYOUT if key in row.scenario["training"]}
    named = {} if calibration is None else {"calibration": calibration}
    model = {"program": str(path)}
    data |= {**named, "model": model, "training": training, "name": row.id}
    scenario = parse_scenario(data, row.id, row.folder)
    return simulate(scenario, profile_named(scenario.calibration))
