"""The kernel of attention to chosen keys, which several kinds of layers call (DeepSeek's FlashMLA, sparse)."""

from __future__ import annotations

from sim.core.operator_kinds import ATTENTION_LAUNCHES, SPARSE, shape_flops
from sim.core.program import Compute, Phase
from sim.models.operators import F


def sparse_kernel(name: str, phase: Phase, shape: tuple[int, ...], dtype: str, moved_bytes: float) -> Compute:
    """Return one call: the forward in phase F, the backward in another.

    `shape` is that of `attention_forward`, with a query's keys in place of the sequence's; `moved_bytes` are read and
    written.
    """
    kind = "attention_forward" if phase is F else "attention_backward"
    flops, launches = shape_flops(kind, shape), ATTENTION_LAUNCHES[kind]
    return Compute(name, kind, shape, dtype, flops, moved_bytes, phase, launches, one_call=True, kernel=SPARSE)
