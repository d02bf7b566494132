"""Choose the measured GPU whose kernels price a GPU that nobody measured.

A kernel has the efficiency that it has at the same shape on the chosen GPU; peaks, bandwidth and number of
multiprocessors are the GPU's own. The choice, in this order:

1. A measured GPU of the same architecture, for which libraries choose the same kernels, if a multiprocessor's share of
   the memory bandwidth differs by less than a factor of `ALIKE`. The larger this share, the more bytes must be in
   flight on each multiprocessor to reach it (Little's law), so the smaller is the part that kernels reach.
2. Else any measured GPU; for a GPU with 8-bit floats only one that has them, too.
3. For a chip whose multiprocessors are unknown: one of its architecture, else (TPU, Gaudi) `USUAL`.

Of several it is the one whose share is nearest, or whose whole bandwidth is where multiprocessors are unknown.
`tools/borrowed_kernels.py` predicts each measured chip by the others: with this rule half of the kernels are within a
factor of 1.16, with an H100's efficiencies for every chip 1.18, with the median of all other chips 1.22, with the bare
roofline 2.62. The share was chosen among a few figures by the same errors, so they flatter it a little. All of those
chips are NVIDIA's.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from pathlib import Path

from sim.core import shipped as shipped_files
from sim.core.files import read_json
from topology.presets import GPUS
from topology.spec import GpuSpec

ALIKE = 2.0  # a factor; boards with HBM and with GDDR differ by more
USUAL = "h100-sxm"  # of all measured GPUs it predicts the others' kernels best
# Without a chip's own measurements half of its kernels are predicted within the first factor, nine in ten within the
# second (`tools/borrowed_kernels.py`).
MEDIAN_FACTOR, NINTH_FACTOR = 1.16, 1.56


def nearest_measured(gpu: GpuSpec, left_out: Collection[str] = ()) -> str:
    """Return the measured GPU whose kernels price `gpu`; "roofline" for a CPU.

    `left_out`: measured GPUs that are not considered.
    """
    if gpu.chip.is_host:
        return "roofline"
    found = [GPUS[name] for name in measured_gpus() if name not in left_out]
    same = [other for other in found if other.architecture == gpu.architecture]
    if gpu.sm_count <= 1:
        # Without multiprocessors only whole bandwidths can be compared.
        comparable = same or [other for other in found if other.name == USUAL] or found
        return min(comparable, key=lambda other: _octaves(gpu.memory_bandwidth_bytes_per_s, other)).name
    share = gpu.memory_bandwidth_bytes_per_s / gpu.sm_count
    alike = [other for other in same if _octaves(share, other, other.sm_count) < math.log2(ALIKE)]
    eight_bits = [other for other in found if "fp8" in other.peak_flops_per_s or "fp8" not in gpu.peak_flops_per_s]
    return min(alike or eight_bits, key=lambda other: _octaves(share, other, other.sm_count)).name


def measured_gpus() -> tuple[str, ...]:
    """Return the shipped GPUs whose own kernels were measured and may price other chips.

    AMD's price their own boards only: their tables lack most kinds of kernels, and no chip shares their libraries.
    """
    return _measured_in(shipped_files.PROFILES)


@cache
def _measured_in(folder: Path) -> tuple[str, ...]:
    found = []
    for path in sorted(folder.glob("*.json")):
        known = path.stem in GPUS and GPUS[path.stem].architecture != "other"
        profile = read_json(path) if known else None
        if isinstance(profile, dict) and profile.get("kernels") and profile.get("reference") == path.stem:
            found.append(path.stem)
    return tuple(found)


def _octaves(bandwidth_bytes_per_s: float, other: GpuSpec, parts: int = 1) -> float:
    return abs(math.log2(bandwidth_bytes_per_s * parts / other.memory_bandwidth_bytes_per_s))
