"""Fits coefficients of fused attention to every second row of published tables, and prints the error on the others.

    python tools/fit_attention.py scenarios/published/flash_attention.json scenarios/published/b200_kernels.json

The coefficients go into profile_coefficients.py.
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
from sim.prices.coefficients import Coefficient
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.validation.kernel_rows import IMPLEMENTATIONS, OPERATORS, UNFUSED
from sim.validation.records import Measurement
from sim.validation.tables import read_table
from topology.presets import GPUS

FORWARD_SHARE = 0.85  # backward's efficiency ÷ forward's, from FlashAttention-2's H100 rows with both
NAMES = ("efficiency_64", "efficiency_128", "efficiency_256", "ramp_tokens", "backward_share")
START = np.log([0.5, 0.6, 0.6, 100.0, FORWARD_SHARE])


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


def main() -> None:
    """Fit each GPU and implementation, and print coefficients and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE.json", help="tables of measured kernels")
    with bad_input_exits():
        all_rows = [row for path in parser.parse_args().tables for row in read_table(Path(path)).rows]
    for (gpu, name), rows in sorted(by_implementation(all_rows).items()):
        width = np.array([1.0, 1.0, 0.2, 1.0, 0.05 if name != "attention" else 1.0])

        def residuals(
            p: np.ndarray, rows: list[Measurement] = rows, gpu: str = gpu, name: str = name, width: np.ndarray = width
        ) -> np.ndarray:
            return np.concatenate([errors(rows[::2], gpu, name, p) / 0.05, (p - START) / width])

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
