"""Choose how much power Blackwell GPUs draw at the peak of 8 bits, from published steps of dense models.

    python tools/fit_power.py

No kernels in 8 bits were measured under a sustained load on these GPUs. For each GPU the tool prints the value of
`power_at_peak_8_bits` at which the tables' median errors have a mean of zero, each table counted once, and the value
that it has without each of the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent.parent))

from predict_published import chosen, tables

from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.coefficients import Coefficient
from sim.simulation import simulate
from sim.validation.prediction import profile_named
from sim.validation.tables import read_table

NAME = "power_at_peak_8_bits"
GPUS = ("b200-sxm", "gb200")
VALUES = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
Errors = Mapping[str, Sequence[Sequence[float]]]  # for each table and row the errors at `VALUES`


def dense_in_8_bits(scenario: Scenario) -> bool:
    """Return whether a scenario trains a model without experts in 8 or 4 bits on a GPU of `GPUS`."""
    narrow = scenario.training.precision in ("fp8", "mxfp8", "nvfp4")
    return narrow and scenario.calibration in GPUS and not scenario.model.moe


def errors() -> Mapping[str, Errors]:
    """Return for each GPU the errors of the rows from which its value is chosen."""
    found: dict[str, dict[str, list[list[float]]]] = {gpu: {} for gpu in GPUS}
    for path in tables():
        for row in chosen(read_table(path).rows):
            scenario = parse_scenario({**row.scenario, "name": row.id}, row.id)
            if dense_in_8_bits(scenario):
                measured = row.measured["step_time_s"]
                at_values = [step_s(scenario, value) / measured - 1.0 for value in VALUES]
                found[str(scenario.calibration)].setdefault(path.stem, []).append(at_values)
    return found


def step_s(scenario: Scenario, value: float) -> float:
    """Return the simulated step with this value of the coefficient."""
    profile = profile_named(scenario.calibration)
    stated = {NAME: Coefficient(value, "tried")}
    return simulate(scenario, replace(profile, coefficients=profile.coefficients.changed(stated))).step_time_s


def value_of(errors: Errors, without: str = "") -> float:
    """Return the value where the mean over tables of their rows' median error crosses zero; errors grow with it."""
    medians = [np.median(np.array(rows), axis=0) for table, rows in errors.items() if table != without]
    return float(np.interp(0.0, np.mean(medians, axis=0), VALUES))


def main() -> None:
    """Print each GPU's value, and its value without each table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for gpu, of_tables in errors().items():
        print(f"{gpu}: {value_of(of_tables):.2f} of {sum(map(len, of_tables.values()))} rows")
        for table in of_tables:
            if len(of_tables) > 1:
                print(f"    without {table}: {value_of(of_tables, table):.2f}")


if __name__ == "__main__":
    main()
