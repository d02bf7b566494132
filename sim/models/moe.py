"""Mixture of experts in training: router, token dispatch and combine over expert-parallel ranks, grouped experts.

Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (capacity); DeepSeek-V3 2024 (shared experts, node-limited
routing).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Compute, Item, NeededBy, Phase, Program, Saved, TensorRole
from sim.models.activations import activation, is_gated
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.operators import (
    ROLES,
    F,
    I,
    Operator,
    W,
    accumulate,
    accumulation,
    collective,
    gemm,
    memory_op,
    weight_gradient_bytes,
)
from sim.models.quantizing import (
    casts,
    casts_again,
    gradient_casts,
    saved_element_bytes,
    weight_casts,
    weight_casts_again,
)
from sim.models.recompute_modules import inside

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.scenario import Scenario


class Routing(Struct, frozen=True):
    """One rank's tokens in an expert layer, copies counted.

    `tokens`: this rank's own, before copying to their top-k experts; `sent`: copies it sends to their
    experts; `received`: copies that its experts compute; `wire`: copies that cross the network, the larger of
    out and in.
    """

    tokens: int
    experts: int
    sent: float
    received: float
    wire: float


def expert_load(moe: MoeConfig, tokens: int, layer: int) -> tuple[float, ...]:
    """Token copies of each expert, out of `tokens` · top_k in all.

    Balanced: equal. Else expert popularity falls as rank^-zipf, the order drawn from (seed, layer), no expert
    with more copies than there are tokens. A capacity factor drops what exceeds ceil(factor · tokens · top_k
    / experts).
    """
    if moe.imbalance == "balanced":
        load = (tokens * moe.top_k / moe.experts,) * moe.experts
    else:
        load = _zipf(moe.experts, moe.top_k, moe.imbalance.zipf, moe.imbalance.seed, layer, tokens)
    if moe.capacity_factor is None:
        return load
    capacity = -(-moe.capacity_factor * tokens * moe.top_k // moe.experts)
    return tuple(min(x, capacity) for x in load)


@lru_cache(maxsize=1024)
def _zipf(experts: int, top_k: int, zipf: float, seed: int, layer: int, tokens: int) -> tuple[float, ...]:
    import numpy as np

    weight = np.arange(1, experts + 1, dtype=np.float64) ** -zipf
    load = np.zeros(experts)
    left = float(tokens * top_k)
    free = np.ones(experts, dtype=bool)
    while left > 1e-9 and free.any():  # an expert sees a token once at most: what is above goes to the others
        load[free] += left * weight[free] / weight[free].sum()
        left = float(np.clip(load - tokens, 0, None).sum())
        load = np.minimum(load, tokens)
        free = load < tokens
    order = np.random.default_rng([seed, layer]).permutation(experts)
    return tuple(float(x) for x in load[order])


def routing(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> Routing:
    """Tensor-parallel ranks share their tokens out; all ranks of an ep group route alike."""
    moe, p = _moe(scenario), scenario.parallelism
    tokens = ceil_div(d.tokens, d.tp)
    load = expert_load(moe, tokens * p.ep, layer)
    local = ceil_div(moe.experts, p.ep)
    received = sum(load[shard.ep_rank * local : (shard.ep_rank + 1) * local])
    sent = sum(load) / p.ep
    nodes = moe.max_nodes_per_token
    share = 1.0 if nodes is None else min(1.0, nodes / moe.top_k)
    return Routing(tokens, min(local, moe.experts), sent, received, max(sent, received) * share)


def moe_parts(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Operator, ...]:
    """Router, permutation, all-to-all, experts, all-to-all, weighted sum."""
    r = routing(scenario, d, layer, shard)
    ep = scenario.parallelism.ep
    return (
        _router(d, _moe(scenario), r, ep),
        _dispatch(scenario, d, r),
        *_experts(scenario, d, r),
        _combine(scenario, d, r),
    )


def shared_parts(d: Dims, parts: tuple[Operator, ...], gated: bool = False) -> tuple[Operator, ...]:
    """Shared experts beside the routed ones, their gate and the sum of both. Their items and handles have names of
    their own; their input is the router's, which keeps it."""

    def items(program: Program) -> Program:
        return tuple(
            replace(i, handle=f"shared_{i.handle}" if i.handle else "")
            if not isinstance(i, Compute)
            else replace(i, name=f"shared_{i.name}")
            for i in program
        )

    out = [
        replace(
            p,
            name=f"shared_{p.name}",
            forward=items(p.forward),
            backward=items(p.backward),
            adapters_alone=items(p.adapters_alone),
        )
        for p in parts
    ]
    add = accumulate(d, "shared_expert_sum", d.rows * d.hidden, phase=F)
    gradients = accumulate(d, "shared_grad_sum", d.rows * d.hidden)
    gate = (_shared_gate(d),) if gated else ()
    together = Operator("shared_expert_sum", (add,), (gradients,))
    return (*inside("shared_experts", (replace(out[0], saved=()), *out[1:])), *gate, together)


def _shared_gate(d: Dims) -> Operator:
    """`[rows, h] x [h, 1]`, its sigmoid, and the product with what the shared expert gives, which is kept for it."""
    m, h, e = d.rows, d.hidden, d.act_bytes
    n = m * h
    backward = (
        memory_op("shared_gate_product_backward", I, "elementwise", n, 3 * n * e, d.act, 2),
        gemm("shared_gate_dgrad", I, m, h, 1, d.act),
        gemm("shared_gate_wgrad", W, 1, h, m, d.act, out_bytes=2 * d.grad_bytes * h),
        accumulate(d, "shared_gate_grad_sum", n),
    )
    forward = (
        gemm("shared_gate", F, m, 1, h, d.act),
        memory_op("shared_gate_product", F, "elementwise", n, 2 * n * e, d.act, 2),
    )
    saved = (Saved("moe", "shared expert's result", n * e),)
    return Operator("shared_gate", forward, backward, saved, params=h, weights=((1, h),), backward_bytes=2 * n * e)


def _router(d: Dims, moe: MoeConfig, r: Routing, ep: int) -> Operator:
    """`[tokens, h] x [h, experts]`, softmax and top-k in fp32; the weights are whole on every rank.

    `casts_routers`: a matmul in fp32 is of a copy of its input, which is kept. Else, as in Megatron-Core's
    `RouterGatingLinearFunction` (transformer/moe/moe_utils.py), the forward multiplies 16-bit numbers to an fp32 result
    and the backward copies its input anew. Both cast the input's fp32 gradient back.
    """
    n, e, k = r.tokens * moe.experts, d.act_bytes, d.framework.router
    launches = k.forward_kernels + (k.capacity_kernels if moe.capacity_factor is not None else 0)
    more, more_back = k.group_kernels if moe.chooses_groups else (0, 0)
    moved, moved_back = k.group_bytes if moe.chooses_groups else (0.0, 0.0)
    # Runs of torch's own functions, with none of the modules around them that a kernel of Megatron's layers pays for.
    accessed = (k.forward_accesses * e + k.forward_bytes + moved) * n
    select = memory_op("router_top_k", F, "softmax", n, accessed, d.act, launches + more)
    select = replace(select, plain_host=True)
    accessed = (k.backward_accesses * e + k.backward_bytes + moved_back) * n
    back = memory_op("router_top_k_backward", I, "softmax", n, accessed, d.act, k.backward_kernels + more_back)
    back = replace(back, plain_host=True)
    m, h, x = r.tokens, d.hidden, moe.experts
    upcast = moe.router_fp32 and e < FP32_BYTES
    keeps = upcast and d.framework.casts_routers
    backward_dtype = "fp32" if upcast else d.act
    width = m * h * (e + FP32_BYTES)
    again = (memory_op("router_recast", W, "cast", m * h, width, d.act),) if upcast and not keeps else ()
    backward = (
        back,
        gemm("router_dgrad", I, m, h, x, backward_dtype),
        *((memory_op("router_grad_cast", I, "cast", m * h, width, d.act),) if upcast else ()),
        *again,
        gemm("router_wgrad", W, x, h, m, backward_dtype, out_bytes=2 * d.grad_bytes * x * h),
        accumulate(d, "router_grad_sum", m * h),
    )
    copy = memory_op("router_cast", F, "cast", m * h, width, d.act)
    forward = (
        *((copy,) if keeps else ()),
        gemm("router", F, m, x, h, "fp32" if keeps else d.act, out_bytes=m * x * FP32_BYTES if upcast else None),
        select,
        *_counts(moe, d, r, ep),
    )
    saved = (
        Saved("moe", "router input", m * h * e, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),
        Saved("moe", "router probabilities", n * FP32_BYTES),
        *((Saved("moe", "router input in fp32", m * h * FP32_BYTES, NeededBy.WEIGHT_GRAD),) if keeps else ()),
    )
    return Operator(
        "router",
        forward,
        backward,
        saved,
        params=x * h + (x if moe.router_bias else 0),
        tensors=(x * h, x) if moe.router_bias else (),
        backward_bytes=2 * m * h * e,
    )


COUNT_KERNELS = 9  # six sums and copies of counts on the device, three copies to the host
COUNT_BYTES = 8  # torch.long


def _counts(moe: MoeConfig, d: Dims, r: Routing, ep: int) -> Program:
    """How many copies go to each expert, of all ranks, which sizes the exchange (`counts_copies`): the map of tokens
    and experts is summed, its sums are gathered over ep. With a capacity all sizes are known: nothing is counted."""
    if ep == 1 or not d.framework.counts_copies or moe.capacity_factor is not None:
        return ()
    n = r.tokens * moe.experts
    count = memory_op("count_copies", F, "elementwise", n, n, d.act, COUNT_KERNELS)
    return (
        replace(count, plain_host=True),
        collective("gather_counts", "all_gather", ep * moe.experts * COUNT_BYTES, F, group="ep"),
    )


def _exchange(scenario: Scenario, d: Dims, r: Routing, name: str, phase: Phase, dispatch: bool) -> Program:
    """All-to-all over ep. A dispatch may go in `ep_dispatch_dtype` (its way and that of the combine's
    gradient).
    """
    p = scenario.parallelism
    if p.ep == 1:
        return ()
    size = dtype_bytes(p.ep_dispatch_dtype) if dispatch and p.ep_dispatch_dtype else d.act_bytes
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


def _dispatch(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Copies sorted by expert, exchanged, gathered over expert_tp; the gradients back the same way."""
    n, e = r.sent * d.hidden, d.act_bytes
    moved = (r.tokens * d.hidden + n) * e
    forward = (
        memory_op("permute", F, "permute", n, moved, d.act, 2),
        *_exchange(scenario, d, r, "dispatch", F, True),
        *_probabilities(scenario, d, r, "dispatch_weights", F),
        *_expert_tp(scenario, d, r, "expert_gather", "all_gather", F),
        *_sort(scenario, d, r, "sort_chunks", F),
    )
    backward = (
        *_sort(scenario, d, r, "sort_chunks_backward", I),
        *_expert_tp(scenario, d, r, "expert_grad_scatter", "reduce_scatter", I),
        *_probabilities(scenario, d, r, "dispatch_weights_backward", I),
        *_exchange(scenario, d, r, "dispatch_backward", I, False),
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


def _experts(scenario: Scenario, d: Dims, r: Routing) -> tuple[Operator, ...]:
    """Grouped matmuls over this rank's experts; flops and bytes by the copies they really get."""
    m, moe, etp = scenario.model, _moe(scenario), scenario.parallelism.expert_tp
    rows, ffn = r.received * etp, ceil_div(moe.ffn, etp)
    inner = 2 * ffn if is_gated(m.mlp) else ffn
    up = _grouped(d, "experts_up", r.experts, rows, inner, d.hidden, keep=True)
    down = _grouped(d, "experts_down", r.experts, rows, d.hidden, ffn, keep=not d.framework.rebuilds_pointwise)
    if m.bias:
        up = _biased(d, up, rows, r.experts, inner)
        add = _biased_one_by_one if d.framework.biases_experts_one_by_one else _biased
        down = add(d, down, rows, r.experts, d.hidden)
    weighs = d.framework.weights_experts_after_activation and m.mlp == "gelu"  # SwiGLU's kernel does it by itself
    weighted = (_weighting(d, rows * ffn),) if weighs else ()
    made = inside("moe_act", (activation(d, m.mlp, rows * ffn, "moe"), *weighted))
    filled, cut = _padding(d, moe, rows, r.experts)
    return *filled, up, *made, down, *cut


ALIGNED_ROWS = 16  # of an operand in 8 bits; formats scaled by blocks take twice as many


def _padding(d: Dims, moe: MoeConfig, rows: float, experts: int) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Before and after 8-bit experts, copies of their rows: each expert's are filled up to the matmul's tile, and what
    was filled is cut off again (Transformer Engine's `Fp8Padding`, `Fp8Unpadding`; backward the other way round).

    Nothing is copied where a capacity gives every expert a multiple. What is filled up, at most a tile an expert, is
    not computed here.
    """
    tile = ALIGNED_ROWS if d.recipe is None or d.recipe.one_scale else 2 * ALIGNED_ROWS
    even = moe.capacity_factor is not None and rows % (experts * tile) == 0
    if d.recipe is None or not d.framework.pads_experts or even:
        return (), ()
    n, moved = rows * d.hidden, 2 * rows * d.hidden * d.act_bytes

    def copies(name: str) -> tuple[Operator, ...]:
        forward = memory_op(name, F, "copy", n, moved, d.act)
        backward = memory_op(f"{name}_backward", I, "copy", n, moved, d.act)
        return (Operator(name, (forward,), (backward,), backward_bytes=moved),)

    return copies("experts_padding"), copies("experts_unpadding")


def _biased(d: Dims, part: Operator, rows: float, experts: int, n: int) -> Operator:
    """A grouped matmul whose experts add a bias of `n` to each of their rows: read with it, written.

    In separate operators each row's bias is gathered (2 accesses) and added (3), its gradient summed by expert (2 and
    1, torch's index_put: TransformerEngine's grouped linear adds it in the matmul, and sums it in one pass).
    """
    elements, e = rows * n, d.act_bytes
    apart = not d.framework.merges_projections
    sums = memory_op(f"{part.name}_bias_grad", W, "elementwise", elements, (3 if apart else 1) * e * elements, d.act)
    add = memory_op(f"{part.name}_bias", F, "elementwise", elements, 5 * e * elements, d.act, 2)
    return replace(
        part,
        forward=(*part.forward, *((add,) if apart else ())),
        backward=(*part.backward, sums),
        expert_params=part.expert_params + experts * n,
    )


def _biased_one_by_one(d: Dims, part: Operator, rows: float, experts: int, n: int) -> Operator:
    """A grouped matmul after which each expert's bias of `n`, times its rows' probabilities, is added to them.

    Megatron-Core's TEGroupedMLP loops over experts in Python, for the activation has weighted the rest already. Per
    element and expert: the product is written (1), the sum read and written (3); all are joined (2). Backward: the
    gradient times the probability (2) and its sum over rows (1), times the bias (2) and its sum over a row (1), and the
    experts' gradients joined (2). Probabilities are taken for 16 bits (`moe_router_dtype` unset).
    """
    elements, e = rows * n, d.act_bytes
    add = memory_op(f"{part.name}_bias", F, "elementwise", elements, 6 * e * elements, d.act, 2 * experts + 1)
    back = memory_op(f"{part.name}_bias_backward", I, "elementwise", elements, 8 * e * elements, d.act, 4 * experts + 1)
    return replace(
        part,
        forward=(*part.forward, replace(add, plain_host=True)),
        backward=(replace(back, plain_host=True), *part.backward),
        expert_params=part.expert_params + experts * n,
        backward_bytes=part.backward_bytes + elements * e,
    )


def _weighting(d: Dims, elements: float) -> Operator:
    """What leaves a GELU, times the router's fp32 probability of its copy: torch multiplies in fp32 and casts back.

    Megatron-Core's TEGroupedMLP (transformer/moe/experts.py, `bias_act_func`) has a fused kernel for the weighted
    SwiGLU and none for GELU. Accesses per element: forward product (e+4), cast (4+e); backward cast (e+4), both
    products (4+4 and 4+e+4), the first cast (4+e), the second summed over a row (4). The GELU's output is kept for the
    probability's gradient. torch holds the incoming gradient, both products and the first one's cast at once:
    autograd casts to an input's dtype, and sums over what was broadcast, after the operator has returned.
    """
    e = d.act_bytes
    forward, backward = (2 * FP32_BYTES + 2 * e) * elements, (7 * FP32_BYTES + 3 * e) * elements
    return Operator(
        "expert_weighting",
        (memory_op("expert_weighting", F, "elementwise", elements, forward, d.act, 2),),
        (memory_op("expert_weighting_backward", I, "elementwise", elements, backward, d.act, 5),),
        (Saved("moe", "gelu output", elements * e),),
        backward_bytes=(3 * FP32_BYTES + e) * elements,
    )


def _grouped(d: Dims, name: str, groups: int, rows: float, n: int, k: int, keep: bool) -> Operator:
    """`[rows, k] x [k, n]`, every row with the weights of its group."""
    d = replace(d, weight_shards=1)  # experts are gathered in 16 bits
    per, e, weights = max(1, round(rows / groups)), d.act_bytes, groups * k * n
    flops, operands = 2.0 * rows * k * n, d.linear_bytes
    written, added = accumulation(d, f"{name}_wgrad", weights)

    def run(what: str, phase: Phase, shape: tuple[int, int, int], moved: float) -> Compute:
        shapes = (groups, *shape)
        return Compute(what, "grouped_gemm", shapes, d.linear, flops, moved, phase, role=ROLES[phase], kernel=d.matmul)

    forward = (
        *casts(d, name, F, rows * k),
        *weight_casts(d, name, weights),
        run(name, F, (per, n, k), (rows * k + weights) * operands + rows * n * e),
    )
    backward = (
        *gradient_casts(d, name, rows * n),
        *weight_casts_again(d, name, weights),
        run(f"{name}_dgrad", I, (per, k, n), (rows * n + weights) * operands + rows * k * e),
        *casts_again(d, name, rows * k),
        run(f"{name}_wgrad", W, (n, k, per), rows * (k + n) * operands + written),
        *added,
    )
    size = rows * k * saved_element_bytes(d)
    saved = (Saved("moe", f"{name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),) if keep else ()
    held = rows * (k + n) * e + weight_gradient_bytes(d, weights)
    return Operator(name, forward, backward, saved, expert_params=weights, weights=((n, k),), backward_bytes=held)


def _combine(scenario: Scenario, d: Dims, r: Routing) -> Operator:
    """Results home, weighted and summed per token; the router's gradient needs the results (Megatron weights
    the activation instead and keeps nothing). Without sequence parallelism tp ranks then gather one another's
    tokens.
    """
    n, e = r.sent * d.hidden, d.act_bytes
    moved = (n + r.tokens * d.hidden) * e
    forward: Program = (
        *_sort(scenario, d, r, "unsort_chunks", F),
        *_expert_tp(scenario, d, r, "expert_scatter", "reduce_scatter", F),
        *_exchange(scenario, d, r, "combine", F, False),
        memory_op("unpermute", F, "permute", n, moved, d.act, 2),
    )
    backward: Program = (
        memory_op("unpermute_backward", I, "permute", n, moved + n * e, d.act, 2),
        *_exchange(scenario, d, r, "combine_backward", I, True),
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


def _moe(scenario: Scenario) -> MoeConfig:
    assert scenario.model.moe is not None
    return scenario.model.moe
