"""Fits coefficients of fused attention to published tables, and prints the error on the rows that were not fitted.

    python tools/fit_attention.py scenarios/published/flash_attention.json scenarios/published/b200_kernels.json
    python tools/fit_attention.py --steps scenarios/published/mosaic_mpt_a100_80gb.json

The first fits each kernel to every second row of its measurements. The second fits the profile's usual kernel,
FlashAttention of 2022-23 in Triton, to every fifth of a table's steps: no table has this kernel alone. The coefficients
go into attention_coefficients.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent.parent))

from sim.commands.command import bad_input_exits
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import USUAL_KERNEL, Coefficient
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.simulation import simulate
from sim.validation.kernel_rows import IMPLEMENTATIONS, OPERATORS, UNFUSED
from sim.validation.prediction import profile_named
from sim.validation.records import Measurement
from sim.validation.tables import read_table
from topology.presets import GPUS

FORWARD_SHARE = 0.85  # backward's efficiency ÷ forward's, from FlashAttention-2's H100 rows with both
NAMES = ("efficiency_64", "efficiency_128", "efficiency_256", "ramp_tokens", "backward_share")
START = np.log([0.5, 0.6, 0.6, 100.0, FORWARD_SHARE])
STEP_NAMES = ("efficiency_64", "efficiency_128", "ramp_tokens", "backward_share")
# Dao 2023 (FlashAttention-2), section 4.1, on an A100: "around 1.3-1.5x faster than FlashAttention in Triton in the
# forward pass and around 2x faster in the backward pass".
FORWARD_FASTER, BACKWARD_FASTER = 1.4, 2.0
STEP_WIDTH = np.array([0.1, 0.1, 0.5, 0.15])  # of the prior's logs: its words are round numbers
ERROR = 0.05  # of one row


def errors(rows: list[Measurement], gpu: str, name: str, p: np.ndarray) -> np.ndarray:
    """Return log(predicted ÷ measured), with the simulator's prices (power limit included); `p`: logs of `NAMES`."""
    base = load_profile(gpu)
    fitted = {f"{name}_{n}": Coefficient(float(v), "") for n, v in zip(NAMES, np.exp(p), strict=True)}
    costs = Costs(replace(base, coefficients=base.coefficients.changed(fitted)), GPUS[gpu])
    seconds = [sum(costs.compute(i).seconds for i in OPERATORS[r.data["op"]](r.data)) for r in rows]
    return np.log(np.array(seconds) / [r.measured["seconds"] for r in rows])


def by_implementation(rows: Iterable[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    """Group rows of fused attention by GPU and implementation; the first of every two is fitted."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        if "attention" in str(row.data.get("op")) and row.data.get("impl") not in UNFUSED:
            name = str(row.data.get("impl", "attention"))
            gpu = str(row.scenario["calibration"])
            groups.setdefault((gpu, IMPLEMENTATIONS.get(name, name)), []).append(row)
    return groups


def triton_prior(gpu: str) -> np.ndarray:
    """Return the logs of `STEP_NAMES` that follow from the GPU's FlashAttention-2 by the paper's words."""
    flash = load_profile(gpu).coefficients.attention["flash2"]
    share = flash.backward_share * FORWARD_FASTER / BACKWARD_FASTER
    sizes = [(e or 1.0) / FORWARD_FASTER for e in (flash.efficiency_64, flash.efficiency_128)]
    return np.log([*sizes, flash.ramp_tokens, share])


def step_errors(rows: list[Measurement], p: np.ndarray) -> np.ndarray:
    """Return log(predicted ÷ measured) of steps whose attention is the profile's usual kernel; `p`: of `STEP_NAMES`."""
    fitted = {f"{USUAL_KERNEL}_{n}": Coefficient(float(v), "") for n, v in zip(STEP_NAMES, np.exp(p), strict=True)}
    logs = []
    for row in rows:
        scenario = parse_scenario({**row.scenario, "name": row.id}, row.id)
        base = profile_named(scenario.calibration)
        profile = replace(base, coefficients=base.coefficients.changed(fitted))
        logs.append(np.log(simulate(scenario, profile).step_time_s / row.measured["step_time_s"]))
    return np.array(logs)


def fit_steps(rows: list[Measurement]) -> None:
    """Fit the usual kernel to the first of every five rows of a table of one GPU, and print coefficients and errors."""
    prior = triton_prior(str(rows[0].scenario["calibration"]))

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.concatenate([step_errors(rows[::5], p) / ERROR, (p - prior) / STEP_WIDTH])

    found = least_squares(residuals, prior, loss="soft_l1", diff_step=0.02)
    others = [row for i, row in enumerate(rows) if i % 5]
    by_fit, by_prior = (np.mean(np.abs(np.expm1(step_errors(others, p)))) for p in (found.x, prior))
    print(
        "prior",
        np.round(np.exp(prior), 3).tolist(),
        "fitted",
        np.round(np.exp(found.x), 3).tolist(),
        f"rows not fitted: mean {by_fit:.1%}, with the prior {by_prior:.1%}",
    )


def main() -> None:
    """Fit each GPU and implementation, or the usual kernel to steps, and print coefficients and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.json", help="tables of measured kernels, or of steps")
    parser.add_argument("--steps", action="store_true", help="fit the usual kernel to every fifth step of the tables")
    asked = parser.parse_args()
    with bad_input_exits():
        all_rows = [row for path in asked.tables for row in read_table(Path(path)).rows]
    if asked.steps:
        fit_steps([row for row in all_rows if "step_time_s" in row.measured])
        return
    for (gpu, name), rows in sorted(by_implementation(all_rows).items()):
        width = np.array([1.0, 1.0, 0.2, 1.0, 0.05 if name != "attention" else 1.0])

        def residuals(
            p: np.ndarray, rows: list[Measurement] = rows, gpu: str = gpu, name: str = name, width: np.ndarray = width
        ) -> np.ndarray:
            return np.concatenate([errors(rows[::2], gpu, name, p) / ERROR, (p - START) / width])

        found = least_squares(residuals, START, loss="soft_l1")
        off = np.abs(np.expm1(errors(rows[1::2], gpu, name, found.x)))
        print(
            gpu,
            name,
            np.round(np.exp(found.x), 3).tolist(),
            f"rows not fitted: median {np.median(off):.1%}, 95th percentile {np.quantile(off, 0.95):.1%}",
        )


if __name__ == "__main__":
    main()
