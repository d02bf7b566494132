"""The grouped matmuls of a rank's experts, and what each framework runs around them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program, Saved
from sim.inputs.training_config import ActivationOffload
from sim.models.activation_memory.recompute_modules import inside, runs_again
from sim.models.activations.kernels import activation, is_gated
from sim.models.dims import Dims, ceil_div
from sim.models.elementwise import launches_alone
from sim.models.moe.fused_mlp import fused_mlp
from sim.models.moe.grouped import Fused, grouped
from sim.models.moe.routing import Routing, aligned_rows, fills_map, fuses_experts, lacking_rows, moe_of
from sim.models.moe.static_buffers import in_static_buffers
from sim.models.moe.token_steps import token_steps
from sim.models.operators import F, I, Operator, W, further_kernels, memory_op
from sim.variants.activations import ACTIVATIONS

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def expert_matmuls(scenario: Scenario, d: Dims, r: Routing) -> tuple[Operator, ...]:
    """Grouped matmuls over this rank's experts; flops and bytes by the copies they really get, of the fullest rank."""
    m, moe, etp = scenario.model, moe_of(scenario), scenario.parallelism.expert_tp
    fused = fuses_experts(scenario, d)
    filled, cut, more = _padding(scenario, d, r, r.fullest * etp)
    rows, ffn = r.fullest * etp + more, ceil_div(moe.ffn, etp)
    activation = moe.activation or m.mlp
    inner = 2 * ffn if is_gated(activation) else ffn
    halves = is_gated(activation) and d.framework.splits_expert_halves and not m.bias
    make = fused_mlp if fused else partial(_projections, *_originals(scenario, d), halves)
    up, down = make(d, r.experts, rows, inner, ffn)
    if m.bias:
        up = _biased(d, up, rows, r.experts, inner)
        add = _biased_one_by_one if d.framework.biases_experts_one_by_one and not fused else _biased
        down = add(d, down, rows, r.experts, d.hidden)
    made = () if fused else inside("moe_act", _activated(d, activation, rows * ffn))
    apart = d.experts_apart and r.experts > 1
    made, joined = (_each_by_itself(made, r.experts), (_joined(d, rows),)) if apart else (made, ())
    parts = (*filled, up, *made, down, *cut, *joined)
    beyond_mean = (r.fullest - r.received) * etp / rows
    parts = tuple(_kept(p, 1 - beyond_mean) for p in parts) if beyond_mean else parts
    return in_static_buffers(scenario.for_training, parts)


def _each_by_itself(parts: tuple[Operator, ...], experts: int) -> tuple[Operator, ...]:
    """The parts, whose kernels each of `experts` launches for its own rows."""

    def launched(program: Program) -> Program:
        return tuple(replace(i, kernels=i.kernels * experts) if isinstance(i, Compute) else i for i in program)

    return tuple(replace(p, forward=launched(p.forward), backward=launched(p.backward)) for p in parts)


def _joined(d: Dims, rows: float) -> Operator:
    """The experts' results in one tensor (torch.cat), and their inputs' gradients, as the backward of torch.split."""
    n, moved = rows * d.hidden, 2 * rows * d.hidden * d.act_bytes
    ahead, back = (
        memory_op(f"experts_join{name}", phase, "copy", n, moved, d.act) for name, phase in (("", F), ("_backward", I))
    )
    out = n * d.act_bytes
    return Operator("experts_join", (ahead,), (back,), forward_bytes=out, backward_bytes=out)


def _originals(scenario: Scenario, d: Dims) -> tuple[bool, bool]:
    """Whether the first and the second matmul keep their 16-bit input: where it goes to the host, and where the
    activation runs again (core/transformer/moe/experts.py: TEGroupedMLP, `set_save_original_input`)."""
    offload = scenario.for_training.activation_offload
    goes = isinstance(offload, ActivationOffload) and "expert_fc1" in offload.modules
    return d.saves_originals and goes, d.saves_originals and runs_again(scenario, "moe_act")


def _projections(
    first: bool, second: bool, halves: bool, d: Dims, experts: int, rows: float, inner: int, ffn: int
) -> tuple[Operator, Operator]:
    """Both projections, with the activation's kernels between them; `first`, `second`: see `_originals`; `halves`: gate
    and up have a matmul each."""
    if halves:
        up = _gate_and_up(d, experts, rows, ffn, first)
    else:
        up = grouped(d, "experts_up", experts, rows, inner, d.hidden, original=first)
    return replace(up, module="expert_fc1"), grouped(d, "experts_down", experts, rows, d.hidden, ffn, original=second)


def _gate_and_up(d: Dims, experts: int, rows: float, ffn: int, original: bool) -> Operator:
    """Gate and up as two grouped matmuls of one input, which is quantized once (torch/_functorch/compile_utils.py:
    `fx_graph_cse`). Both gradients of it are added up: by a kernel, or where the next one reads them."""
    gate = grouped(d, "experts_gate", experts, rows, ffn, d.hidden, original=original)
    up = grouped(d, "experts_up", experts, rows, ffn, d.hidden, keep=False, fused=Fused(made_input=True))
    steps, size = token_steps(d), rows * d.hidden * d.act_bytes
    accesses, kernels = (1, 0) if steps is not None and steps.fuses_sums else (3, 1)
    summed = memory_op("experts_dgrad_sum", I, "elementwise", rows * d.hidden, accesses * size, d.act, kernels)
    return replace(
        gate,
        name="experts_up",
        forward=(*gate.forward, *up.forward),
        backward=(*gate.backward, *up.backward, summed),
        expert_params=gate.expert_params + up.expert_params,
        weights=gate.weights + up.weights,
        backward_bytes=up.backward_bytes + size,
    )


def _kept(part: Operator, share: float) -> Operator:
    """A part with `share` of what it keeps and holds, as a layer's mean is of the fullest rank's."""
    saved = tuple(s._replace(bytes=s.bytes * share) for s in part.saved)
    return replace(
        part, saved=saved, forward_bytes=part.forward_bytes * share, backward_bytes=part.backward_bytes * share
    )


# Beside the sum, of torch's sum of rows by index (ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel)
SORTED_SUM_KERNELS = 8


def _padding(
    scenario: Scenario, d: Dims, r: Routing, rows: float
) -> tuple[tuple[Operator, ...], tuple[Operator, ...], float]:
    """Before and after 8-bit experts, copies of their `rows`: each expert's are filled up to the matmul's tile, and
    what was filled is cut off again (Transformer Engine's `Fp8Padding`, `Fp8Unpadding`; backward the other way round);
    and how many rows more the experts then compute.

    The fp32 probabilities of rows are filled up by a kernel of their own (core/transformer/moe/experts.py:
    `quantization_padding`). Nothing is copied where a capacity, the router or the dispatcher gives every expert a
    multiple (`Fp8Padding.forward`: "no padding needed"; `skip_routed_expert_padding`), nor by fused experts before
    they had a tile of their own.
    """
    moe, tile = moe_of(scenario), aligned_rows(scenario, d)
    even = moe.capacity_factor is not None and rows % (r.experts * tile) == 0
    even = even or r.dispatcher.fills_tiles or fills_map(scenario, d)
    even = even or (fuses_experts(scenario, d) and not d.framework.fused_experts_tile)
    if d.recipe is None or not d.framework.pads_experts or even:
        return (), (), 0.0
    lacking = lacking_rows(scenario, d) if moe.capacity_factor is None else -rows / r.experts % tile
    more = lacking * r.experts
    n, weights = (rows + more) * d.hidden, (2 * rows + more) * FP32_BYTES
    moved = (2 * rows + more) * d.hidden * d.act_bytes

    def copies(name: str, beside: float, kernels: int) -> tuple[Operator, ...]:
        forward = memory_op(name, F, "copy", n, moved + beside, d.act, kernels)
        backward = memory_op(f"{name}_backward", I, "copy", n, moved + beside, d.act, kernels)
        return (Operator(name, (forward,), (backward,), backward_bytes=moved),)

    return copies("experts_padding", weights, 2), copies("experts_unpadding", 0.0, 1), more


def _biased(d: Dims, part: Operator, rows: float, experts: int, n: int) -> Operator:
    """A grouped matmul whose experts add a bias of `n` to each of their rows: read with it, written.

    In separate operators each row's bias is gathered (2 accesses) and added (3), its gradient summed by expert (2 and
    1, torch's index_put: TransformerEngine's grouped linear adds it in the matmul, and sums it in one pass).
    """
    elements, e = rows * n, d.act_bytes
    apart = not d.framework.merges_projections
    sums = memory_op(f"{part.name}_bias_grad", W, "elementwise", elements, (3 if apart else 1) * e * elements, d.act)
    starts: Program = ()
    steps = token_steps(d)
    if steps is not None and steps.sorts_biases:
        # index_put sorts the rows, and adds those of one expert one after another.
        sums = replace(sums, rows_in_turn=rows / experts)
        starts = (
            *launches_alone(f"{part.name}_bias_grad_zeros", W, 1),
            further_kernels(f"{part.name}_bias_grad_starts", W, SORTED_SUM_KERNELS, 0),
        )
    add = memory_op(f"{part.name}_bias", F, "elementwise", elements, 5 * e * elements, d.act, 2)
    return replace(
        part,
        forward=(*part.forward, *((add,) if apart else ())),
        backward=(*part.backward, *starts, sums),
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


def _activated(d: Dims, mlp: str, elements: float) -> tuple[Operator, ...]:
    """The activation, and the router's weight of each copy where the framework multiplies by it here.

    A gated activation's kernel multiplies by itself (`weighted_bias_swiglu_impl` in Megatron-Core's
    fusions/fused_bias_swiglu.py). torch compiles its backward into two kernels, since the gradients of both halves and
    the weights', a sum over one half, have different sizes: the second reads gradient, gate and up again. A squared
    ReLU's does where `fuses_weighted_relu2` (fusions/fused_weighted_squared_relu.py: `weighted_squared_relu_back`
    reads gradient and input again). All others are weighted by torch's operators.
    """
    f = d.framework
    weights = f.weights_experts_after_activation
    by_kernel = is_gated(mlp) or (mlp == "relu2" and f.fuses_weighted_relu2)
    fused = weights and by_kernel and f.fuses_activation
    made = activation(d, mlp, elements, f.cuts_expert_halves, weighted=fused)
    if weights and not by_kernel:
        return made, _weighting(d, elements)
    if not fused:
        return (made,)
    again = 3 if is_gated(mlp) else 2
    read = memory_op("expert_weights_grad", I, "elementwise", elements, again * d.act_bytes * elements, d.act)
    counted = ACTIVATIONS[mlp].compiled.of_weight * elements if f.compiles_activation else 0.0
    return (replace(made, backward=(*made.backward, replace(read, instructions=counted))),)


def _weighting(d: Dims, elements: float) -> Operator:
    """The product of an activation's result with the router's fp32 probability: torch multiplies in fp32, casts back.

    Megatron-Core's TEGroupedMLP (transformer/moe/experts.py, `bias_act_func`) has a fused kernel for the weighted
    SwiGLU, one for the weighted squared ReLU if a switch asks for it, and none for others. Accesses per element:
    forward product (e+4), cast (4+e); backward cast (e+4), both products (4+4 and 4+e+4), the first cast (4+e), the
    second summed over a row (4). The activation's output is kept for the probability's gradient. torch holds the
    incoming gradient, both products and the first one's cast at once: autograd casts to an input's dtype, and sums over
    what was broadcast, after the operator has returned.
    """
    e = d.act_bytes
    forward, backward = (2 * FP32_BYTES + 2 * e) * elements, (7 * FP32_BYTES + 3 * e) * elements
    return Operator(
        "expert_weighting",
        (memory_op("expert_weighting", F, "elementwise", elements, forward, d.act, 2),),
        (memory_op("expert_weighting_backward", I, "elementwise", elements, backward, d.act, 5),),
        (Saved("activation output", elements * e),),
        backward_bytes=(3 * FP32_BYTES + e) * elements,
    )
