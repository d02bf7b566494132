"""One grouped matmul over a rank's experts, and what quantizes its operands."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, NeededBy, Phase, Program, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import ROLES, F, I, Operator, W, accumulation, weight_gradient_bytes
from sim.models.precision.quantizing import (
    casts_again,
    gradient_casts,
    input_casts,
    saved_element_bytes,
    weight_casts,
    weight_casts_again,
)
from sim.models.precision.swizzles import Scales, swizzles

END_BYTES = 4.0  # of a group's last row


class Fused(NamedTuple):
    """A grouped matmul that shares kernels with the activation beside it.

    `forward_bytes`: what the forward kernel moves beyond a matmul's operands and result. `dgrad_bytes`: the same of the
    kernel that computes the input's gradient; what it does not move is subtracted. `made_input`: the kernel before has
    quantized the input. `made_gradient`: the kernel behind has quantized the output's gradient.
    """

    forward_bytes: float = 0.0
    dgrad_bytes: float = 0.0
    made_input: bool = False
    made_gradient: bool = False


def grouped(
    d: Dims,
    name: str,
    groups: int,
    rows: float,
    n: int,
    k: int,
    *,
    keep: bool = True,
    fused: Fused | None = None,
    original: bool = False,
) -> Operator:
    """`[rows, k] x [k, n]`, every row with the weights of its group. `keep`: the input is kept for the backward.
    `original`: as `Linear.original`.

    `loops_over_experts`: launches of each group, which a library's loop issues (`Compute.looped`) to several streams;
    torch's fp32 matmuls run one after another, once the host knows where groups end, and so do experts with layers of
    their own (`Dims.experts_apart`).
    Weights of each group are quantized by a call of their own (Transformer Engine's module/grouped_linear.py:
    `get_weight_workspace`). With `fused` one kernel takes all groups.
    """
    recipe = None if d.recipe is None else d.recipe.of_groups
    d = replace(d, weight_shards=1, reduced_over=d.experts_reduced_over, recipe=recipe)  # gathered in 16 bits
    launches = _launches(d, groups, fused is not None)
    calls, weight_calls, run = launches.calls, launches.weight_calls, partial(_matmul, d, launches, groups)
    per, e, weights = max(1, round(rows / groups)), d.act_bytes, groups * k * n
    flops, operands = 2.0 * rows * k * n, d.linear_bytes
    written, added = accumulation(d, f"{name}_wgrad", weights)
    f = fused or Fused()
    weight: tuple[Scales, float] = ("weights" if fused is None else "compact", float(weights))
    given: tuple[Scales, float] = ("activations", rows * k)
    result: tuple[Scales, float] = ("activations", rows * n)

    forward = (
        *(() if f.made_input else _quantized_in_loop(d, calls, input_casts(d, name, rows * k, False, original))),
        *_weights_one_by_one(weight_calls, weight_casts(d, name, weights)),
        *swizzles(d, name, F, given, weight, groups=groups),
        *run(name, F, (per, n, k), flops, (rows * k + weights) * operands + rows * n * e + f.forward_bytes),
    )
    backward = (
        *(() if f.made_gradient else _quantized_in_loop(d, calls, gradient_casts(d, name, rows * n))),
        *_weights_one_by_one(weight_calls, weight_casts_again(d, name, weights)),
        *swizzles(d, f"{name}_dgrad", I, result, weight, groups=groups),
        *run(f"{name}_dgrad", I, (per, k, n), flops, (rows * n + weights) * operands + rows * k * e + f.dgrad_bytes),
        *(() if f.made_input else _quantized_in_loop(d, calls, casts_again(d, name, rows * k, original))),
        *swizzles(d, f"{name}_wgrad", W, given, result, groups=groups),
        *run(f"{name}_wgrad", W, (n, k, per), flops, rows * (k + n) * operands + written),
        *added,
    )
    size = rows * k * (e if original else saved_element_bytes(d))
    saved = (Saved(f"{name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),) if keep else ()
    held = rows * (k + n) * e + weight_gradient_bytes(d, weights)
    return Operator(name, forward, backward, saved, expert_params=weights, weights=((n, k),), backward_bytes=held)


class _Launches(NamedTuple):
    """How a grouped matmul is launched: its kernels; the calls that quantize activations and weights; `looped`: by a
    library's loop over groups; `waits_for_ends`: once the host knows where groups end."""

    kernels: int
    calls: int
    weight_calls: int
    looped: bool
    waits_for_ends: bool


def _launches(d: Dims, groups: int, fused: bool) -> _Launches:
    # torch has a grouped kernel for 16 bits alone (aten/src/ATen/native/GroupedMMUtils.h: _grouped_mm_fallback, which
    # copies the groups' ends to the host, `offs.cpu()`, and waits for them).
    alone = d.framework.experts_in_param_dtype and d.linear_bytes == FP32_BYTES
    apart = d.experts_apart and groups > 1
    looped = d.framework.loops_over_experts and groups > 1 and not fused and not apart
    return _Launches(
        kernels=groups if looped or alone or apart else 1,
        calls=groups if looped or apart else 1,
        weight_calls=groups if d.framework.loops_over_experts or apart else 1,
        looped=looped,
        waits_for_ends=alone,
    )


def _matmul(
    d: Dims,
    launches: _Launches,
    groups: int,
    what: str,
    phase: Phase,
    shape: tuple[int, int, int],
    flops: float,
    moved: float,
) -> Program:
    """The kernels of one pass: `shape` of each group, `moved` bytes of all."""
    shapes, kernels = (groups, *shape), launches.kernels
    found = Compute(what, "grouped_gemm", shapes, d.linear, flops, moved, phase, kernels, ROLES[phase], d.matmul)
    ends = (Comm("group_ends", "offload", "host", END_BYTES * groups, phase),) if launches.waits_for_ends else ()
    return (*ends, replace(found, looped=launches.looped))


def _quantized_in_loop(d: Dims, calls: int, quantized: Program) -> Program:
    """The quantization of activations, launched by `calls` of a library's loop, unless its recipe has a kernel for all
    groups; a call launches the recipe's own kernels for the scale too. Experts with layers of their own each launch it.
    """
    if d.experts_apart:
        return _weights_one_by_one(calls, quantized)
    if calls == 1 or d.recipe is None or d.recipe.quantizes_groups:
        return quantized
    found, more = [i for i in quantized if isinstance(i, Compute)], d.recipe.launches_for_scale
    return tuple(replace(i, kernels=calls * (i.kernels + more), looped=True) for i in found)


def _weights_one_by_one(calls: int, quantized: Program) -> Program:
    """The quantization of weights, by a call for each group of `calls`."""
    found = [i for i in quantized if isinstance(i, Compute)]
    return tuple(replace(i, kernels=calls * i.kernels) for i in found) if calls > 1 else quantized
