"""Gates on attention's result: one number a head and token (LFM3, Laguna, Ling 3), or one of every number (Qwen3-Next).

In separate operators: the sigmoid, and a product that reads it once a head. Backward: the result's gradient, the gate's
as a product and its sum over a head, the sigmoid's (`Lfm3Attention` in transformers/models/lfm3/modeling_lfm3.py).
Laguna's is a softplus in fp32, with a cast before it and one behind it, and so backward (`LagunaAttention` in
transformers/models/laguna/modeling_laguna.py).
"""

from __future__ import annotations

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, memory_op
from sim.models.serving.operators import ServingDims


def head_gate(d: Dims, elements: int, gates: int) -> Operator:
    """The result of `elements` numbers times a sigmoid (or softplus) of each of `gates`."""
    e, fused = d.act_bytes, d.framework.fuses_activation
    ahead, back = (2 * elements + gates) * e, (3 * elements + 2 * gates) * e
    kernels, kept = (1, 1), e * gates
    if not fused:
        ahead, back, kernels = ahead + 2 * e * gates, (6 * elements + 5 * gates) * e, (2, 4)
    if not fused and d.code.softplus_gates and e < FP32_BYTES:
        casts = 2 * (e + FP32_BYTES) * gates
        wider = FP32_BYTES - e
        ahead, back, kernels = ahead + casts + 2 * wider * gates, back + casts + 3 * wider * gates, (4, 6)
        kept += FP32_BYTES * gates  # the softplus's input
    forward = memory_op("attention_gate", F, "elementwise", elements, ahead, d.act, kernels[0])
    backward = memory_op("attention_gate_backward", I, "elementwise", elements, back, d.act, kernels[1])
    gate = "attention gate" if fused else "activation of the gate"
    saved = (Saved("attention output", e * elements), Saved(gate, kept))
    return Operator("attention_gate", (forward,), (backward,), saved, backward_bytes=2 * e * elements)


def element_gate(d: Dims, elements: int, in_fp32: bool = False) -> Operator:
    """The result times a sigmoid of as many gates; kept are the result and what a kernel makes the sigmoid of, or the
    sigmoid where it is a kernel of its own (torch's sigmoid_backward reads its result), there `in_fp32` (A.X K2)."""
    e, kernels = d.act_bytes, 1 if d.framework.fuses_activation else 2
    wider = FP32_BYTES - e if in_fp32 and kernels == 2 else 0.0
    forward = memory_op(
        "attention_gate",
        F,
        "elementwise",
        elements,
        ((1 + 2 * kernels) * e + 2 * wider) * elements,
        d.act,
        kernels,
    )
    moved = ((3 + 2 * kernels) * e + 4 * wider) * elements
    backward = memory_op("attention_gate_backward", I, "elementwise", elements, moved, d.act, kernels + 1)
    saved = (
        Saved("attention output", e * elements),
        Saved("attention gate" if kernels == 1 else "sigmoid of the gate", (e + wider) * elements),
    )
    return Operator("attention_gate", (forward,), (backward,), saved, backward_bytes=3 * e * elements)


def served_element_gate(d: ServingDims, elements: int) -> Compute:
    """One kernel that reads the result and as many gates, and writes the product."""
    return memory_op("attention_gate", F, "elementwise", elements, 3 * elements * d.act_bytes, d.act)


def served_head_gate(d: ServingDims, elements: int, gates: int) -> Compute:
    """One kernel that reads and writes the result and reads the gates."""
    return memory_op("attention_gate", F, "elementwise", elements, (2 * elements + gates) * d.act_bytes, d.act)
