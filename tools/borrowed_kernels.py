"""Prints how wrong predicted kernels are for GPUs without measured kernels, as a table for docs/gpus.md.

    python tools/borrowed_kernels.py

Measured kernels of four GPUs are predicted without their measurements: by the roofline alone, by an H100's profile
(which the warning about a GPU without a profile names), and by the nearest relative's profile, both scaled by the data
sheets. The table has the median error of up to 250 kernels of each kind that take 50 us or more; negative is too fast.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from sim.core.program import Compute, Phase
from sim.prices.coefficients import PriceOptions
from sim.prices.kernel_file import kernel_file
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_bytes, shape_flops
from topology.presets import GPUS

BURSTS = PriceOptions(power=False, host=False)  # the kernels were timed in short bursts
RELATIVES = {"b300-sxm": "b200-sxm", "gb300": "gb200", "l40s": "a100-sxm", "rtx-pro-6000-server": "b200-sxm"}
KINDS = (("gemm", "bf16"), ("gemm", "fp8"), ("attention_forward", "bf16"), ("attention_decode", "bf16"))
LEAST_S, MOST = 50e-6, 250


def error(gpu: str, profile: str, op: str, dtype: str) -> float:
    """Return the median of predicted ÷ measured − 1."""
    points, _ = kernel_file(load_profile(gpu).kernels).table(op, dtype)
    long = np.random.default_rng(3).permutation(np.flatnonzero(points.seconds > LEAST_S))[:MOST]
    costs, found = Costs(load_profile(profile), GPUS[gpu], BURSTS), []
    for i in long:
        shape = tuple(points.shapes[i].tolist())
        flops, moved = shape_flops(op, shape), shape_bytes(op, shape, dtype)
        kernel = Compute("x", op, shape, dtype, flops, moved, Phase.FORWARD, served=True)
        found.append(costs.compute(kernel).seconds / points.seconds[i] - 1)
    return float(np.median(found))


def main() -> None:
    """Print the table."""
    print("| GPU | priced by | matmul bf16 | fp8 | attention | decode |\n|---|---|---:|---:|---:|---:|")
    for gpu, relative in RELATIVES.items():
        for profile in ("roofline", "h100-sxm", relative):
            errors = " | ".join(f"{error(gpu, profile, *kind):+.0%}" for kind in KINDS)
            print(f"| `{gpu}` | `{profile}` | {errors} |")


if __name__ == "__main__":
    main()
