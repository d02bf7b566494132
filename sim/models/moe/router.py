"""The router: which experts each token goes to, and how many copies each expert gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, NeededBy, Phase, Program, Saved, TensorRole
from sim.core.timeline import HOST
from sim.models.dims import Dims
from sim.models.moe.routing import Routing
from sim.models.operators import F, I, Operator, W, accumulate, collective, gemm, memory_op
from sim.models.precision.casts import cast, casts_apart
from sim.models.torch_kernels.top_k import top_k_clocks
from sim.variants.dispatchers import INDEX_BYTES

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.training_config import GraphPart

COUNT_BYTES = 8  # torch.long


class _Counts(NamedTuple):
    """How copies are counted: kernels, bytes for each token and expert, and the message that carries the counts, by its
    name and kind; over ep alone, or `both` it and expert_tp."""

    kernels: int
    entry_bytes: float
    name: str
    message: str
    both: bool


# By `Framework.counts_copies`. Megatron-Core: six sums and copies of counts on the device, three copies to the host.
# torchtitan 0.3.0: the map of tokens and experts is set to zero and filled (1; models/common/moe.py: MoE.forward) and
# summed (1); of what is sent and of what comes, sums by rank are copied to the host (models/common/token_dispatcher.py:
# `_sync_token_count_exchange`). Before, a histogram took the map's place.
COUNTS = {
    "gathered": _Counts(9, 1.0, "gather_counts", "all_gather", True),
    "exchanged": _Counts(7, 2.0, "exchange_counts", "all_to_all", False),
}


class _Casts(NamedTuple):
    """The dtype in which the router multiplies, and the casts that this needs.

    `wide`: autocast is off around it, so that it multiplies fp32 numbers. `narrow`: autocast copies its fp32 input to
    16 bits, kept so, and its gradient back (`sim.models.precision.casts`). `upcast`: it chooses by fp32 logits of a
    16-bit input. `ahead`: of `upcast`, the matmul is in fp32, of a copy of its input, which is kept. Without `ahead`,
    as in Megatron-Core's `RouterGatingLinearFunction` (transformer/moe/moe_utils.py), the forward multiplies 16-bit
    numbers to an fp32 result and the backward copies its input. Its products of fp32 numbers are Transformer Engine's,
    in tf32 (common/gemm/cublaslt_gemm.cu: "Use TF32 only for pure FP32 GEMM").
    """

    wide: bool
    narrow: bool
    upcast: bool
    ahead: bool


def _casts(d: Dims, moe: MoeConfig) -> _Casts:
    # Autocast gives fp32 and multiplies 16 bits, whatever the model casts to, unless its code turns autocast off.
    wide = casts_apart(d) and moe.router_fp32 and d.code.router_without_autocast
    upcast = moe.router_fp32 and d.act_bytes < FP32_BYTES and not casts_apart(d)
    ahead = upcast and d.framework.casts_routers
    return _Casts(wide, casts_apart(d) and not wide, upcast, ahead)


def router(d: Dims, moe: MoeConfig, r: Routing) -> Operator:
    """`[tokens, h] x [h, experts]`, softmax and top-k in fp32; the weights are whole on every rank."""
    m, h, x, e = r.tokens, d.hidden, moe.choices, d.act_bytes
    casts = _casts(d, moe)
    in_fp32 = casts.upcast or casts.wide
    fp32_product = "tf32" if casts.upcast and not casts.ahead else "fp32"
    dtype, backward_dtype = "fp32" if casts.ahead or casts.wide else d.act, fp32_product if in_fp32 else d.act
    choose, choose_back = _choice(d, moe, m, FP32_BYTES if in_fp32 else e)
    forward = (
        *((cast(d, "router_cast", F, m * h, widens=not d.framework.fuses_chains),) if casts.ahead else ()),
        *((cast(d, "router_cast", F, m * h),) if casts.narrow else ()),
        gemm("router", F, m, x, h, dtype, out_bytes=m * x * FP32_BYTES if casts.upcast else None),
        *choose,
    )
    backward = (
        choose_back,
        gemm("router_dgrad", I, m, h, x, backward_dtype),
        *((_copy(d, "router_grad_cast", I, m * h),) if casts.upcast else ()),
        *((cast(d, "router_grad_cast", I, m * h, widens=True),) if casts.narrow else ()),
        *((_copy(d, "router_recast", W, m * h),) if casts.upcast and not casts.ahead else ()),
        gemm("router_wgrad", W, x, h, m, backward_dtype, out_bytes=2 * d.grad_bytes * x * h),
        accumulate(d.of_stream, "router_grad_sum", m * h),
    )
    tensors = (x * h, x) if moe.router_bias else (x * h,)
    return Operator(
        "router",
        forward,
        backward,
        _kept(casts, m * h, m * x, e, bool(moe.shared_width)),
        params=sum(tensors),
        tensors=tensors,
        shared=tensors if d.sums_shared_once else (),
        # The input's gradient and the one that it joins; before them the fp32 one, or the fp32 copy that is made anew.
        backward_bytes=m * h * (2 * e + (FP32_BYTES if casts.upcast else 0)),
        always_again=True,
        graph="moe_router",
    )


def dispatch_choices(
    d: Dims, moe: MoeConfig, r: Routing, ep: int, expert_tp: int = 1, *, fills: bool = False
) -> tuple[Operator, ...]:
    """What is computed of a router's choice before tokens leave: experts' numbers, and how many copies each gets. A
    library that counts does so in its own call (Megatron-Core, transformer/moe/token_dispatcher.py:
    `dispatch_preprocess`, `token_dispatch`). `fills`: the map is filled up first (`fills_map`)."""
    (again, again_back), counts = _chosen_again(d, moe, r), _counts(d, moe, r, ep, expert_tp)
    if fills and not r.dispatcher.copies_on_arrival:
        counts = (*filled_map(d, r.tokens * moe.experts), *counts, *_copies_in_all())
    own: GraphPart | None = "moe_preprocess" if r.dispatcher.messages_beside else None
    return (
        *((Operator("dispatch_top_k", again, again_back, graph="moe_preprocess"),) if again else ()),
        *((Operator("dispatch_counts", counts, graph=own),) if counts else ()),
    )


def _kept(casts: _Casts, inputs: float, logits: float, e: float, shares: bool) -> tuple[Saved, ...]:
    """What the router keeps for its backward; `inputs`, `logits`: elements of each; `e`: bytes of an activation.

    Of a router that multiplies an fp32 copy, the input itself is kept where shared experts read it, too (`shares`):
    routed ones keep copies of its rows.
    """
    own = Saved("router input", inputs * (FP32_BYTES if casts.wide else e), NeededBy.WEIGHT_GRAD, TensorRole.INPUT)
    return (
        *((own,) if shares or not casts.ahead else ()),
        Saved("router probabilities", logits * FP32_BYTES),
        *((Saved("router input in fp32", inputs * FP32_BYTES, NeededBy.WEIGHT_GRAD),) if casts.ahead else ()),
    )


def _copy(d: Dims, name: str, phase: Phase, elements: float) -> Compute:
    """A copy from 16 bits to fp32 or back: what the 16-bit and the 32-bit matmul differ in."""
    return memory_op(name, phase, "cast", elements, elements * (d.act_bytes + FP32_BYTES), d.act)


def _choice(d: Dims, moe: MoeConfig, tokens: int, e: float) -> tuple[Program, Compute]:
    """Scores, top-k and auxiliary loss of `tokens`' logits of `e` bytes, and their backward; see `RouterKernels`."""
    k, n = d.code.router or d.framework.router, tokens * moe.choices
    launches = k.forward_kernels + (k.capacity_kernels if moe.capacity_factor is not None else 0)
    more, more_back = k.group_kernels if moe.chooses_groups else (0, 0)
    moved, moved_back = k.group_bytes if moe.chooses_groups else (0.0, 0.0)
    forward, backward = (
        (k.forward_accesses * e + k.forward_bytes + moved) * n,
        (k.backward_accesses * e + k.backward_bytes + moved_back) * n,
    )
    top_k = _top_k(d, moe, tokens) if k.torch_top_k else ()
    launches += more - sum(i.kernels for i in top_k)
    scores = memory_op("router_scores", F, "softmax", n, forward, d.act, launches)
    back = memory_op("router_top_k_backward", I, "softmax", n, backward, d.act, k.backward_kernels + more_back)
    # Runs of torch's own functions, with none of the modules around them that a kernel of Megatron's layers pays for.
    return tuple(replace(i, plain_host=True) for i in (scores, *top_k)), replace(back, plain_host=True)


def _top_k(d: Dims, moe: MoeConfig, tokens: int) -> tuple[Compute, ...]:
    """Each top-k of fp32 scores, two kernels: the best two of each group, the best groups, the best experts.

    Their bytes are among those of the scores. Nodes as groups are chosen by few more instructions, which are left out.
    """
    shapes = [("router_top_k", tokens, moe.choices, moe.top_k)]
    if moe.groups is not None:
        each, best = moe.choices // moe.groups, moe.top_groups or 1
        shapes[:0] = [("best_of_groups", tokens * moe.groups, each, 2), ("top_groups", tokens, moe.groups, best)]
    return tuple(
        replace(
            memory_op(name, F, "softmax", rows, 0.0, d.act, 2), clocks=top_k_clocks(rows, row, chosen, narrow=False)
        )
        for name, rows, row, chosen in shapes
    )


def _chosen_again(d: Dims, moe: MoeConfig, r: Routing) -> tuple[Program, Program]:
    """The top-k of the map of fp32 weights whose numbers the dispatcher takes (`Dispatcher.chooses_again`), and its
    backward: zeros, into which the weights' gradients are scattered by number."""
    if not (r.dispatcher.chooses_again and d.framework.maps_copies):
        return (), ()
    n, choices = r.tokens * moe.experts, r.tokens * moe.top_k
    written = choices * (INDEX_BYTES + FP32_BYTES)
    chosen = memory_op("dispatch_top_k", F, "softmax", n, FP32_BYTES * n + written, d.act, 2)
    clocks = top_k_clocks(r.tokens, moe.experts, moe.top_k, narrow=False)
    moved = FP32_BYTES * n + written + FP32_BYTES * choices
    back = memory_op("dispatch_top_k_backward", I, "softmax", n, moved, d.act, 2)
    return (replace(chosen, clocks=clocks, plain_host=True),), (replace(back, plain_host=True),)


# moe_utils.py: `pad_routing_map`, on [tokens, experts], each column by itself: how many chose (1 byte), how many lack
# (2, on one number an expert), who did not choose (1, 1), as 32-bit numbers (1, 4), their running count (4, 8), which
# of them are taken (8, 1) and marked (1, 1).
FILLING_KERNELS, FILLING_BYTES = 8, 31.0


def filled_map(d: Dims, entries: float) -> Program:
    """The map of tokens and experts with a multiple of a tile's tokens for each expert."""
    made = memory_op("filled_map", F, "elementwise", entries, FILLING_BYTES * entries, d.act, FILLING_KERNELS)
    return (replace(made, plain_host=True),)


def _copies_in_all() -> Program:
    """The host reads how many copies there are before it issues their kernel (`num_out_tokens`)."""
    return (collective("copies_in_all", "offload", COUNT_BYTES, F, group=HOST),)


def _counts(d: Dims, moe: MoeConfig, r: Routing, ep: int, expert_tp: int) -> Program:
    """How many copies go to each expert, of all ranks, which sizes the exchange (`counts_copies`): the map of tokens
    and experts is summed, its sums are gathered over expert_tp and ep, or exchanged over ep. A capacity drops copies,
    so that sizes are not known with one either, unless experts are filled up to it (Megatron-Core, transformer/moe/
    token_dispatcher.py: `preprocess`, `drop_and_pad`).

    DeepEP counts in a kernel of its own and gathers within its exchange, whatever the framework (Megatron-Core,
    transformer/moe/fused_a2a.py: `FusedDispatch`, `get_dispatch_layout`). HybridEP gathers the map itself, and a kernel
    reads all of it (DeepEP, csrc/hybrid_ep/executor/executor.cu: `metadata_preprocess_core`)."""
    ranks = ep * expert_tp
    if r.dispatcher.map_byte:
        every = r.dispatcher.map_byte * r.tokens * moe.experts * ranks
        layout = memory_op("dispatch_layout", F, "elementwise", every, every, d.act)
        return collective("gather_map", "all_gather", every, F, group="ep"), replace(layout, plain_host=True)
    if not r.dispatcher.messages_beside:
        choices = r.tokens * moe.top_k
        layout = memory_op("dispatch_layout", F, "elementwise", choices, INDEX_BYTES * choices, d.act)
        return (replace(layout, plain_host=True),)
    way = COUNTS.get(d.framework.counts_copies)
    if way is None or moe.pad_to_capacity or (ranks if way.both else ep) == 1:
        return ()
    group = "ep" if ep > 1 else "expert_tp"
    n, size = r.tokens * moe.experts, moe.experts * COUNT_BYTES
    count = memory_op("count_copies", F, "elementwise", n, way.entry_bytes * n, d.act, way.kernels)
    return (
        replace(count, plain_host=True),
        # One gather over both axes, a few KiB: it takes what the wider-spread group's start takes, whatever the bytes.
        collective(way.name, way.message, size * ranks if way.both else size, F, group=group),
    )
