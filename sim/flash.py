"""Fused attention by its published speed: what training kernels reach, by head size, length and occupancy.

    seconds = launch + flops x (1 + tile / kv_len, if causal) x (1 + ramp / kv_len) x (1 + SMs / tiles) / (peak x e)

The diagonal's tiles are computed whole (tile 128); a row of tiles pays a prologue and an epilogue, worth `ramp` keys;
the last, partly filled wave of tiles costs about one wave (`tiles` = batch x heads x q_len / 128). e is the efficiency
of a head size, interpolated between 64, 128 and 256 over log2. Backward has a share of the forward's e. Coefficients
are those of an implementation (`flash2_efficiency_128`, ...); `attention_...` are those of the one that training uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from sim.program import Compute
from topology.spec import GpuSpec

TILE = 128
SIZES = (64, 128, 256)
LAUNCH_S = 4e-6
UNCERTAINTY = 0.08  # held-out rows of the published charts


def flash_seconds(
    op: Compute, gpu: GpuSpec, peak_flops_per_s: float, coefficient: Callable[[str, float], float]
) -> float | None:
    """Seconds of an attention_forward or attention_backward; None if the profile has no such coefficients."""
    prefix = op.name if coefficient(f"{op.name}_efficiency_128", 0.0) else "attention"
    efficiency = _at_size(prefix, math.sqrt(op.shape[5] * op.shape[6]), coefficient)
    if efficiency <= 0:
        return None
    batch, heads, _, q_len, kv_len, _, _, causal = op.shape
    if op.kind == "attention_backward":
        efficiency *= coefficient(f"{prefix}_backward_share", 1.0)
    tiles = batch * heads * max(1.0, q_len / TILE)
    work = op.flops * (1.0 + TILE / kv_len * bool(causal)) * (1.0 + coefficient(f"{prefix}_ramp_tokens", 0.0) / kv_len)
    return LAUNCH_S + work * (1.0 + gpu.sm_count / tiles) / (peak_flops_per_s * efficiency)


def _at_size(prefix: str, head_dim: float, coefficient: Callable[[str, float], float]) -> float:
    known = [(math.log2(d), math.log(e)) for d in SIZES if (e := coefficient(f"{prefix}_efficiency_{d}", 0.0)) > 0]
    if not known:
        return 0.0
    x = min(max(math.log2(head_dim), known[0][0]), known[-1][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(known[-1][1])
