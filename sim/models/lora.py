"""Low-rank adapters (Hu et al. 2021, LoRA, arXiv 2106.09685): W x + (alpha / rank) · B A x with W frozen.

Frozen weights need the input's gradient alone: no weight gradient, nothing kept for one, no gradient and no optimizer
state in memory. An adapter of a matrix [n, k] has rank·(k + n) parameters: A [rank, k], B [n, rank]; it keeps x and
A x. Matmuls of a token cost 4 flops a frozen weight and 6 an adapter's, in place of 6. Backward ends at the first
adapter of the model: what lies before it needs no gradient.

As `peft` does it in eager mode: A and B are matmuls of their own, scaling and sum one kernel each; adapters are kept
and multiplied in 16 bits where other matmuls have 8 or 4, or in fp32 (`adapters_in_fp32`). With `dropout` each adapter
drops numbers of its own input, and keeps what is left and the mask (peft/tuners/lora/layer.py: `lora_A(dropout(x))`).
Frozen weights in 4 or 8 bits: `sim.models.frozen_weights`.

With tensor parallelism adapters are split as NeMo's are (`ParallelLinearAdapter`): beside a column layer A's rank and
B's outputs are split and A x is gathered; beside a row layer A's inputs and B's outputs are, A x is summed, and B's
result is exchanged for the rank's own rows (gathered without sequence parallelism). With sequence parallelism A reads
the input that the frozen layer gathered, in 16 bits, and keeps it whole. A frozen layer that gathers beside its matmul
gives nothing gathered away, so the adapter gathers its input again, waits for it, and reduce-scatters its gradient
(NeMo nlp/models/language_modeling/megatron/adapters/mcore_mixins.py: return_layernorm_output_gathered;
nlp/modules/common/megatron/adapters/parallel_adapters.py: ParallelLinearAdapter).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, NeededBy, Program, Saved, TensorRole
from sim.models.dims import Dims, ceil_div
from sim.models.elementwise import MASK_BYTES
from sim.models.frozen_weights import format_of, kept_in_few_bits
from sim.models.operators import (
    F,
    I,
    Linear,
    Operator,
    W,
    accumulate,
    collective,
    gemm,
    memory_op,
    weight_gradient,
    weight_gradient_bytes,
)
from sim.models.precision.casts import branch_gradients_summed, cast, in_fp32, mixed, reads_wide

if TYPE_CHECKING:
    from sim.inputs.training_config import LoraTarget


def frozen(part: Operator) -> Operator:
    """A part whose parameters get no gradient: what its weight gradient alone needs is neither kept nor computed."""
    return replace(
        part,
        backward=tuple(i for i in part.backward if i.phase is not W),
        saved=tuple(s for s in part.saved if s.needed_by is not NeededBy.WEIGHT_GRAD),
        params=0,
        expert_params=0,
        frozen=part.params + part.expert_params,
        frozen_matrices=part.matrix_elements,
        weights=(),
    )


def with_adapters(d: Dims, spec: Linear, base: Operator) -> Operator:
    """A linear layer frozen, with an adapter for each of its matrices where it is among the targets.

    The output projection keeps its input without an adapter too, and beside an adapter's own copy: fused attention's
    backward reads its own output.
    """
    unneeded = weight_gradient_bytes(d, spec.k * max(spec.outs))
    part = replace(frozen(base), backward_bytes=base.backward_bytes - unneeded)
    part = kept_in_few_bits(d, spec, part)
    # A recipe that quantizes the projection's input leaves this to the core, which keeps its output besides.
    keeps = d.recipe is None or not d.recipe.keeps_quantized
    fused = d.fused_attention and keeps and spec.target == "attention_out"
    output = (Saved("output", spec.rows * spec.k * d.act_bytes),) if fused else ()
    held = _held_input(d, base) if not output else ()
    if d.lora is None or spec.target not in d.lora.targets:
        return replace(part, saved=(*part.saved, *output, *held))
    adapters = [_adapter(d, spec, i) for i in range(len(spec.outs))]
    r, rows, k, e = d.lora.rank, spec.rows, spec.k, d.act_bytes
    own_e, drops = _own(d).act_bytes, bool(d.lora.dropout)
    apart = drops or _copies(d)
    kept = len(spec.outs) if apart else 1  # each adapter's own, or what they share
    e_kept = own_e + (MASK_BYTES if drops else 0)
    wide = len(spec.outs) * rows * r * own_e
    inputs = tuple(s._replace(bytes=kept * k * rows * e_kept) for s in base.saved if s.late)
    own_input = (*output, *held) if apart else ()  # beside the adapters' copies
    saved = (*part.saved, *inputs, *own_input, Saved(f"{spec.name} A x", wide, NeededBy.WEIGHT_GRAD))
    again = Saved(f"{spec.name} input", kept * k * rows * e_kept, NeededBy.WEIGHT_GRAD, TensorRole.INPUT)
    return replace(
        part,
        forward=(*part.forward, *chain.from_iterable(x.forward for x in adapters)),
        backward=(*chain.from_iterable((*x.backward, *x.of_input) for x in adapters), *part.backward),
        saved=saved,
        params=sum(x.params for x in adapters),
        forward_bytes=part.forward_bytes + rows * max(spec.outs) * e,
        backward_bytes=part.backward_bytes + wide + weight_gradient_bytes(d, r * max(k, *spec.outs)),
        adapters_alone=tuple(chain.from_iterable(x.backward for x in adapters)),
        unsaved_input=() if inputs else (again,),
    )


def _held_input(d: Dims, base: Operator) -> tuple[Saved, ...]:
    """The input that a frozen layer of LLM.int8 keeps."""
    kept = format_of(d.lora) if d.few_bits else None
    return tuple(s for s in base.saved if s.late) if kept is not None and kept.quantizes_inputs else ()


class _Adapter(NamedTuple):
    """Hold what runs for one adapter on a rank. `of_input`: what its backward adds for the layer's input."""

    params: int
    forward: Program
    backward: Program
    of_input: Program


def _own(d: Dims) -> Dims:
    """The sizes of adapters: as of all else, or fp32 (`adapters_in_fp32`, without autocast)."""
    return in_fp32(d) if d.adapters == "fp32" else d


def _copies(d: Dims) -> bool:
    """Tell whether each adapter copies its input; a compiler leaves autocast's copies out."""
    return d.adapters == "fp32" or (d.adapters == "autocast" and not d.framework.fuses_chains)


def _inputs(d: Dims, name: str, elements: float, wide_input: bool) -> tuple[Program, Program]:
    """Casts and dropout of an adapter's input, which may have fp32 already (`wide_input`: a norm's under autocast), and
    the backward of both. Autocast's copy in 16 bits comes last."""
    if not _copies(d):
        return _dropout(d, name, elements)
    drop, undrop = _dropout(in_fp32(d), name, elements)
    wide, narrow = (partial(cast, d, elements=elements, widens=w) for w in (True, False))
    forward, backward = drop, undrop
    if not wide_input:
        forward, backward = (wide(f"{name}_cast", F), *drop), (*undrop, narrow(f"{name}_dgrad_cast", I))
    if d.adapters == "fp32":
        return forward, backward
    return (*forward, narrow(f"{name}_autocast", F)), (wide(f"{name}_autocast_backward", I), *backward)


def _weight_casts(d: Dims, name: str, elements: float) -> tuple[Program, Program]:
    """Autocast's copies of A and B in 16 bits, and of their gradients in fp32 (with autocast over all parameters
    `weight_gradient` has these)."""
    if d.adapters != "autocast" or not _copies(d):
        return (), ()
    made = cast(d, f"{name}_weights_cast", F, elements, kernels=2)
    if d.autocast:
        return (made,), ()
    return (made,), (cast(d, f"{name}_weights_cast_backward", W, elements, kernels=2, widens=True),)


def _summed(d: Dims, own: Dims, name: str, elements: float) -> tuple[Program, Program]:
    """Scaling and sum with the layer's result, and their backward; in fp32 the result is copied there and back."""
    e = d.act_bytes
    scale_back = memory_op(
        f"{name}_scale_lora_dgrad", I, "elementwise", elements, 2 * own.act_bytes * elements, own.act
    )
    if own is d:
        kernels = 1 if d.framework.fuses_adapter_sum else 2
        added = memory_op(f"{name}_sum", F, "elementwise", elements, (2 * kernels + 1) * e * elements, d.act, kernels)
        return (added,), (scale_back,)
    scaled = memory_op(f"{name}_scale", F, "elementwise", elements, 2 * FP32_BYTES * elements, own.act)
    added = memory_op(f"{name}_sum", F, "elementwise", elements, (e + 2 * FP32_BYTES) * elements, own.act)
    back = (cast(d, f"{name}_grad_cast", I, elements, widens=True), cast(d, f"{name}_result_grad_cast", I, elements))
    return (scaled, mixed(added, 3), cast(d, f"{name}_result_cast", F, elements)), (*back, scale_back)


class _Sizes(NamedTuple):
    """Hold an adapter's sizes on a rank: A is [rank_of_a, k], B [width, rank]; `out`: numbers of its result."""

    mode: str  # as of the frozen layer: "column", "row" or "plain"
    rank_of_a: int
    width: int
    out: int


def _sizes(d: Dims, spec: Linear, n: int, rank: int) -> _Sizes:
    """The sizes of the adapter of a matrix of `n` outputs."""
    mode = spec.mode if d.tp > 1 else "plain"
    return _Sizes(
        mode,
        rank_of_a=ceil_div(rank, d.tp) if mode == "column" else rank,
        width=ceil_div(n, d.tp) if mode == "row" else n,
        out=ceil_div(spec.rows, d.tp) * n if mode == "row" and d.sp else spec.rows * n,
    )


def _input_gathers(
    d: Dims, layer: LoraTarget | None, name: str, mode: str, rows: int, size: float
) -> tuple[int, Program, Program]:
    """The rows of its input that an adapter has of itself, the gather of the others, and the reduce-scatter of their
    gradient; `size`: bytes of the whole input. Only beside a frozen layer that gathers within its matmul."""
    if not (mode == "column" and d.overlaps_in_library and layer not in d.waiting_layers):
        return rows, (), ()
    gather = collective(f"{name}_gather", "all_gather", size, F)
    return ceil_div(rows, d.tp), (gather,), (collective(f"{name}_a_dgrad_reduce_scatter", "reduce_scatter", size, I),)


def _adapter(d: Dims, spec: Linear, number: int) -> _Adapter:
    """The adapter of one of a layer's matrices."""
    assert d.lora is not None
    own, wide = _own(d), reads_wide(d, spec)
    r, rows, k, n, e = d.lora.rank, spec.rows, spec.k, spec.outs[number], own.act_bytes
    mode, rank_of_a, width, out = _sizes(d, spec, n, r)
    params = rank_of_a * k + r * width
    name = f"{spec.out_name(number)}_lora"
    summed, summed_back = _summed(d, own, name, out)
    inner, forth, back = _messages(d, name, mode, rows * r * e, rows * n * e)
    own_rows, gathers, scatters = _input_gathers(d, spec.target, name, mode, rows, rows * k * e)
    given, given_back = _inputs(d, name, own_rows * k, wide)
    narrow, narrow_back = _weight_casts(d, name, params)
    a, b = gemm(f"{name}_a", F, rows, rank_of_a, k, own.act), gemm(f"{name}_b", F, rows, width, r, own.act)
    return _Adapter(
        params,
        forward=(*given, *narrow, *gathers, a, *inner, b, *forth, *summed),
        backward=(
            *summed_back,
            gemm(f"{name}_b_lora_dgrad", I, rows, r, width, own.act),
            *back,
            *weight_gradient(own, f"{name}_b_wgrad", rows, r, width, own.act),
            *weight_gradient(own, f"{name}_a_wgrad", rows, k, rank_of_a, own.act),
            *narrow_back,
        ),
        of_input=(
            gemm(f"{name}_a_dgrad", I, rows, k, rank_of_a, own.act),
            *scatters,
            *given_back,
            _input_gradients_summed(in_fp32(d) if wide else d, spec, f"{name}_dgrad_sum", own_rows),
        ),
    )


def _input_gradients_summed(d: Dims, spec: Linear, name: str, rows: int) -> Compute:
    """The sum of the input's gradients of layer and adapter. Attention's backward, a kernel of its own, reads that of
    `attention_out` from memory."""
    if spec.target == "attention_out":
        return accumulate(d, name, rows * spec.k)
    return branch_gradients_summed(d, name, rows, spec.k, 1)


def _dropout(d: Dims, name: str, elements: float) -> tuple[Program, Program]:
    """Dropout of an adapter's input, forward and backward: read, written, and the mask."""
    if d.lora is None or not d.lora.dropout:
        return (), ()
    moved = (2 * d.act_bytes + MASK_BYTES) * elements
    dropped = memory_op(f"{name}_dropout", F, "elementwise", elements, moved, d.act)
    back = memory_op(f"{name}_dropout_backward", I, "elementwise", elements, moved, d.act)
    return (replace(dropped, random_numbers=float(elements)),), (back,)


def _messages(d: Dims, name: str, mode: str, inner: float, outer: float) -> tuple[Program, Program, Program]:
    """Tensor-parallel messages of an adapter: after A, after B, and of A x's gradient.

    `inner`, `outer`: bytes of A x and of the layer's result, all rows of both.
    """
    if mode == "plain":
        return (), (), ()
    gather = collective(f"{name}_a_gather", "all_gather", inner, F)
    gradient = collective(f"{name}_a_grad_reduce_scatter", "reduce_scatter", inner, I)
    if mode == "column":
        return (gather,), (), (gradient,)
    if not d.sp:
        reduced = collective(f"{name}_a_all_reduce", "all_reduce", inner, F)
        again = collective(f"{name}_a_grad_all_reduce", "all_reduce", inner, I)
        return (reduced,), (collective(f"{name}_b_gather", "all_gather", outer, F),), (again,)
    scatter = collective(f"{name}_a_reduce_scatter", "reduce_scatter", inner, F)
    exchange = collective(f"{name}_b_exchange", "all_to_all", outer / d.tp, F)
    back = collective(f"{name}_b_grad_exchange", "all_to_all", outer / d.tp, I)
    return (scatter, gather), (exchange,), (back, gradient)


def only_behind_adapters(parts: Sequence[Operator]) -> tuple[Operator, ...]:
    """Parts of the model's first layer: up to the first adapter nothing needs a gradient, nor keeps anything for it.

    With nothing kept before it, a compiler cannot make the adapter's input again and keeps that.
    """
    first = next((i for i, p in enumerate(parts) if p.params), len(parts))
    out = [replace(p, backward=(), saved=(), backward_bytes=0.0) for p in parts[:first]]
    for p in parts[first : first + 1]:
        out.append(replace(p, backward=p.adapters_alone, saved=(*p.unsaved_input, *p.saved)))
    return (*out, *parts[first + 1 :])
