"""The way of tokens to their experts and home again: sorted, sent, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Item, Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.graphed_parts import gradients_handed_over, graph_scope, replayed, results_held
from sim.models.moe.router import filled_map
from sim.models.moe.routing import Routing, fills_map, moe_of
from sim.models.moe.token_steps import IndexedStep, token_steps
from sim.models.operators import F, I, Operator, collective, further_kernels, memory_op
from sim.variants.dispatchers import HYBRID_EP, INDEX_BYTES, Dispatcher

if TYPE_CHECKING:
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.scenario import Scenario


MAP_KERNELS, MAP_ACCESSED_BYTES, MAP_NUMBER_BYTES = 3, 25.0, 4.0


class _Trip(Struct, frozen=True):
    """The way of tokens to their experts and back, a method for each step. `r`: the tokens; `way`: how they travel."""

    layout: Parallelism
    d: Dims
    r: Routing
    way: Dispatcher
    experts: int
    top_k: int
    fills: bool

    @property
    def copies(self) -> float:
        """Copies that this rank makes."""
        return self.r.received if self.way.copies_on_arrival else self.r.sent

    def at_home(self, name: str, phase: Phase, moved: float) -> Program:
        """A rank's own tokens copied and sorted by expert, or their copies added up; nothing if experts' ranks do."""
        if self.way.copies_on_arrival:
            return ()
        if step := self._step(name):
            return self._by_index(name, phase, step, self.r.sent, self.r.tokens)
        n, kernels = self.r.sent * self.d.hidden, 1 if self.maps else 2
        return (memory_op(name, phase, "permute", n, moved, self.d.act, kernels),)

    def _step(self, name: str) -> IndexedStep | None:
        """The step as torch's operators, if they do it."""
        steps = token_steps(self.d)
        return None if steps is None else steps.of(self.d).get(name)

    def _by_index(self, name: str, phase: Phase, step: IndexedStep, copies: float, tokens: float) -> Program:
        """The step `name` by torch's indexing: vectorized kernels, unvectorized ones, and small ones that sort."""
        d, n = self.d, copies * self.d.hidden
        sizes = (copies, tokens, d.hidden, d.act_bytes)
        moved_singly, singly = step.singly_bytes(*sizes), step.unvectorized
        copied = memory_op(
            name, phase, "permute", n, step.moved_bytes(*sizes) - moved_singly, d.act, step.kernels - singly
        )
        alone = memory_op(f"{name}_singly", phase, "elementwise", n, moved_singly, d.act, singly)
        alone = replace(alone, single_elements=float(singly * n))
        small = (further_kernels(f"{name}_starts", phase, each, step.passes) for each in step.small)
        return (copied, *((alone,) if singly else ()), *small)

    def at_home_map(self) -> Program:
        """Where each copy of a token goes, of 32 bits: [tokens, 2·experts + 1], which the backward reads again.

        Transformer Engine, pytorch/triton/permutation.py, `make_row_id_map`: three kernels. The first reads the mask (1
        byte) and numbers each expert's tokens (4), the second adds the numbers of the blocks before (4, 4), the third
        sorts each token's (4) and writes their places and experts (8).
        """
        if not self.maps:
            return ()
        n = self.r.tokens * self.experts
        return (memory_op("permutation_map", F, "elementwise", n, MAP_ACCESSED_BYTES * n, self.d.act, MAP_KERNELS),)

    @property
    def maps(self) -> bool:
        """Whether tokens are copied at home, by a map."""
        return self.d.framework.maps_copies and not self.way.copies_on_arrival

    @property
    def maps_arrivals(self) -> bool:
        """Whether numbers of experts become maps where tokens arrive (`Dispatcher.chooses_again`)."""
        return self.d.framework.maps_copies and self.way.chooses_again

    @property
    def _arrived_rows(self) -> float:
        return self.r.arrived * self.layout.expert_tp

    @property
    def map_bytes(self) -> float:
        """Maps that the backward needs: of tokens and experts, and of both sorts of what arrives."""
        if not self.maps:
            of_arrived = MAP_NUMBER_BYTES * self._arrived_rows * (3 * self.r.experts + 1) if self.maps_arrivals else 0.0
            return self.copies * self.d.framework.routing_bytes + of_arrived
        sorts = 2 * self.r.received * self.layout.expert_tp if self.sorts_chunks else 0.0
        return MAP_NUMBER_BYTES * (self.r.tokens * (2 * self.experts + 1) + sorts)

    @property
    def sorts_chunks(self) -> bool:
        """Whether arrivals are reordered: they come sender by sender, and the matmul needs them expert by expert."""
        return self.layout.ep * self.layout.expert_tp > 1 and self.r.experts > 1

    def _arrival_maps(self, name: str, phase: Phase) -> Program:
        """Maps of what arrived, made before the first copy.

        A map is read (1 byte) and one of places written (4). From numbers of experts (8 bytes, and weights of 4) maps
        are made of experts (1), weights (4) and places (4), and of these Transformer Engine's (`at_home_map`); in the
        last backward weights' gradients and places (4, 4) are read, and numbers' gradients written (4).
        """
        entries, choices = self._arrived_rows * self.r.experts, self._arrived_rows * self.top_k
        if name == "sort_chunks" and self.maps_arrivals:
            moved = choices * (INDEX_BYTES + FP32_BYTES) + entries * (9.0 + MAP_ACCESSED_BYTES)
            kernels = 1 + MAP_KERNELS
        elif name == "sort_chunks":
            moved, kernels = entries * (1.0 + MAP_NUMBER_BYTES), 1
        elif name == "sort_chunks_backward" and self.maps_arrivals:
            moved, kernels = entries * 2 * MAP_NUMBER_BYTES + choices * FP32_BYTES, 1
        else:
            return ()
        return (memory_op(f"{name}_map", phase, "elementwise", entries, moved, self.d.act, kernels),)

    def exchange(self, name: str, phase: Phase, *, quantized: bool, beside_bytes: float = 0.0) -> Program:
        """All-to-all over ep. `quantized`: in `ep_dispatch_dtype`, as a dispatch and a combine's gradient may go, but
        not in layers that keep 16 bits. `beside_bytes`: what goes along with the tokens."""
        p, d, r = self.layout, self.d, self.r
        if p.ep == 1:
            return ()
        quantized = quantized and not d.in_sixteen_bits
        size = dtype_bytes(p.ep_dispatch_dtype) if quantized and p.ep_dispatch_dtype else d.act_bytes
        items: list[Item] = []
        if size < d.act_bytes:
            n = r.tokens * d.hidden
            items.append(memory_op(f"{name}_cast", phase, "cast", n, n * (d.act_bytes + size), d.act))
        sent = collective(name, "all_to_all", r.wire * d.hidden * size + beside_bytes, phase, group="ep")
        own = d.framework.hybridep_sms if self.way is HYBRID_EP else self.way.sms
        items.append(replace(sent, sms=own))
        return tuple(items)

    def probabilities(self, name: str, phase: Phase) -> Program:
        """The weight of each copy, which its expert multiplies by, and the way back of its gradient."""
        if self.layout.ep == 1 or not (self.way.messages_beside and self.d.framework.sends_probabilities):
            return ()
        return (collective(name, "all_to_all", self.r.wire * FP32_BYTES, phase, group="ep"),)

    def expert_tp(self, name: str, kind: str, phase: Phase) -> Program:
        """Experts split over expert_tp ranks compute the copies of all: gathered before, scattered after."""
        ranks = self.layout.expert_tp
        if ranks == 1:
            return ()
        size = self.r.fullest * ranks * self.d.hidden * self.d.act_bytes
        return (collective(name, kind, size, phase, group="expert_tp"),)

    def on_arrival(self, name: str, phase: Phase, *, results_read: bool = False) -> Program:
        """Reorder arrivals, which come sender by sender, into the order of experts, which the grouped matmul needs.

        Copies of all expert_tp ranks are sorted at once, after they are gathered (`MoEAlltoAllTokenDispatcher` in
        Megatron-Core's transformer/moe/token_dispatcher.py). A dispatcher that makes copies on arrival needs the sort
        for one expert too: a map, made once (DeepEP, csrc/hybrid_ep/executor/executor.cu: `row_id_map` of the handle),
        and the copies, which are as many as or more than the tokens that arrived.
        `results_read`: for the gradient of the weights that results were multiplied by.
        """
        p, d = self.layout, self.d
        n = self.r.fullest * p.expert_tp * d.hidden
        if self.way.copies_on_arrival:
            filled = filled_map(d, self._arrived_rows * self.r.experts) if self.fills and name == "sort_chunks" else ()
            again = results_read and not d.framework.weights_experts_after_activation
            moved = (2 if again else 1) * n + self._arrived_rows * d.hidden
            copied = memory_op(name, phase, "permute", n, moved * d.act_bytes, d.act)
            made = self._arrival_maps(name, phase)
            return (*made, *filled, copied) if phase is F else (copied, *made)
        steps, step = token_steps(d), self._step(name)
        if not self.sorts_chunks and not (steps is not None and steps.fills_rows):
            return ()
        if step is not None:
            return self._by_index(name, phase, step, self.r.fullest * p.expert_tp, 0.0)
        kernels = 2 if self.maps and phase is F else 1  # the forward makes a map, one number for each row
        return (memory_op(name, phase, "permute", n, 2 * n * d.act_bytes, d.act, kernels),)


def _trip(scenario: Scenario, d: Dims, r: Routing) -> _Trip:
    moe = moe_of(scenario)
    return _Trip(scenario.parallelism, d, r, r.dispatcher, moe.experts, moe.top_k, fills_map(scenario, d))


def dispatch(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Copies sorted by expert, exchanged, gathered over expert_tp; the gradients back the same way."""
    e, trip = d.act_bytes, _trip(scenario, d, r)
    n, moved = trip.copies * d.hidden, (r.tokens * d.hidden + r.sent * d.hidden) * e
    choices, weights = r.wire * moe_of(scenario).top_k, r.wire * r.domain_experts * trip.way.domain_expert_bytes
    there, back = choices * trip.way.choice_bytes + weights, choices * trip.way.choice_gradient_bytes + weights
    sorts, unsorts = (
        (*trip.at_home_map(), *trip.at_home("permute", F, moved)),
        trip.at_home("permute_backward", I, moved),
    )
    handed = gradients_handed_over(scenario, d, r)
    if "moe_preprocess" in graph_scope(scenario):
        sorts, unsorts = replayed(sorts), (*handed, *replayed(unsorts))
    else:
        unsorts = (*unsorts, *handed)
    forward = (
        *sorts,
        *trip.exchange("dispatch", F, quantized=True, beside_bytes=there),
        *trip.probabilities("dispatch_weights", F),
        *trip.expert_tp("expert_gather", "all_gather", F),
        *trip.on_arrival("sort_chunks", F),
    )
    backward = (
        *trip.on_arrival("sort_chunks_backward", I),
        *trip.expert_tp("expert_grad_scatter", "reduce_scatter", I),
        *trip.probabilities("dispatch_weights_backward", I),
        *trip.exchange("dispatch_backward", I, quantized=False, beside_bytes=back),
        *unsorts,
    )
    index = Saved("permutation", trip.map_bytes)
    held = (n + r.received * d.hidden) * e
    kept = (index, *results_held(scenario, d, r))
    return Operator("dispatch", forward, backward, kept, forward_bytes=n * e, backward_bytes=held)


def combine(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Results home, weighted and summed per token; the router's gradient needs the results (Megatron weights
    the activation instead and keeps nothing). Without sequence parallelism tp ranks then gather one another's
    tokens.
    """
    e, trip = d.act_bytes, _trip(scenario, d, r)
    n, moved = trip.copies * d.hidden, (r.sent * d.hidden + r.tokens * d.hidden) * e
    forward: Program = (
        *trip.on_arrival("unsort_chunks", F),
        *trip.expert_tp("expert_scatter", "reduce_scatter", F),
        *trip.exchange("combine", F, quantized=False),
        *trip.at_home("unpermute", F, moved),
    )
    read_again = 0.0 if d.framework.weights_experts_after_activation else r.sent * d.hidden * e
    backward: Program = (
        *trip.at_home("unpermute_backward", I, moved + read_again),
        *trip.exchange("combine_backward", I, quantized=True),
        *trip.expert_tp("expert_grad_gather", "all_gather", I),
        *trip.on_arrival("unsort_chunks_backward", I, results_read=True),
    )
    if d.tp > 1 and not d.sp:
        size = d.tokens * d.hidden * e
        forward += (collective("moe_output_gather", "all_gather", size, F),)
        backward += (collective("moe_input_grad_gather", "all_gather", size, I),)
    steps = token_steps(d)
    width = e if steps is None else steps.result_bytes or e
    kept = (Saved("expert results", 0.0 if d.framework.weights_experts_after_activation else n * width),)
    held = (n + r.received * d.hidden) * e
    return Operator("combine", forward, backward, kept, forward_bytes=n * e, backward_bytes=held)
