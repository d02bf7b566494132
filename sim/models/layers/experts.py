"""A mixture of experts in place of the MLP: router, routed experts, shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.operator_kinds import MOE_LAYER
from sim.core.program import Compute, Item, ModelPart, Program
from sim.models.activation_memory.recompute_modules import runs_again
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.frozen_weights import quantized_experts
from sim.models.layers.dense_mlp import DenseMlp
from sim.models.layers.matrix import Matrix
from sim.models.moe.every_expert import every_expert
from sim.models.moe.exchange import combine, dispatch
from sim.models.moe.fullest import fullest_rank
from sim.models.moe.latent import around, latent_matrices
from sim.models.moe.matmuls import expert_matmuls
from sim.models.moe.one_by_one import gradients_of_each
from sim.models.moe.router import dispatch_choices, router
from sim.models.moe.routing import fills_map, places_by_chance, routing
from sim.models.moe.shared import shared_parts
from sim.models.moe.shared_beside import beside_exchanges
from sim.models.operators import F, I, Operator, collective, gemm, memory_op
from sim.models.serving.operators import ServedElements, ServingDims, served_linear

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import RecomputeModule

# The most tokens of a rank that DeepEP's kernels of low latency take (vLLM, envs.py: VLLM_MOE_DP_CHUNK_SIZE).
LOW_LATENCY_TOKENS = 256


class Experts(Struct, frozen=True):
    """Experts of a layer of width `hidden`: `one` is the shape of each routed expert; `shared` sees every token."""

    part: ClassVar = ModelPart.EXPERTS
    module: ClassVar[RecomputeModule] = "moe"
    bias_after: ClassVar = False  # they add their own biases

    hidden: int
    moe: MoeConfig
    one: DenseMlp
    shared: DenseMlp | None

    def train(self, scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Operator, ...]:
        """Router, permutation, all-to-all, experts, all-to-all, weighted sum; shared experts see every token."""
        r, p = routing(scenario, d, layer, shard), scenario.parallelism
        e = replace(d.of_experts, hidden=self.one.hidden)
        fills = fills_map(scenario, d)
        chosen = (router(d, self.moe, r), *dispatch_choices(d, self.moe, r, p.ep, p.expert_tp, fills=fills))
        own = () if self.shared is None else self._shared(scenario, d, self.shared)
        shared = shared_parts(d, own, self.moe.shared_gate) if own else ()
        if d.code.every_expert and p.ep == 1:
            routed: tuple[Operator, ...] = (*chosen, *every_expert(scenario, e, r))
        else:
            there, back = dispatch(scenario, e, r), combine(scenario, e, r)
            if shared and scenario.for_training.moe_shared_expert_overlap and p.ep > 1:
                there, back, shared = beside_exchanges(there, back, shared, second=len(own) - 1)
            else:  # Megatron-Core captures them with the router, but for the sum
                shared = (*(replace(part, graph="moe_router") for part in shared[:-1]), *shared[-1:])
            before, behind = around(d, self.latents, r.tokens)
            routed = (*chosen, *before, there, *expert_matmuls(scenario, e, r), back, *behind)
        shapes = self.one.matrices(p.expert_tp)
        elements = sum(m.elements for m in shapes)
        routed = (*quantized_experts(d, r.experts * elements), *routed)
        if d.code.experts_one_by_one and p.ep == 1 and d.lora is None:
            matrices = sum(len(m.outputs) for m in shapes)
            routed = (*routed, gradients_of_each(d, self.moe.experts, elements, matrices, r.tokens))
        if d.code.scales_experts and not d.framework.fuses_chains:
            routed = (*routed, _scaled(d))
        if self.moe.zero_experts:
            routed = (*routed, self._zero_experts(d, r.tokens))
        return (*routed, *shared)

    def _shared(self, scenario: Scenario, d: Dims, shared: DenseMlp) -> tuple[Operator, ...]:
        """Shared experts' matmuls. In Megatron-Core the norm before them is a module of its own, and the router keeps
        its result (transformer/moe/shared_experts.py: `set_save_original_input`, unless they run again as a whole).
        What sequence parallelism gathers is left out."""
        gathers = d.tp > 1 and d.sp
        original = d.saves_originals and not gathers and not runs_again(scenario, "shared_experts")
        return shared.projections(d, original, joins_norm=not d.framework.joins_norms)

    def _zero_experts(self, d: Dims, tokens: int) -> Operator:
        """A token times the weights of its zero experts, added to what the others give (arXiv 2509.01322, section
        2.1): one kernel; backward the token's and the weights' gradients. The router keeps the token."""
        n = tokens * self.hidden
        size = n * d.act_bytes
        return Operator(
            "zero_experts",
            (memory_op("zero_experts", F, "elementwise", n, 3 * size, d.act),),
            (memory_op("zero_experts_backward", I, "elementwise", n, 5 * size, d.act, 2),),
            backward_bytes=2 * size,
        )

    @property
    def latents(self) -> tuple[Matrix, ...]:
        """The projections around routed experts of narrower tokens."""
        return latent_matrices(self.hidden, self.moe.latent, self.one.bias)

    @property
    def router_elements(self) -> int:
        """Weights of the router and of the projections around routed experts, which every rank has whole."""
        return self.hidden * self.moe.choices + sum(m.elements for m in self.latents)

    @property
    def router_parameters(self) -> int:
        """Weights of the router and of those projections, and their biases."""
        biases = sum(m.parameters - m.elements for m in self.latents)
        return self.router_elements + biases + (self.moe.choices if self.moe.router_bias else 0)

    @property
    def gate_elements(self) -> int:
        """Weights that make the shared experts' gate."""
        return self.hidden if self.moe.shared_gate else 0

    @property
    def expert_parameters(self) -> int:
        """Weights and biases of all routed experts."""
        return self.moe.experts * self.one.parameters

    @property
    def shared_parameters(self) -> int:
        """Weights and biases of the shared experts, and their gate."""
        return 0 if self.shared is None else self.shared.parameters + self.gate_elements

    @property
    def parameters(self) -> int:
        """Router, routed and shared experts."""
        return self.router_parameters + self.shared_parameters + self.expert_parameters

    @property
    def active_elements(self) -> int:
        """Weights that one token is multiplied by: router, its top-k experts that compute, shared experts."""
        shared = 0 if self.shared is None else self.shared.active_elements + self.gate_elements
        return self.router_elements + round(self.moe.copies * self.one.active_elements) + shared

    def served_elements(self, d: ServingDims) -> ServedElements:
        """Weights on one rank, counted as serving stores them."""
        redundant = d.eplb.redundant if d.eplb is not None else 0
        local, matrices = ceil_div(self.moe.experts + redundant, d.ep), self.one.matrices(d.expert_tp)
        experts, rest = local * sum(m.elements for m in matrices), self.router_parameters + self.gate_elements
        rest += local * sum(m.parameters - m.elements for m in matrices)
        shared = ServedElements(0, 0, 0, 0)
        if self.shared is not None:
            shared = self.shared.served_elements(replace(d, tp=d.shared_tp or d.tp, dense_tp=0))
        return ServedElements(0, shared.mlp, experts, rest + shared.rest)

    def widest(self, tp: int) -> float:
        """Numbers of a token that its experts make between the projections, at least the token itself."""
        return max(self.moe.ffn * self.moe.top_k / tp, float(self.hidden))

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Router, this rank's part of the routed experts, shared experts.

        Tokens are whole on every rank of a tp group, so experts split within it need no all-to-all: the sum over tp
        adds their parts. Experts split over more ranks than tp get their tokens by all-to-all from the other replicas.
        """
        moe, hidden = self.moe, self.hidden
        shared = () if self.shared is None or d.shared_tp else self.shared.compute(d, tokens, "shared")
        if moe.shared_gate:
            n = tokens * hidden
            product = memory_op("shared_gate_product", F, "elementwise", n, 2 * n * d.act_bytes, d.act)
            shared = (*shared, gemm("shared_gate", F, tokens, 1, hidden, d.act), product)
        if moe.zero_experts:
            n = tokens * hidden
            shared = (memory_op("zero_experts", F, "elementwise", n, 3 * n * d.act_bytes, d.act), *shared)
        router, routed = () if d.shared_tp else (self._router(d, tokens),), self.routed(d, tokens)
        down, up = [served_linear(d, m, tokens) for m in self.latents] or ((), ())
        return (*router, *down, *routed, *up, *self._joined(d, tokens, routed, shared))

    def _joined(self, d: ServingDims, tokens: int, routed: Program, shared: Program) -> Program:
        """Return the kernels of shared experts, of which few tokens' run beside those of routed ones, and the sum of
        both results, which a fused shared expert needs no kernel for."""
        if self.shared is None or d.shared_tp:
            return shared
        beside = sum([isinstance(item, Compute) for item in routed]) if tokens <= d.shared_beside else 0
        n = tokens * self.hidden
        total = memory_op("shared_sum", F, "elementwise", n, 3 * n * d.act_bytes, d.act)
        own = [replace(item, beside=beside) if isinstance(item, Compute) else item for item in shared]
        return (*own, *(() if d.fuses_shared else (total,)))

    def _router(self, d: ServingDims, tokens: int) -> Item:
        return gemm("router", F, tokens, self.moe.choices, self.hidden, d.act)

    def routed(self, d: ServingDims, tokens: int) -> Program:
        """The fullest rank's part of the routed experts, where each of the replicas that share them has `tokens`."""
        moe, span = self.moe, d.ep * d.expert_tp / d.tp
        pooled = max(1, round(tokens * span))  # of all replicas that share the experts, or this copy's part
        rows, groups = fullest_rank(moe, pooled, d.ep, d.eplb)
        routed = (
            [self._kernel(d, rows, groups, span > 1 and d.ep > 1 and not d.gathers)]
            if d.one_kernel
            else self._kernels(d, pooled if d.shared_tp else tokens, rows, groups)
        )
        there, back = self.exchange(d, tokens)
        if d.shared_tp:  # all behind the gathering is of all replicas' tokens
            routed = [self._router(d, pooled), *routed]
            if self.shared is not None:
                routed += self.shared.compute(replace(d, tp=d.shared_tp), pooled, "shared")
        return (*there, *routed, *back)

    def exchange(self, d: ServingDims, tokens: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """Messages to experts and back, where these are spread over more ranks than tp; else none.

        Ranks gather the tokens of all, each once, and reduce and scatter the results, or all-reduce them; or they send
        each token to who has its experts. The ranks that split an expert all need its tokens, which they gather in any
        case: with ep 1 each token once, else the copies that an all-to-all has brought.
        """
        if d.ep * d.expert_tp <= d.tp:
            return (), ()
        alone = d.ep == 1 or d.gathers
        sent = tokens * (1 if alone else self._sends(d, tokens)) * self.one.hidden / d.tp
        width = d.dispatch_bytes if d.ep > 1 or d.gathers else d.act_bytes
        there: list[Item] = []
        back: list[Item] = []
        if d.ep > 1 and not d.gathers:
            there = [collective("dispatch", "all_to_all", sent * width, F, group="ep")]
            back = [collective("combine", "all_to_all", sent * d.act_bytes, F, group="ep")]
        for group, ranks in (("ep", d.ep if d.gathers else 1), ("expert_tp", d.expert_tp)):
            if ranks > 1:
                sent *= ranks
                there.append(collective("gather", d.token_gathering, sent * width, F, group=group))
                back.insert(0, self._sum(d, sent * d.act_bytes, group))
        return tuple(there), tuple(back)

    def _sum(self, d: ServingDims, size: float, group: str) -> Item:
        """The sum of all ranks' results, of which each gets its own tokens'; or, summed up whole, all."""
        whole = d.sums or (d.prompts and d.prompt_sums[1])
        name, kind = ("sum", "all_reduce") if whole else ("scatter", "reduce_scatter")
        return collective(name, kind, size, F, group=group)

    def _sends(self, d: ServingDims, tokens: int) -> float:
        """Return how often a token is sent: once for each expert; DeepEP's kernels for many tokens send it once to each
        node, or within one node once to each rank (deep_ep/buffer.py, `internode_dispatch`, `intranode_dispatch`): as
        many as different experts, or copies of experts, by chance lie on (`places_by_chance`); the model may allow
        fewer nodes, `max_nodes_per_token`."""
        top_k, places = self.moe.copies, d.once_to
        if not places or tokens <= LOW_LATENCY_TOKENS:
            return top_k
        held = self.moe.experts + (d.eplb.redundant if d.eplb is not None else 0)
        found = places_by_chance(held, top_k, places)
        limit = self.moe.max_nodes_per_token if d.expert_nodes > 1 else None
        return min(top_k, found, float(limit or places))

    def _kernel(self, d: ServingDims, rows: float, groups: int, sent: bool) -> Item:
        """All from the choice of experts to the weighted sum as one operator, which libraries were measured with.

        Points are kept by the tokens that give this rank `rows` when spread evenly; `groups` of its experts have any.
        `sent`: this rank has no tokens but those that an all-to-all sends to it.
        """
        moe, h = self.moe, self.one.hidden
        inner, matrices = ceil_div(moe.ffn, d.expert_tp), 3 if self.one.gated else 2
        evenly = max(1, round(rows * d.ep / moe.top_k))
        shape = (evenly, h, moe.ffn, moe.top_k, moe.experts, d.expert_tp, d.ep)
        moved = groups * matrices * h * inner * d.expert_weight_bytes + rows * (2 * h + matrices * inner) * d.act_bytes
        flops = 2.0 * matrices * rows * h * inner
        sizes = MOE_LAYER, shape, d.experts_dtype, flops, moved, F
        # Measured layers got the tokens of all ranks. They say little about a rank that gets only its own tokens.
        return Compute("experts", *sizes, kernel="" if sent else d.expert_table, sent_tokens=sent)

    def _kernels(self, d: ServingDims, tokens: int, rows: float, groups: int) -> list[Item]:
        """Return the experts' work kernel by kernel, for GPUs without measurements of whole layers."""
        h, ffn = self.one.hidden, ceil_div(self.moe.ffn, d.expert_tp)
        inner = ffn * (2 if self.one.gated else 1)
        moved = (inner // ffn + 1) * rows * ffn * d.act_bytes
        choices = tokens * self.moe.choices
        return [
            memory_op("router_top_k", F, "softmax", choices, 8.0 * choices, d.act),
            memory_op("permute", F, "permute", rows * h, 2 * rows * h * d.act_bytes, d.act),
            _grouped(d, "experts_up", groups, rows, inner, h),
            memory_op(f"experts_{self.one.activation}", F, "elementwise", rows * ffn, moved, d.act),
            _grouped(d, "experts_down", groups, rows, h, ffn),
            memory_op("unpermute", F, "permute", rows * h, (rows + tokens) * h * d.act_bytes, d.act),
        ]


def _grouped(d: ServingDims, name: str, groups: int, rows: float, n: int, k: int) -> Compute:
    moved = rows * (k + n) * d.act_bytes + groups * k * n * d.expert_weight_bytes
    shape = (groups, max(1, round(rows / groups)), n, k)
    return Compute(name, "grouped_gemm", shape, d.experts_dtype, 2.0 * rows * n * k, moved, F)


def _scaled(d: Dims) -> Operator:
    """The routed experts' result times a constant, and its gradient (LagunaSparseMoeBlock in Transformers)."""
    n, sizes = d.rows * d.hidden, d.of_stream if d.experts_in_fp32 else d
    forward, backward = (
        memory_op(f"experts_scale{end}", phase, "elementwise", n, 2 * n * sizes.act_bytes, sizes.act)
        for end, phase in (("", F), ("_backward", I))
    )
    return Operator("experts_scale", (forward,), (backward,))
