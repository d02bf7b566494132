"""Attention whose products are of 8-bit numbers (Transformer Engine's recipe.fp8_dpa, Megatron-Core's
`fp8_dot_product_attention`; cuDNN's kernels).

Queries, keys and values are quantized before the forward's kernel, the result's gradient before the backward's. Each
kernel reads and writes 8 bits: the forward's result is cast to 16, and so are the gradients of queries, keys and values
(`FusedAttnFunc` in pytorch/attention/dot_product_attention/backends.py). Queries, keys, values and the result are kept
in 8 bits. Context parallelism sends what the kernels read and write (context_parallel.py: `combine_and_quantize` before
the messages, `combine_and_dequantize` behind them). Softmax and its sums stay in fp32 within the kernels.

A cast takes the recipe's kernels. With one scale for a tensor it writes one order of its numbers, which is all that
cuDNN's kernels read. Recipes without attention of their own take current scaling (`NVTE_DPA_FP8_RECIPE`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.program import Phase, Program
from sim.models.attention.core import Core
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, memory_op
from sim.variants.recipes import RECIPES

CURRENT_SCALING = RECIPES["te", "tensorwise"]
EIGHT_BITS = {"act": "fp8", "act_bytes": 1.0}


def in_its_format(d: Dims, own: Core, made: Callable[[Dims], Operator]) -> Operator:
    """The core that `made` gives for the sizes of a step, in 8 bits if the step's attention is.

    `own`: a rank's queries, keys and values, as they are before any message.
    """
    if not d.fp8_attention:
        return made(d)
    part = made(replace(d, **EIGHT_BITS))
    of_heads = d.batch * own.heads
    queries, output = of_heads * own.q_len * own.head_dim, of_heads * own.q_len * own.v_head_dim
    keys = d.batch * own.kv_heads * own.kv_len * (own.head_dim + own.v_head_dim)
    sixteen = (queries + keys) * d.act_bytes
    return replace(
        part,
        forward=(
            *_quantized(d, "attention_cast", F, queries + keys, 3),
            *part.forward,
            *_widened(d, "attention_output_cast", F, output, 1),
        ),
        backward=(
            *_quantized(d, "attention_grad_cast", I, output, 1),
            *part.backward,
            *_widened(d, "attention_backward_cast", I, queries + keys, 3),
        ),
        backward_bytes=part.backward_bytes + sixteen,
        output_bytes=output * d.act_bytes,
    )


def _quantized(d: Dims, name: str, phase: Phase, elements: float, tensors: int) -> Program:
    """`tensors` of `elements` in all, from 16 bits to 8."""
    recipe = d.recipe if d.recipe is not None and d.recipe.has_attention else CURRENT_SCALING
    step, orders = recipe.activations, 1 if recipe.one_scale else recipe.activations.copies
    moved = elements * (step.sixteen * d.act_bytes + orders * (dtype_bytes(recipe.format) + recipe.scale_bytes))
    return (memory_op(name, phase, "cast", elements, moved, d.act, step.kernels * tensors, recipe.kernel),)


def _widened(d: Dims, name: str, phase: Phase, elements: float, tensors: int) -> Program:
    """`tensors` of `elements` in all, from 8 bits to 16."""
    moved = elements * (1.0 + d.act_bytes)
    return (memory_op(name, phase, "cast", elements, moved, d.act, tensors),)
