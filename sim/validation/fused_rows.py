"""Rows of elementwise, norm, loss, embedding and small MLP kernels, by who wrote the kernel.

Each is one operator, `elementwise:OP:PROVIDER:PASS`, of so many bytes: what a kernel that reads its inputs and writes
its outputs once would move (a matmul's flops count as the bytes that take as long). A profile that measured such
operators prices them by their own points; without, they are taken at the bandwidth that any streaming kernel reaches,
times the passes over memory that separate torch kernels need, or, with matmuls in them, operator by operator.

Rows without a dtype are taken for fp32, Liger's of Megatron's operators for bf16: in fp32 they would have moved up to
1.8 times what the memory can.

A `swiglu` or `geglu` of two widths is the MLP, matmuls included; of one width the activation alone, whose result is
that wide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.core.program import Compute, Phase
from sim.validation.matmul_rows import EAGER, MATMUL_ROWS, matmul_items
from sim.validation.prediction import NotSimulated
from sim.validation.sizes import Sizes, dtype_of, pass_of

MAX_BYTES = 1e18
FLOPS_PER_BYTE = 150.0  # where a matmul takes as long as a stream: A100 and H100 in 16 bits, 153 and 295

_OTHER_NAMES = {
    "rmsnorm": "rms_norm",
    "layernorm": "layer_norm",
    "add_rms_norm": "fused_add_rms_norm",
    "relu2": "relu_squared",
    "silu_and_mul": "megatron_swiglu",
    "gelu_and_mul": "gated_gelu",
    "rotary": "rope",
    "rotary_embedding": "rope",
}

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
_EAGER_PASSES = {
    "rms_norm": 5.0,
    "rope": 4.0,
    "llama4_rope": 4.0,
    "cross_entropy": 2.0,
    "fused_add_rms_norm": 4.0,
    "megatron_swiglu": 5 / 3,
    "gated_gelu": 5 / 3,
}
_BF16 = ("megatron_cross_entropy", "megatron_rms_norm", "megatron_swiglu")  # where a row says no format
_ACTIVATIONS = {"swiglu": "megatron_swiglu", "geglu": "gated_gelu"}


def fused_kernel(op: str, data: Mapping[str, Any], measured: Collection[str] | None = None) -> list[Compute]:
    """The kernels that a row of `op` by its provider launches in its pass (forward, backward, full).

    One operator; but where it has matmuls in it and is not among the operators `measured`, those it consists of.

    Raises:
        NotSimulated: an operator that is not known.
        InputError: a size that is missing or makes no sense.
    """
    dtype = dtype_of(data, "bf16" if op in _BF16 else "fp32")
    which, provider = pass_of(data), str(data.get("provider") or "")
    op = _OTHER_NAMES.get(op, op)
    sizes = Sizes(op, data)
    if op in _ACTIVATIONS and not (sizes.has("width") and sizes.has("ffn")):
        op = _ACTIVATIONS[op]
    name = f"{op}:{provider or 'torch'}:{which}"
    if op in MATMUL_ROWS and measured is not None and name not in measured:
        return matmul_items(op, sizes, dtype, which, provider)
    moved = _bytes(op, sizes, dtype, which)
    if moved > MAX_BYTES:
        raise InputError(f"{op}: found {moved:.3g} bytes in all; allowed: at most {MAX_BYTES:g}")
    passes = _EAGER_PASSES.get(op, 1.0) if provider in EAGER else 1.0
    whole = (int(moved),)
    return [Compute(name, "elementwise", whole, dtype, moved, moved * passes, Phase.FORWARD, kernel=name)]


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
