"""Slow kernels by the power limit of a GPU: under a sustained load the clock falls until the power fits the limit.

Power relative to the limit grows linearly with the used share of the tensor cores' peak, from `POWER_AT_REST` at 0 to
the coefficient `power_at_peak` at 1, or `power_at_peak_8_bits` in 8 and 4 bits. At the low voltages of a limited GPU
the energy of a FLOP is nearly constant, so time grows as power / limit.
"""

from __future__ import annotations

import math

from msgspec import Struct

from sim.core.dtypes import dtype_bytes
from sim.core.operator_kinds import MEMORY_BOUND
from sim.core.program import Compute
from sim.prices.coefficients import Coefficients
from sim.prices.cost import Cost
from sim.prices.roofline import Device
from topology.spec import GpuSpec

POWER_UNCERTAINTY = 0.25  # of the time that the power limit adds, which depends on temperature, data and the chip
POWER_AT_REST = 0.5  # part of the power limit that a GPU draws while it streams from memory


class PowerLimit(Struct, frozen=True):
    """Hold a GPU's limit, and its draw at the tensor cores' peak, all relative to `_reference_w`.

    `limit` is below 1 for a GPU with a lowered limit. `at_peak` in 16 bits, `at_peak_8_bits` in 8 and 4 bits; 0: no
    kernel reaches the limit.
    """

    limit: float
    at_peak: float
    at_peak_8_bits: float

    @staticmethod
    def of(coefficients: Coefficients, gpu: GpuSpec, home: GpuSpec, *, acts: bool = True) -> PowerLimit:
        """Return the limit of `gpu`.

        `coefficients`: of a profile that was measured on `home`. `acts`: false for short bursts.
        """
        if not acts:
            return PowerLimit(1.0, 0.0, 0.0)
        wide, narrow = coefficients.power_at_peak, coefficients.power_at_peak_8_bits or coefficients.power_at_peak
        limit = gpu.power_limit_w / _reference_w(gpu, home)
        return PowerLimit(limit, _at_peak(wide, gpu, home), _at_peak(narrow, gpu, home))

    def throttled(self, op: Compute, cost: Cost, pace: float, device: Device) -> Cost:
        """Return a kernel's cost under the power limit. `pace`: as `Costs.pace` returns it."""
        # fp32 runs on vector units, which stay below the limit.
        at_peak = self.at_peak_8_bits if dtype_bytes(op.dtype) < 2 else self.at_peak
        unlimited = not at_peak or op.kind in MEMORY_BOUND or op.dtype == "fp32"
        if unlimited or not op.flops or cost.seconds <= 0:
            return cost
        # The used share follows from the seconds: an inefficient matmul draws little power and keeps its clock.
        used = op.flops / (cost.seconds * device.peak(op.dtype))
        draw = POWER_AT_REST + (at_peak - POWER_AT_REST) * used
        slower = max(1.0, draw * pace / self.limit)
        # Only the time that the limit adds has the additional uncertainty.
        error = math.hypot(cost.uncertainty, POWER_UNCERTAINTY * (slower - 1.0))
        return Cost(cost.seconds * slower, cost.source, error)


def _reference_w(gpu: GpuSpec, home: GpuSpec) -> float:
    """Return the power limit in watts to which the coefficients of `home` are relative on `gpu`.

    It is `home`'s limit for the same chip (equal multiprocessors and peak, on any board), else the data sheet's limit.
    """
    from topology.presets import GPUS

    # Two boards with one chip (SXM, PCIe) draw equal power for equal work, so both are relative to one limit.
    return home.power_limit_w if _one_chip(gpu, home) else GPUS.get(gpu.name, gpu).power_limit_w


def _at_peak(at_peak: float, gpu: GpuSpec, home: GpuSpec) -> float:
    """Return `home`'s `power_at_peak`, or that of 8 bits, for `gpu`, relative to `_reference_w`.

    Another chip draws the same share of its limit, but beyond `POWER_AT_REST` at least the energy that `home` draws for
    a FLOP: an H100's 0.53 pJ and a B200's 0.57 pJ were measured apart, so more FLOPs a joule in a data sheet are not
    sustained. Where `home` never reaches its limit, the energy is that of the architecture. Energies in 8 bits change
    as those in 16 bits do: a VR200, whose peak in 8 bits grew more, is taken to need less for each such FLOP.
    """
    own, other = (each.peak_flops_per_s.get("fp16", each.peak_flops_per_s.get("bf16")) for each in (gpu, home))
    if not own or not other or _one_chip(gpu, home):
        return at_peak
    if not at_peak:
        energy_j = gpu.chip.flop_energy_j
        return POWER_AT_REST + energy_j * own / gpu.power_limit_w if energy_j else 0.0
    more = own / _reference_w(gpu, home) / (other / home.power_limit_w)
    return POWER_AT_REST + (at_peak - POWER_AT_REST) * max(1.0, more)


def _one_chip(gpu: GpuSpec, home: GpuSpec) -> bool:
    same_peak = gpu.peak_flops_per_s.get("fp16") == home.peak_flops_per_s.get("fp16")
    return gpu.sm_count == home.sm_count and same_peak
