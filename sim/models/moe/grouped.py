"""One grouped matmul over a rank's experts, and what quantizes its operands."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, NeededBy, Phase, Program, Saved, TensorRole
from sim.core.timeline import HOST
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
from sim.variants.recipes import Pass

END_BYTES = 4.0  # of a group's last row


class Fused(NamedTuple):
    """A grouped matmul that shares kernels with the activation beside it.

    `forward_bytes`: what the forward kernel moves beyond a matmul's operands and result. `dgrad_bytes`: the same of the
    kernel that computes the input's gradient; what it does not move is subtracted. `made_input`: the kernel before has
    quantized the input. `made_gradient`: the kernel behind has quantized the output's gradient. `input_pass`: what
    quantizes the input where the kernel before has not, None: as ever. `kept_orders`: in which the input is kept.
    """

    forward_bytes: float = 0.0
    dgrad_bytes: float = 0.0
    made_input: bool = False
    made_gradient: bool = False
    input_pass: Pass | None = None
    kept_orders: int = 1


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
    own = _Grouped(d, name, groups, rows, n, k, fused, original, _launches(d, groups, fused is not None))
    weights = groups * k * n
    size = rows * k * (d.act_bytes if original else saved_element_bytes(d))
    size *= 1 if fused is None else fused.kept_orders
    saved = (Saved(f"{name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),) if keep else ()
    held = rows * (k + n) * d.act_bytes + weight_gradient_bytes(d, weights)
    passes = own.forward(), own.backward()
    return Operator(name, *passes, saved, expert_params=weights, weights=((n, k),), backward_bytes=held)


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


class _Grouped(NamedTuple):
    """One grouped matmul: the arguments of `grouped`, and how it is launched."""

    d: Dims
    name: str
    groups: int
    rows: float
    n: int
    k: int
    fused: Fused | None
    original: bool
    launches: _Launches

    def forward(self) -> Program:
        """Casts of the input and the weights, and the result."""
        d, name, calls = self.d, self.name, self.launches
        f = self.fused or Fused()
        given, weights = self.rows * self.k, self.groups * self.k * self.n
        moved = (given + weights) * d.linear_bytes + self.rows * self.n * d.act_bytes + f.forward_bytes
        cast = () if f.made_input else input_casts(d, name, given, False, self.original, step=f.input_pass)
        return (
            *_quantized_in_loop(d, calls.calls, cast),
            *_weights_one_by_one(calls.weight_calls, weight_casts(d, name, weights)),
            *self._swizzled(name, F, "input", "weight"),
            *self._matmul(name, F, (self._rows_of_group, self.n, self.k), moved),
        )

    def backward(self) -> Program:
        """The input's gradient, then the weights'."""
        d, name, calls, rows, n, k = self.d, self.name, self.launches, self.rows, self.n, self.k
        f, weights, per = self.fused or Fused(), self.groups * k * n, self._rows_of_group
        written, added = accumulation(d, f"{name}_wgrad", weights)
        cast = () if f.made_gradient else gradient_casts(d, name, rows * n)
        again = () if f.made_input else casts_again(d, name, rows * k, self.original)
        to_input = (rows * n + weights) * d.linear_bytes + rows * k * d.act_bytes + f.dgrad_bytes
        return (
            *_quantized_in_loop(d, calls.calls, cast),
            *_weights_one_by_one(calls.weight_calls, weight_casts_again(d, name, weights)),
            *self._swizzled(f"{name}_dgrad", I, "result", "weight"),
            *self._matmul(f"{name}_dgrad", I, (per, k, n), to_input),
            *_quantized_in_loop(d, calls.calls, again),
            *self._swizzled(f"{name}_wgrad", W, "input", "result"),
            *self._matmul(f"{name}_wgrad", W, (n, k, per), rows * (k + n) * d.linear_bytes + written),
            *added,
        )

    @property
    def _rows_of_group(self) -> int:
        return max(1, round(self.rows / self.groups))

    def _swizzled(self, what: str, phase: Phase, *operands: str) -> Program:
        weight: Scales = "weights" if self.fused is None else "compact"
        known: dict[str, tuple[Scales, float]] = {
            "input": ("activations", self.rows * self.k),
            "weight": (weight, float(self.groups * self.k * self.n)),
            "result": ("activations", self.rows * self.n),
        }
        return swizzles(self.d, what, phase, *(known[name] for name in operands), groups=self.groups)

    def _matmul(self, what: str, phase: Phase, shape: tuple[int, int, int], moved: float) -> Program:
        """The kernels of one pass: `shape` of each group, `moved` bytes of all."""
        d, shapes, kernels = self.d, (self.groups, *shape), self.launches.kernels
        flops = 2.0 * self.rows * self.k * self.n
        found = Compute(what, "grouped_gemm", shapes, d.linear, flops, moved, phase, kernels, ROLES[phase], d.matmul)
        ends = Comm("group_ends", "offload", HOST, END_BYTES * self.groups, phase)
        return (*((ends,) if self.launches.waits_for_ends else ()), replace(found, looped=self.launches.looped))


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
