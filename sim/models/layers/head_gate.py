"""A gate of one number a head and token on attention's result (LFM3, Laguna, Ling 3).

In separate operators: the sigmoid, and a product that reads it once a head. Backward: the result's gradient, the gate's
as a product and its sum over a head, the sigmoid's (`Lfm3Attention` in transformers/models/lfm3/modeling_lfm3.py).
"""

from __future__ import annotations

from sim.core.program import Compute, Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, memory_op
from sim.models.served import ServingDims


def head_gate(d: Dims, elements: int, gates: int) -> Operator:
    """The result of `elements` numbers times a sigmoid of each of `gates`."""
    e, fused = d.act_bytes, d.framework.fuses_activation
    ahead, back = 2 * elements + gates, 3 * elements + 2 * gates
    if not fused:
        ahead, back = ahead + 2 * gates, 6 * elements + 5 * gates
    kernels = (1, 1) if fused else (2, 4)
    forward = memory_op("attention_gate", F, "elementwise", elements, ahead * e, d.act, kernels[0])
    backward = memory_op("attention_gate_backward", I, "elementwise", elements, back * e, d.act, kernels[1])
    gate = "attention gate" if fused else "sigmoid of the gate"
    saved = (Saved("attention", "attention output", e * elements), Saved("attention", gate, e * gates))
    return Operator("attention_gate", (forward,), (backward,), saved, backward_bytes=2 * e * elements)


def served_head_gate(d: ServingDims, elements: int, gates: int) -> Compute:
    """One kernel that reads and writes the result and reads the gates."""
    return memory_op("attention_gate", F, "elementwise", elements, (2 * elements + gates) * d.act_bytes, d.act)
