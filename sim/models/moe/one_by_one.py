"""Experts that run one after another on parts of tensors that hold the weights of all: DBRX's own code in Transformers.

transformers/models/dbrx/modeling_dbrx.py, DbrxExperts.forward: each expert indexes its weights and its tokens. The
backward of each index puts the gradient into zeros as large as what was indexed, and these are added up. So for every
matrix as many tensors of all experts' size are written as there are experts.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.models.attention.split_gradients import INDEX_PUT_KERNELS
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, accumulate, memory_op

# Kernels of an expert, counted in one captured program. Forward: its tokens' places 5, copies to the host 4, tokens and
# weights by index 2, matmuls 3, the activation 1, products 2, the sum by index 1. Backward: a copy by index 1, products
# 4, matmuls 6, zeros 2, sums 2, the activation 1. One grouped matmul of all experts has those of one.
EXPERT_KERNELS = (18, 16)


def gradients_of_each(d: Dims, experts: int, elements: int, matrices: int, tokens: int) -> Operator:
    """What the loop adds to one grouped matmul; `elements`: of one expert's `matrices` together.

    Zeros of all experts' weights are written for each expert, and its own part is read and written (as in
    `sim.models.attention.split_gradients`); all but the first are added. Tokens' gradients likewise, put in by torch's
    `index_put_` (accumulate).
    """
    e = FP32_BYTES if d.autocast else d.act_bytes  # the parameters', which are indexed before they are cast
    whole, hidden = float(experts * elements), float(tokens * d.hidden)
    put = memory_op(
        "expert_gradients_put",
        I,
        "copy",
        whole,
        (experts + 2) * whole * e,
        d.act,
        2 * experts * matrices,
        "slice_backward",
    )
    zeros = memory_op("expert_tokens_zeros", I, "elementwise", experts * hidden, experts * hidden * d.act_bytes, d.act)
    sorts = memory_op("expert_index_sorts", I, "embedding", 1, 0, d.act, 2 * experts * INDEX_PUT_KERNELS, "index_put")
    added = accumulate(d, "expert_gradients_sum", (experts - 1) * whole)
    added = replace(added, bytes=added.bytes * e / d.act_bytes, kernels=(experts - 1) * matrices)
    forward, backward = (n * (experts - 1) for n in EXPERT_KERNELS)
    looped = memory_op("experts_one_by_one", F, "elementwise", hidden, 2 * hidden * d.act_bytes, d.act, forward)
    return Operator(
        "experts_one_by_one",
        (looped,),
        (
            replace(zeros, kernels=backward),
            replace(sorts, looped=True),
            put,
            added,
            replace(accumulate(d, "expert_tokens_sum", (experts - 1) * hidden), kernels=experts - 1),
        ),
    )
