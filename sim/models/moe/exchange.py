"""The way of tokens to their experts and home again: sorted, sent, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Item, Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.moe.dispatchers import Dispatcher, dispatcher_of
from sim.models.moe.routing import Routing, moe_of
from sim.models.operators import F, I, Operator, collective, memory_op

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def dispatch(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Copies sorted by expert, exchanged, gathered over expert_tp; the gradients back the same way."""
    e, way = d.act_bytes, _way(scenario)
    n, moved = _copies(r, way) * d.hidden, (r.tokens * d.hidden + r.sent * d.hidden) * e
    choices = r.wire * moe_of(scenario).top_k
    there, back = choices * way.choice_bytes, choices * way.choice_gradient_bytes
    forward = (
        *_at_home(d, r, way, "permute", F, moved),
        *_exchange(scenario, d, r, "dispatch", F, quantized=True, beside_bytes=there),
        *_probabilities(scenario, d, r, way, "dispatch_weights", F),
        *_expert_tp(scenario, d, r, "expert_gather", "all_gather", F),
        *_on_arrival(scenario, d, r, way, "sort_chunks", F),
    )
    backward = (
        *_on_arrival(scenario, d, r, way, "sort_chunks_backward", I),
        *_expert_tp(scenario, d, r, "expert_grad_scatter", "reduce_scatter", I),
        *_probabilities(scenario, d, r, way, "dispatch_weights_backward", I),
        *_exchange(scenario, d, r, "dispatch_backward", I, quantized=False, beside_bytes=back),
        *_at_home(d, r, way, "permute_backward", I, moved),
    )
    index = Saved("moe", "permutation", _copies(r, way) * d.framework.routing_bytes)
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
    e, way = d.act_bytes, _way(scenario)
    n, moved = _copies(r, way) * d.hidden, (r.sent * d.hidden + r.tokens * d.hidden) * e
    forward: Program = (
        *_on_arrival(scenario, d, r, way, "unsort_chunks", F),
        *_expert_tp(scenario, d, r, "expert_scatter", "reduce_scatter", F),
        *_exchange(scenario, d, r, "combine", F, quantized=False),
        *_at_home(d, r, way, "unpermute", F, moved),
    )
    backward: Program = (
        *_at_home(d, r, way, "unpermute_backward", I, moved + r.sent * d.hidden * e),
        *_exchange(scenario, d, r, "combine_backward", I, quantized=True),
        *_expert_tp(scenario, d, r, "expert_grad_gather", "all_gather", I),
        *_on_arrival(scenario, d, r, way, "unsort_chunks_backward", I, results_read=True),
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


def _way(scenario: Scenario) -> Dispatcher:
    return dispatcher_of(moe_of(scenario), scenario.parallelism.ep)


def _copies(r: Routing, way: Dispatcher) -> float:
    """Copies that this rank makes."""
    return r.received if way.copies_on_arrival else r.sent


def _at_home(d: Dims, r: Routing, way: Dispatcher, name: str, phase: Phase, moved: float) -> Program:
    """A rank's own tokens copied and sorted by expert, or their copies added up; nothing where experts' ranks do it."""
    if way.copies_on_arrival:
        return ()
    return (memory_op(name, phase, "permute", r.sent * d.hidden, moved, d.act, 2),)


def _exchange(
    scenario: Scenario,
    d: Dims,
    r: Routing,
    name: str,
    phase: Phase,
    *,
    quantized: bool,
    beside_bytes: float = 0.0,
) -> Program:
    """All-to-all over ep. `quantized`: in `ep_dispatch_dtype`, as a dispatch and a combine's gradient may go.
    `beside_bytes`: what goes along with the tokens."""
    p = scenario.parallelism
    if p.ep == 1:
        return ()
    size = dtype_bytes(p.ep_dispatch_dtype) if quantized and p.ep_dispatch_dtype else d.act_bytes
    items: list[Item] = []
    if size < d.act_bytes:
        n = r.tokens * d.hidden
        items.append(memory_op(f"{name}_cast", phase, "cast", n, n * (d.act_bytes + size), d.act))
    items.append(collective(name, "all_to_all", r.wire * d.hidden * size + beside_bytes, phase, group="ep"))
    return tuple(items)


def _probabilities(scenario: Scenario, d: Dims, r: Routing, way: Dispatcher, name: str, phase: Phase) -> Program:
    """The weight of each copy, which its expert multiplies by, and the way back of its gradient."""
    if scenario.parallelism.ep == 1 or not (way.messages_beside and d.framework.sends_probabilities):
        return ()
    return (collective(name, "all_to_all", r.wire * FP32_BYTES, phase, group="ep"),)


def _expert_tp(scenario: Scenario, d: Dims, r: Routing, name: str, kind: str, phase: Phase) -> Program:
    """Experts split over expert_tp ranks compute the copies of all: gathered before, scattered after."""
    ranks = scenario.parallelism.expert_tp
    if ranks == 1:
        return ()
    return (collective(name, kind, r.received * ranks * d.hidden * d.act_bytes, phase, group="expert_tp"),)


def _on_arrival(
    scenario: Scenario,
    d: Dims,
    r: Routing,
    way: Dispatcher,
    name: str,
    phase: Phase,
    *,
    results_read: bool = False,
) -> Program:
    """What arrives is ordered by sender; the grouped matmul wants it by expert.

    Copies of all expert_tp ranks are sorted at once, after they are gathered (`MoEAlltoAllTokenDispatcher` in
    Megatron-Core's transformer/moe/token_dispatcher.py). A dispatcher that makes copies on arrival needs the sort for
    one expert too: a map and the copies, of as many tokens as there are copies, since two experts of one token are
    rarely on one rank. `results_read`: for the gradient of the weights that results were multiplied by.
    """
    p = scenario.parallelism
    n = r.received * p.expert_tp * d.hidden
    if way.copies_on_arrival:
        again = results_read and not d.framework.weights_experts_after_activation
        return (memory_op(name, phase, "permute", n, (3 if again else 2) * n * d.act_bytes, d.act, 2),)
    if p.ep * p.expert_tp == 1 or r.experts == 1:
        return ()
    return (memory_op(name, phase, "permute", n, 2 * n * d.act_bytes, d.act),)
