"""Rows of elementwise, norm, loss, embedding and small MLP kernels, by who wrote the kernel.

Each is one operator, `elementwise:OP:PROVIDER:PASS`, of so many bytes: what a kernel that reads its inputs and writes
its outputs once would move (a matmul's flops count as the bytes that take as long). A profile that measured such
operators prices them by their own points; without, they are taken at the bandwidth that any streaming kernel reaches,
times the passes over memory that separate torch kernels need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sim.dtypes import dtype_bytes, normalise_dtype
from sim.program import Compute, Phase
from sim.published.predict import NotSimulated

Sizes = Mapping[str, float]
FLOPS_PER_BYTE = 150.0  # where a matmul takes as long as a stream: A100 and H100 in 16 bits, 153 and 295

# Elements of the tensor that decides, accesses to it per element in forward and in backward.
_ELEMENTS: Mapping[str, tuple[Callable[[Sizes], float], float, float]] = {
    "cross_entropy": (lambda s: s["B"] * s["T"] * s["V"], 3, 2),
    "megatron_cross_entropy": (lambda s: s["S"] * s["B"] * s["V"] / s.get("TP", 1), 3, 2),
    "embedding": (lambda s: s["B"] * s["T"] * s["D"], 2, 2),
    "layer_norm": (lambda s: s["M"] * s["N"], 2, 3),
    "rms_norm": (lambda s: s["M"] * s["H"], 2, 3),
    "megatron_rms_norm": (lambda s: s["S"] * s["B"] * s["H"], 2, 3),
    "fused_add_rms_norm": (lambda s: s["M"] * s["H"], 4, 4),
    "rope": (lambda s: s.get("T", s.get("seq_len", 0)) * s.get("H", s.get("hidden_size", 0)), 2, 2),
    "llama4_rope": (lambda s: s.get("T", s.get("seq_len", 0)) * s.get("H", s.get("hidden_size", 0)), 2, 2),
    "relu_squared": (lambda s: s["M"] * s["N"], 2, 3),
    "megatron_swiglu": (lambda s: s["S"] * s["B"] * s["ffn_local"], 3, 5),
}
# Flops of the forward of what has matmuls in it; backward twice that.
_FLOPS: Mapping[str, Callable[[Sizes], float]] = {
    "geglu": lambda s: 6 * s.get("bsz", s.get("B", 1)) * s["T"] * s["hidden_size"] * s["intermediate_size"],
    "swiglu": lambda s: 6 * s.get("bsz", s.get("B", 1)) * s["T"] * s["hidden_size"] * s["intermediate_size"],
    "fused_linear_cross_entropy": lambda s: 2 * s["BT"] * s["H"] * s["V"],
    "fused_moe": lambda s: 6 * max(s["T"] * s["K"], 64 * s["E"]) * s["H"] * s["intermediate_dim"],
}
_EAGER = ("huggingface", "torch", "megatron-unfused")  # as separate torch kernels
_EAGER_PASSES = {"rms_norm": 5.0, "rope": 4.0, "llama4_rope": 4.0, "cross_entropy": 2.0, "fused_add_rms_norm": 4.0}


def fused_kernel(op: str, data: Mapping[str, Any]) -> list[Compute]:
    """The kernels that a row of `op` by its provider launches in its pass (forward, backward, full)."""
    sizes = {**data.get("shape", {}), **{k: v for k, v in data.items() if k in _SWEPT}}
    sizes = {k: float(v) for k, v in sizes.items() if isinstance(v, int | float)}
    dtype = str(normalise_dtype(data.get("dtype") or "float32"))
    which = str(data.get("pass", "forward"))
    moved = _bytes(op, sizes, dtype, which)
    name = f"{op}:{data.get('provider', 'torch')}:{which}"
    passes = _EAGER_PASSES.get(op, 1.0) if data.get("provider") in _EAGER else 1.0
    return [Compute(name, "elementwise", (int(moved),), dtype, moved, moved * passes, Phase.FORWARD)]


_SWEPT = ("V", "BT", "T", "N", "H", "D", "E", "K", "ffn_local", "B", "S", "M", "seq_len")


def _bytes(op: str, sizes: Sizes, dtype: str, which: str) -> float:
    if op in _FLOPS:
        forward = _FLOPS[op](sizes) / FLOPS_PER_BYTE
        return forward * {"forward": 1.0, "backward": 2.0}.get(which, 3.0)
    if op not in _ELEMENTS:
        raise NotSimulated(f"no operator {op!r}")
    count, there, back = _ELEMENTS[op]
    accesses = {"forward": there, "backward": back}.get(which, there + back)
    table = 2 * sizes["V"] * sizes["D"] if op == "embedding" and which != "forward" else 0.0
    return (count(sizes) * accesses + table) * dtype_bytes(dtype)
