"""The way of tokens to their experts and home again: sorted, sent, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Item, Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.moe.routing import Routing
from sim.models.operators import F, I, Operator, collective, memory_op

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def dispatch(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Copies sorted by expert, exchanged, gathered over expert_tp; the gradients back the same way."""
    n, e = r.sent * d.hidden, d.act_bytes
    moved = (r.tokens * d.hidden + n) * e
    forward = (
        memory_op("permute", F, "permute", n, moved, d.act, 2),
        *_exchange(scenario, d, r, "dispatch", F, quantized=True),
        *_probabilities(scenario, d, r, "dispatch_weights", F),
        *_expert_tp(scenario, d, r, "expert_gather", "all_gather", F),
        *_sort(scenario, d, r, "sort_chunks", F),
    )
    backward = (
        *_sort(scenario, d, r, "sort_chunks_backward", I),
        *_expert_tp(scenario, d, r, "expert_grad_scatter", "reduce_scatter", I),
        *_probabilities(scenario, d, r, "dispatch_weights_backward", I),
        *_exchange(scenario, d, r, "dispatch_backward", I, quantized=False),
        memory_op("permute_backward", I, "permute", n, moved, d.act, 2),
    )
    index = Saved("moe", "permutation", r.sent * d.framework.routing_bytes)
    return Operator(
        "dispatch",
        forward,
        backward,
        (index,),
        forward_bytes=n * e,
        backward_bytes=(n + r.received * d.hidden) * e,
    )


def combine(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Results home, weighted and summed per token; the router's gradient needs the results (Megatron weights
    the activation instead and keeps nothing). Without sequence parallelism tp ranks then gather one another's
    tokens.
    """
    n, e = r.sent * d.hidden, d.act_bytes
    moved = (n + r.tokens * d.hidden) * e
    forward: Program = (
        *_sort(scenario, d, r, "unsort_chunks", F),
        *_expert_tp(scenario, d, r, "expert_scatter", "reduce_scatter", F),
        *_exchange(scenario, d, r, "combine", F, quantized=False),
        memory_op("unpermute", F, "permute", n, moved, d.act, 2),
    )
    backward: Program = (
        memory_op("unpermute_backward", I, "permute", n, moved + n * e, d.act, 2),
        *_exchange(scenario, d, r, "combine_backward", I, quantized=True),
        *_expert_tp(scenario, d, r, "expert_grad_gather", "all_gather", I),
        *_sort(scenario, d, r, "unsort_chunks_backward", I),
    )
    if d.tp > 1 and not d.sp:
        size = d.tokens * d.hidden * e
        forward += (collective("moe_output_gather", "all_gather", size, F),)
        backward += (collective("moe_input_grad_gather", "all_gather", size, I),)
    kept = 0.0 if d.framework.weights_experts_after_activation else n * e
    return Operator(
        "combine",
        forward,
        backward,
        (Saved("moe", "expert results", kept),),
        forward_bytes=n * e,
        backward_bytes=(n + r.received * d.hidden) * e,
    )


def _exchange(scenario: Scenario, d: Dims, r: Routing, name: str, phase: Phase, *, quantized: bool) -> Program:
    """All-to-all over ep. `quantized`: in `ep_dispatch_dtype`, as a dispatch and a combine's gradient may go."""
    p = scenario.parallelism
    if p.ep == 1:
        return ()
    size = dtype_bytes(p.ep_dispatch_dtype) if quantized and p.ep_dispatch_dtype else d.act_bytes
    items: list[Item] = []
    if size < d.act_bytes:
        n = r.tokens * d.hidden
        items.append(memory_op(f"{name}_cast", phase, "cast", n, n * (d.act_bytes + size), d.act))
    items.append(collective(name, "all_to_all", r.wire * d.hidden * size, phase, group="ep"))
    return tuple(items)


def _probabilities(scenario: Scenario, d: Dims, r: Routing, name: str, phase: Phase) -> Program:
    """The weight of each copy, which its expert multiplies by, and the way back of its gradient."""
    if scenario.parallelism.ep == 1 or not d.framework.sends_probabilities:
        return ()
    return (collective(name, "all_to_all", r.wire * FP32_BYTES, phase, group="ep"),)


def _expert_tp(scenario: Scenario, d: Dims, r: Routing, name: str, kind: str, phase: Phase) -> Program:
    """Experts split over expert_tp ranks compute the copies of all: gathered before, scattered after."""
    ranks = scenario.parallelism.expert_tp
    if ranks == 1:
        return ()
    return (collective(name, kind, r.received * ranks * d.hidden * d.act_bytes, phase, group="expert_tp"),)


def _sort(scenario: Scenario, d: Dims, r: Routing, name: str, phase: Phase) -> Program:
    """What arrives is ordered by sender; the grouped matmul wants it by expert.

    Copies of all expert_tp ranks are sorted at once, after they are gathered (`MoEAlltoAllTokenDispatcher` in
    Megatron-Core's transformer/moe/token_dispatcher.py).
    """
    p = scenario.parallelism
    if p.ep * p.expert_tp == 1 or r.experts == 1:
        return ()
    n = r.received * p.expert_tp * d.hidden
    return (memory_op(name, phase, "permute", n, 2 * n * d.act_bytes, d.act),)
