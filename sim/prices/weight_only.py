"""Price matmuls with 8- or 4-bit weights by measured points.

A profile's kernel file may have them as `gemm` of dtype int8_wo and int4_wo (weights converted to 16 bits in the
kernel) and sq (8-bit integers multiplied, as in SmoothQuant): TensorRT-LLM's kernels on A100. The efficiency relative
to the roofline is interpolated as for other matmuls; here weights count with their own bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.core.quantization import QUANTIZATIONS, Quantization
from sim.prices.cost import OUTSIDE_PER_OCTAVE
from sim.prices.interpolation import Surface
from sim.prices.kernel_file import kernel_file
from sim.prices.profile import Profile
from sim.prices.roofline import Device


class WeightOnly(Struct, frozen=True, eq=False):
    """Hold measured matmuls of one format; `at` prices others on `device`."""

    surface: Surface
    floor_s: float
    weight_bytes: float
    device: Device
    peak: str

    def at(self, m: int, n: int, k: int) -> tuple[float, float] | None:
        """Return the seconds of `[m, k] x [k, n]` and their relative error; None if no point is near."""
        found = self.surface.at(np.log2(np.array([m, n, k], dtype=np.float64)))
        if found is None:
            return None
        # The floor is added here and in `_surface`, so that a launch does not count as inefficiency.
        bound = float(_bounds(np.array([[m, n, k]]), self.weight_bytes, self.device, self.peak)[0]) + self.floor_s
        return bound / math.exp(found[0]), math.hypot(self.surface.leave_one_out_error(), OUTSIDE_PER_OCTAVE * found[1])


def weight_only(profile: Profile, quantization: Quantization, weight_bytes: float, device: Device) -> WeightOnly | None:
    """Return the format's points in the profile; None if there are none."""
    form = QUANTIZATIONS[quantization]
    name, peak = form.table, form.table_peak
    # Without points the caller prices a 16-bit matmul whose weights take fewer bytes.
    if not name or not profile.kernels or ("gemm", name) not in kernel_file(profile.kernels).tables:
        return None
    # Efficiency is relative to this peak. If the data sheet has none, the caller prices the matmul by another rule.
    if peak not in device.peak_flops_per_s:
        return None
    surface, floor_s = _surface(profile.kernels, name, weight_bytes, profile.reference, peak)
    return WeightOnly(surface, floor_s, weight_bytes, device, peak)


@lru_cache(maxsize=8)
def _surface(kernels: str, name: str, weight_bytes: float, reference: str, peak: str) -> tuple[Surface, float]:
    from topology.presets import GPUS

    gpu = GPUS[reference]
    # Without the number of multiprocessors, because these points are too few for slopes over waves.
    home = Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s)
    points, error = kernel_file(kernels).table("gemm", name)
    # The batch is left out, because no batched product was measured.
    shapes, floor_s = points.shapes[:, 1:], float(points.seconds.min())
    efficiency = np.log((_bounds(shapes, weight_bytes, home, peak) + floor_s) / points.seconds)
    return Surface(np.log2(shapes.astype(np.float64)), efficiency, error), floor_s


def _bounds(shapes: NDArray[np.int64], weight_bytes: float, device: Device, peak: str) -> NDArray[np.float64]:
    m, n, k = shapes.T.astype(np.float64)
    # Input and result count as 16 bits in all three formats; the efficiency includes what 8-bit inputs save.
    moved = 2.0 * m * (n + k) + weight_bytes * n * k
    return np.asarray(np.maximum(2.0 * m * n * k / device.peak(peak), moved / device.bandwidth_bytes_per_s))
