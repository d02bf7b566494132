"""Experts that compute every token: Llama 4's own code in Transformers multiplies what a router chose by its score.

transformers/models/llama4/modeling_llama4.py, Llama4TextMoe.forward: tokens are repeated once for each expert
(`hidden_states.repeat`) and multiplied by their scores, which are zero for experts that were not chosen. Two batched
matmuls run over all experts (Llama4TextExperts.forward), and their results are summed. So the experts' matmuls take
experts / top_k times those of a layer that sends each token to the chosen experts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Saved
from sim.models.dims import Dims
from sim.models.moe.matmuls import expert_matmuls
from sim.models.moe.routing import Routing, moe_of
from sim.models.operators import F, I, Operator, memory_op
from sim.models.precision.casts import cast

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def every_expert(scenario: Scenario, d: Dims, r: Routing) -> tuple[Operator, ...]:
    """Repeated and weighted tokens, the matmuls of all experts over all of them, and the sum of the results."""
    moe = moe_of(scenario)
    rows = float(r.tokens * moe.experts)
    computed = replace(r, sent=rows, received=rows, fullest=rows, wire=0.0)
    weighted, summed = _weighted(d.of_stream, r.tokens, rows), _summed(d, r.tokens, rows)
    matmuls = expert_matmuls(scenario, d, computed)
    if not d.autocast:
        return (weighted, *matmuls, summed)
    return (weighted, _cast(d, rows, sum(m.expert_params for m in matmuls)), *matmuls, summed)


def _cast(d: Dims, rows: float, weights: float) -> Operator:
    """Autocast's copies in 16 bits of weighted tokens and of both weights; backward the tokens' gradient is widened."""
    n = rows * d.hidden
    ahead = (cast(d, "expert_inputs_cast", F, n), cast(d, "experts_weight_cast", F, weights, 2))
    return Operator("experts_cast", ahead, (cast(d, "expert_inputs_dgrad_cast", I, n, widens=True),))


def _weighted(d: Dims, tokens: int, rows: float) -> Operator:
    """A copy of each token for each expert, times its score (2 accesses), which is copied to that order. Backward: the
    gradient times the tokens (3), summed over a token's numbers (1), copied back, and times the scores (2), summed over
    experts. Torch vectorizes no product with a score that all numbers of a token share.
    """
    n, e = rows * d.hidden, d.act_bytes
    own = tokens * d.hidden * e
    ahead = memory_op("expert_inputs_weighted", F, "elementwise", n, 2 * n * e, d.act, 2)
    back = memory_op("expert_inputs_weighted_backward", I, "elementwise", n, 2 * n * e, d.act)
    return Operator(
        "expert_inputs",
        (
            memory_op("expert_inputs_copy", F, "copy", n, own + n * e, d.act),
            replace(ahead, single_elements=n),
        ),
        (
            memory_op("expert_inputs_backward", I, "elementwise", n, 5 * n * e + own, d.act, 4),
            replace(back, single_elements=n),
        ),
        (Saved("copies for all experts", n * e),),
        forward_bytes=n * e,
        backward_bytes=2 * n * e,
    )


def _summed(d: Dims, tokens: int, rows: float) -> Operator:
    """The sum over experts; backward copies a token's gradient for each of them."""
    moved = (rows + tokens) * d.hidden * d.act_bytes
    expanded = memory_op("expert_sum_backward", I, "copy", rows * d.hidden, moved, d.act)
    return Operator(
        "expert_sum",
        (memory_op("expert_sum", F, "elementwise", rows * d.hidden, moved, d.act),),
        (replace(expanded, single_elements=rows * d.hidden),),
        forward_bytes=rows * d.hidden * d.act_bytes,
        backward_bytes=rows * d.hidden * d.act_bytes,
    )
