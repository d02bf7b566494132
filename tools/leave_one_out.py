"""Predicts each table of steps without the constants that were fitted to it.

    python tools/leave_one_out.py [TABLE …]

A constant that was fitted to one table only is replaced by its value without that table: the prior of the fit, a
measurement on another machine, or the nearest relative's by architecture. docs/accuracy.md ("What was fitted") lists
these constants. A table to which no constant was fitted is predicted with the shipped profiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent.parent))

from fit_attention import STEP_NAMES, triton_prior
from predict_published import chosen, tables

from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import Coefficient
from sim.prices.profile import Profile
from sim.simulation import simulate
from sim.validation.prediction import profile_named
from sim.validation.tables import read_table

H200 = {"host_operator_s": 3e-5, "host_step_s": 5e-4}  # plain torch on two machines, the only other hosts
VTRAIN = {**H200, "host_collective_s": 3e-5, "host_message_s": 1e-4}  # priors of calibrate.fit
MPT = {
    f"attention_{name}": float(value) for name, value in zip(STEP_NAMES, np.exp(triton_prior("a100-sxm")), strict=True)
}  # the prior of fit_attention.py --steps
# For each table the profiles' coefficients without it. A Hopper host's is an A100 host's times Liger's ratio, 0.96.
WITHOUT: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "vtrain_single_node": {"a100-sxm": VTRAIN},
    "megatron_sc21_table1": {"a100-sxm": {"power_at_peak": 1.17}},  # the prior
    "mosaic_mpt_a100_80gb": {"a100-sxm": MPT},
    # As tools/fit_power.py prints them.
    "mlperf_training_gpt3": {"b200-sxm": {"power_at_peak_8_bits": 1.48}},
    "mlperf_training_lora": {
        "b200-sxm": {"power_at_peak_8_bits": 1.39},
        "gb200": {"power_at_peak_8_bits": 1.72},
    },
    "mlperf_training_405b": {"gb200": {"power_at_peak_8_bits": 1.79}},
    "megatron_bridge_h100_gb200": {"gb200": {"power_at_peak_8_bits": 1.80}},
}


def without(table: str, profile: Profile) -> Profile:
    """Return the profile without the coefficients that it has from a table."""
    changes = WITHOUT.get(table, {}).get(profile.name, {})
    new = {name: Coefficient(value, f"without {table}") for name, value in changes.items()}
    return replace(profile, coefficients=profile.coefficients.changed(new)) if new else profile


def errors(path: Path) -> tuple[list[float], list[float]]:
    """Return relative errors of a table's rows: with constants chosen without it, and with the shipped profiles."""
    left, shipped = [], []
    for row in chosen(read_table(path).rows):
        scenario = parse_scenario({**row.scenario, "name": row.id}, row.id)
        profile = profile_named(scenario.calibration)
        measured = row.measured["step_time_s"]
        shipped.append(simulate(scenario, profile).step_time_s / measured - 1.0)
        other = without(row.table, profile)
        left.append(simulate(scenario, other).step_time_s / measured - 1.0 if other is not profile else shipped[-1])
    return left, shipped


def main() -> None:
    """Print each table's errors without and with its constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [path.stem for path in tables()]
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="a table's name; all if none is named")
    asked = parser.parse_args().tables or names
    if unknown := set(asked) - set(names):
        parser.error(f"no table is called {', '.join(sorted(unknown))}; allowed: {', '.join(names)}")
    print("| table | left out | bias | shipped |\n|---|---:|---:|---:|")
    for path in tables():
        if path.stem not in asked:
            continue
        left, shipped = errors(path)
        if left:
            mean, bias, view = np.mean(np.abs(left)), np.mean(left), np.mean(np.abs(shipped))
            print(f"| {path.stem} | {mean:.1%} | {bias:+.1%} | {view:.1%} |", flush=True)


if __name__ == "__main__":
    main()
