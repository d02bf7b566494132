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
from sim.errors import InputError
from sim.program import Compute, Phase
from sim.published.prediction import NotSimulated

FLOPS_PER_BYTE = 150.0  # where a matmul takes as long as a stream: A100 and H100 in 16 bits, 153 and 295

# The names under which tables give a size; the first that a row has counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("M", "BT", "tokens", "rows"),
    "batch": ("B", "bsz", "batch"),
    "length": ("T", "S", "seq_len"),
    "width": ("H", "N", "D", "hidden", "hidden_size"),
    "vocab": ("V", "vocab"),
    "ffn": ("ffn_local", "intermediate_size", "intermediate_dim", "ffn"),
    "experts": ("E", "experts"),
    "top_k": ("K", "experts_per_token", "top_k"),
    "tp": ("TP", "tp"),
}


class Sizes:
    """A row's numbers by what they mean."""

    def __init__(self, op: str, data: Mapping[str, Any]) -> None:
        given = {**data, **data.get("shape", {})}
        self._op, self._given = op, {k: float(v) for k, v in given.items() if isinstance(v, int | float)}

    def __call__(self, what: str, default: float | None = None) -> float:
        """The size, `default` where the row has none; InputError where there is no default either."""
        found = next((self._given[name] for name in _NAMES[what] if name in self._given), default)
        if found is None:
            raise InputError(f"{self._op}: {what}: not given; allowed: a number under one of {', '.join(_NAMES[what])}")
        return found

    @property
    def tokens(self) -> float:
        """Rows of the tensor: given as such, or sequences times their length."""
        if any(name in self._given for name in _NAMES["tokens"]):
            return self("tokens")
        return self("batch", 1.0) * self("length")


# Elements of the tensor that decides, accesses to it per element in forward and in backward.
_ELEMENTS: Mapping[str, tuple[Callable[[Sizes], float], float, float]] = {
    "cross_entropy": (lambda s: s.tokens * s("vocab"), 3, 2),
    "megatron_cross_entropy": (lambda s: s.tokens * s("vocab") / s("tp", 1.0), 3, 2),
    "kl_div": (lambda s: s.tokens * s("vocab"), 3, 2),
    "softmax": (lambda s: s.tokens * s("vocab"), 2, 3),
    "embedding": (lambda s: s.tokens * s("width"), 2, 2),
    "layer_norm": (lambda s: s.tokens * s("width"), 2, 3),
    "rms_norm": (lambda s: s.tokens * s("width"), 2, 3),
    "megatron_rms_norm": (lambda s: s.tokens * s("width"), 2, 3),
    "fused_add_rms_norm": (lambda s: s.tokens * s("width"), 4, 4),
    "gelu": (lambda s: s.tokens * s("width"), 2, 3),
    "rope": (lambda s: s.tokens * s("width"), 2, 2),
    "llama4_rope": (lambda s: s.tokens * s("width"), 2, 2),
    "relu_squared": (lambda s: s.tokens * s("width"), 2, 3),
    "megatron_swiglu": (lambda s: s.tokens * s("ffn"), 3, 5),
}
# Flops of the forward of what has matmuls in it; backward twice that.
_FLOPS: Mapping[str, Callable[[Sizes], float]] = {
    "geglu": lambda s: 6 * s.tokens * s("width") * s("ffn"),
    "swiglu": lambda s: 6 * s.tokens * s("width") * s("ffn"),
    "fused_linear_cross_entropy": lambda s: 2 * s.tokens * s("width") * s("vocab"),
    "fused_moe": lambda s: 6 * max(s.tokens * s("top_k"), 64 * s("experts")) * s("width") * s("ffn"),
}
_EAGER = ("huggingface", "torch", "megatron-unfused")  # as separate torch kernels
_EAGER_PASSES = {"rms_norm": 5.0, "rope": 4.0, "llama4_rope": 4.0, "cross_entropy": 2.0, "fused_add_rms_norm": 4.0}


def fused_kernel(op: str, data: Mapping[str, Any]) -> list[Compute]:
    """The kernels that a row of `op` by its provider launches in its pass (forward, backward, full)."""
    dtype = str(normalise_dtype(data.get("dtype") or "float32"))
    which = str(data.get("pass", "forward"))
    moved = _bytes(op, Sizes(op, data), dtype, which)
    name = f"{op}:{data.get('provider', 'torch')}:{which}"
    passes = _EAGER_PASSES.get(op, 1.0) if data.get("provider") in _EAGER else 1.0
    return [Compute(name, "elementwise", (int(moved),), dtype, moved, moved * passes, Phase.FORWARD)]


def _bytes(op: str, sizes: Sizes, dtype: str, which: str) -> float:
    if op in _FLOPS:
        forward = _FLOPS[op](sizes) / FLOPS_PER_BYTE
        return forward * {"forward": 1.0, "backward": 2.0}.get(which, 3.0)
    if op not in _ELEMENTS:
        raise NotSimulated(f"no operator {op!r}")
    count, there, back = _ELEMENTS[op]
    accesses = {"forward": there, "backward": back}.get(which, there + back)
    table = 2 * sizes("vocab") * sizes("width") if op == "embedding" and which != "forward" else 0.0
    return (count(sizes) * accesses + table) * dtype_bytes(dtype)
