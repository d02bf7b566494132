"""Kernels that bring the scales of a matmul's operands into the order in which the matmul reads them.

Blackwell's matmuls of MXFP8 and NVFP4 read scales in tiles of 128 x 4. Transformer Engine calls it swizzling. Its call
of a matmul does it right before the matmul, for each operand whose cast has not written them so (pytorch/csrc/util.cpp:
`swizzle_scaling_factors`; since 2.12 pytorch/csrc/extensions/swizzle.cpp: `swizzle_scales_for_gemm`). A cast does so
where its quantizer has `optimize_for_gemm`; `Recipe.swizzled_apart` says which operands' casts do not. torchao's do so
for no operand (prototype/mx_formats/mx_tensor.py: `_addmm_mx_dispatch`; prototype/moe_training/mxfp8_grouped_mm.py).

In all releases of Transformer Engine scales are compact, not in that order, behind a gather of sequence parallelism
(module/linear.py: `_get_quantizers`), and so are those of weights that are parameters in the format (module/base.py:
`_enable_weight_preswizzle`) or of fused experts (ops/fused/grouped_mlp.py).
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from sim.core.program import Phase, Program
from sim.models.dims import Dims, ceil_div
from sim.models.operators import F, I, Linear, memory_op
from sim.variants.recipes import Operand

Scales = Operand | Literal["compact"]  # compact: no release writes these scales in a matmul's order
SCALE_BYTES = 1  # E8M0 of MXFP8, E4M3 of NVFP4


def swizzles(d: Dims, name: str, phase: Phase, *operands: tuple[Scales, float], groups: int = 1) -> Program:
    """Return the kernels before a matmul: one for each of its `operands` that needs it, by kind and number of elements.

    `groups`: of a grouped matmul, whose tensors share kernels (`Recipe.swizzled_together`) unless each group is a layer
    of its own.
    """
    recipe = d.recipe
    if recipe is None or not recipe.numbers_of_swizzled_scale:
        return ()
    apart = {"compact", *recipe.swizzled_apart, *(("weights",) if d.eight_bit_parameters else ())}
    kernels, made = groups if d.experts_apart else ceil_div(groups, recipe.swizzled_together), []
    for i, (kind, elements) in enumerate(operands):
        if kind in apart:
            scales = elements / recipe.numbers_of_swizzled_scale
            moved = 2 * SCALE_BYTES * scales
            op = memory_op(f"{name}_{kind}{i}_swizzle", phase, "copy", scales, moved, d.act, kernels)
            made.append(replace(op, within_call=True))
    return tuple(made)


def linear_swizzles(d: Dims, spec: Linear, phase: Phase) -> Program:
    """Return the kernels that swizzle scales before a linear layer's matmuls of `phase`."""
    gathers = d.sp and d.tp > 1
    into: Scales = "compact" if gathers and spec.mode == "column" else "activations"
    out: Scales = "compact" if gathers and spec.mode == "row" and not d.partial_rows else "activations"
    made: Program = ()
    for i, n in enumerate(spec.outs):
        given, result = (into, float(spec.rows * spec.k)), (out, float(spec.rows * n))
        weight: tuple[Scales, float] = ("weights", float(spec.k * n))
        operands = (given, weight) if phase is F else (result, weight) if phase is I else (given, result)
        made += swizzles(d, f"{spec.out_name(i)}_{phase.value}", phase, *operands)
    return made
