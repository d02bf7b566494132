"""The factor of queries that grows with their positions: Ministral 3's and Mistral 4's own code in Transformers.

transformers/models/ministral3/modeling_ministral3.py and mistral4/modeling_mistral4.py, get_llama_4_attn_scale: each
layer makes the factor of every position anew, by six kernels and a cast, and multiplies whole queries by it. It is a
constant, so that nothing of the queries is kept, and backward the gradient is multiplied.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.models.dims import Dims
from sim.models.elementwise import launches_alone
from sim.models.operators import F, I, Operator, memory_op
from sim.models.precision.casts import rope_gives_fp32

POSITION_KERNELS = 7  # quotient, floor, sum, logarithm, product, sum, cast


def query_factor(d: Dims, elements: int) -> tuple[Operator, ...]:
    """Return the kernels over queries of `elements`; none where the code has no factor or a compiler fuses them.

    torch does not vectorize a product with one number of each position.
    """
    if not d.code.scales_queries or d.framework.fuses_chains:
        return ()
    moved = 2 * elements * (FP32_BYTES if rope_gives_fp32(d) else d.act_bytes)
    ahead, back = (
        replace(memory_op(name, phase, "elementwise", elements, moved, d.act), single_elements=float(elements))
        for name, phase in (("query_factor", F), ("query_factor_backward", I))
    )
    positions = launches_alone("query_factor_positions", F, POSITION_KERNELS)
    return (Operator("query_factor", (*positions, ahead), (back,)),)
