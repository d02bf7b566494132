"""Rows of elementwise, norm, loss, embedding and small MLP kernels, by who wrote the kernel.

Each is one operator, `elementwise:OP:PROVIDER:PASS`, of so many bytes: what a kernel that reads its inputs and writes
its outputs once would move (a matmul's flops count as the bytes that take as long). A profile that measured such
operators prices them by their own points; without, they are taken at the bandwidth that any streaming kernel reaches,
times the passes over memory that separate torch kernels need.

Rows without a dtype are taken for fp32, Liger's of Megatron's operators for bf16: in fp32 they would have moved up to
1.8 times what the memory can.

A `swiglu` or `geglu` of two widths is the MLP, matmuls included; of one width the activation alone, whose result is
that wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sim.dtypes import dtype_bytes, normalise_dtype
from sim.errors import InputError
from sim.program import Compute, Phase
from sim.published.prediction import NotSimulated

FLOPS_PER_BYTE = 150.0  # where a matmul takes as long as a stream: A100 and H100 in 16 bits, 153 and 295

# The names under which tables give a size; the first that a row has counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "elements": ("elements", "numel"),
    "tokens": ("M", "BT", "tokens", "rows", "num_tokens"),
    "batch": ("B", "bsz", "batch", "batch_size"),
    "length": ("T", "S", "seq_len", "seqlen"),
    "width": ("H", "N", "D", "hidden", "hidden_size", "hidden_dim", "dim", "cols"),
    "vocab": ("V", "vocab", "vocab_size"),
    "ffn": ("ffn_local", "intermediate_size", "intermediate_dim", "ffn"),
    "heads": ("heads", "num_heads", "num_q_heads"),
    "kv_heads": ("kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "head_size"),
    "experts": ("E", "experts"),
    "top_k": ("K", "experts_per_token", "top_k"),
    "tp": ("TP", "tp"),
}
_OTHER_NAMES = {
    "rmsnorm": "rms_norm", "layernorm": "layer_norm", "add_rms_norm": "fused_add_rms_norm", "relu2": "relu_squared",
    "silu_and_mul": "megatron_swiglu", "gelu_and_mul": "gated_gelu", "rotary": "rope", "rotary_embedding": "rope",
}  # fmt: skip


class Sizes:
    """A row's numbers by what they mean."""

    def __init__(self, op: str, data: Mapping[str, Any]) -> None:
        shape = data.get("shape")
        given = {**data, **(shape if isinstance(shape, dict) else {})}
        self._op = op
        self._given = {k: v for k, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    def __call__(self, what: str, default: float | None = None) -> float:
        """The size, `default` where the row has none; InputError where there is no default either."""
        name = next((name for name in _NAMES[what] if name in self._given), None)
        if name is None and default is None:
            allowed = f"a number under one of {', '.join(_NAMES[what])}"
            raise InputError(f"{self._op}: {what}: not given; allowed: {allowed}")
        found = default if name is None else self._given[name]
        assert found is not None
        if not 0 < found < math.inf:
            raise InputError(f"{self._op}: {name}: found {found}; allowed: a number above 0")
        return float(found)

    def has(self, what: str) -> bool:
        return any(name in self._given for name in _NAMES[what])

    @property
    def tokens(self) -> float:
        """Rows of the tensor: given as such, or sequences times their length."""
        return self("tokens") if self.has("tokens") else self("batch", 1.0) * self("length")

    @property
    def plane(self) -> float:
        """Elements of a tensor of rows: given as such, or rows times their width."""
        return self("elements") if self.has("elements") else self.tokens * self("width")

    def rows_of(self, *widths: str) -> float:
        """Elements of rows as wide as the first of `widths` that is given says."""
        return self.tokens * self(next((w for w in widths if self.has(w)), widths[0]))

    @property
    def rotated(self) -> float:
        """Elements that rope turns: queries, as wide as all their heads, and keys, of fewer heads."""
        if not self.has("heads"):
            return self.plane
        heads = self("heads")
        width = self("width") if self.has("width") else heads * self("head_dim")
        return self.tokens * width * (1 + self("kv_heads", heads) / heads)


# Elements of the tensor that decides, accesses to it per element in forward and in backward.
_ELEMENTS: Mapping[str, tuple[Callable[[Sizes], float], float, float]] = {
    "cross_entropy": (lambda s: s.tokens * s("vocab"), 3, 2),
    "megatron_cross_entropy": (lambda s: s.tokens * s("vocab") / s("tp", 1.0), 3, 2),
    "kl_div": (lambda s: s.tokens * s("vocab"), 3, 2),
    "softmax": (lambda s: s.rows_of("vocab", "width"), 2, 3),
    "embedding": (lambda s: s.tokens * s("width"), 2, 2),
    "layer_norm": (lambda s: s.plane, 2, 3),
    "rms_norm": (lambda s: s.plane, 2, 3),
    "megatron_rms_norm": (lambda s: s.plane, 2, 3),
    "fused_add_rms_norm": (lambda s: s.plane, 4, 4),
    "gelu": (lambda s: s.plane, 2, 3),
    "rope": (lambda s: s.rotated, 2, 2),
    "llama4_rope": (lambda s: s.rotated, 2, 2),
    "relu_squared": (lambda s: s.plane, 2, 3),
    "silu": (lambda s: s.plane, 2, 3),
    "copy": (lambda s: s.plane, 2, 2),
    "megatron_swiglu": (lambda s: s.rows_of("ffn", "width"), 3, 5),
    "gated_gelu": (lambda s: s.rows_of("ffn", "width"), 3, 5),
}
# Flops of the forward of what has matmuls in it; backward twice that.
_FLOPS: Mapping[str, Callable[[Sizes], float]] = {
    "geglu": lambda s: 6 * s.tokens * s("width") * s("ffn"),
    "swiglu": lambda s: 6 * s.tokens * s("width") * s("ffn"),
    "fused_linear_cross_entropy": lambda s: 2 * s.tokens * s("width") * s("vocab"),
    "fused_moe": lambda s: 6 * max(s.tokens * s("top_k"), 64 * s("experts")) * s("width") * s("ffn"),
}
_EAGER = ("huggingface", "torch", "megatron-unfused")  # as separate torch kernels
_EAGER_PASSES = {
    "rms_norm": 5.0, "rope": 4.0, "llama4_rope": 4.0, "cross_entropy": 2.0, "fused_add_rms_norm": 4.0,
    "megatron_swiglu": 5 / 3, "gated_gelu": 5 / 3,
}  # fmt: skip
_ACTIVATIONS = {"swiglu": "megatron_swiglu", "geglu": "gated_gelu"}


def fused_kernel(op: str, data: Mapping[str, Any]) -> list[Compute]:
    """The kernels that a row of `op` by its provider launches in its pass (forward, backward, full).

    Raises:
        NotSimulated: an operator that is not known.
        InputError: a size that is missing or makes no sense.
    """
    dtype = str(normalise_dtype(data.get("dtype") or ("bf16" if op.startswith("megatron") else "fp32")))
    which, provider = str(data.get("pass", "forward")), data.get("provider")
    op = _OTHER_NAMES.get(op, op)
    sizes = Sizes(op, data)
    if op in _ACTIVATIONS and not (sizes.has("width") and sizes.has("ffn")):
        op = _ACTIVATIONS[op]
    moved = _bytes(op, sizes, dtype, which)
    name = f"{op}:{provider or 'torch'}:{which}"
    passes = _EAGER_PASSES.get(op, 1.0) if provider in _EAGER else 1.0
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
