"""A profile of a few matmuls, and operators that it prices."""

import numpy as np

from sim.core.program import Compute, Phase
from sim.prices.operator_prices import Costs
from sim.prices.profile import PointTable, Profile
from topology.presets import GPUS

H100 = GPUS["h100-sxm"]
PEAK, BANDWIDTH = H100.peak_flops_per_s["bf16"], H100.memory_bandwidth_bytes_per_s
NOTHING = Profile("roofline", "nothing measured")


def gemm(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16", phase: Phase = Phase.FORWARD) -> Compute:
    moved = 2.0 * batch * (m * k + k * n + m * n)
    return Compute("x", "gemm", (batch, m, n, k), dtype, 2.0 * batch * m * n * k, moved, phase)


def roof(m: int, n: int, k: int) -> float:
    return max(2.0 * m * n * k / PEAK, 2.0 * (m * k + k * n + m * n) / BANDWIDTH)


def efficiency(m: int, n: int, k: int) -> float:
    """A smooth law such as real matmuls follow: small sides lose."""
    return 0.9 / ((1 + 200 / m) * (1 + 150 / n) * (1 + 300 / k))


def table(op: str = "gemm", dtype: str = "bf16", seconds_scale: float = 1.0) -> PointTable:
    sides = [2**i for i in range(6, 15)]
    shapes = np.array([(1, m, n, k) for m in sides for n in sides for k in sides])
    seconds = np.array([seconds_scale * roof(*s[1:]) / efficiency(*s[1:]) for s in shapes.tolist()])
    return PointTable(op, dtype, shapes, seconds, np.full(len(seconds), 0.01), np.full(len(seconds), 9))


MEASURED = Profile("m", "test", reference="h100-sxm", points=(table(),))
COSTS = Costs(MEASURED, H100)
