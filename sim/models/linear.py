"""Linear layers and their tensor parallelism: column, row, or plain, with and without sequence parallelism.

Shoeybi et al. 2019 (Megatron-LM) section 3; Korthikanti et al. 2022 section 4.2.2 for sequence parallelism.
"""

from __future__ import annotations

from sim.core.program import Item, NeededBy, Phase, Program, Saved, TensorRole, Wait
from sim.models.dims import Dims, ceil_div
from sim.models.lora import with_adapters
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

CHUNKS = 4  # of a chunked overlap, as Transformer Engine's userbuffers split a matmul on up to 8 ranks


def linear(d: Dims, spec: Linear) -> Operator:
    """The layer with its weight and bias gradients, casts to 8-bit formats and tensor-parallel communication.

    Column: forward nothing (an all-gather of the input with sequence parallelism), backward an all-reduce of
    the input's gradient (a reduce-scatter, and the input gathered again for the weight gradient). Row:
    forward an all-reduce (a reduce-scatter), backward nothing (an all-gather of the output's gradient).
    """
    split = d.tp > 1 and spec.mode != "plain"
    column_sp = split and d.sp and spec.mode == "column"
    input_rows = ceil_div(spec.rows, d.tp) if column_sp else spec.rows
    size = input_rows * spec.k * saved_element_bytes(d)
    saved = Saved(spec.part, f"{spec.name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT)
    forward = _column_forward(d, spec) if spec.mode != "row" else _row_forward(d, spec)
    backward = _column_backward(d, spec) if spec.mode != "row" else _row_backward(d, spec)
    bias = spec.n if spec.bias else 0
    gathered = spec.rows * (spec.k if spec.mode == "column" else spec.n) if split and d.sp else 0
    gradients = (spec.rows * (spec.k + spec.n) + gathered) * d.act_bytes
    part = Operator(
        spec.name,
        forward,
        backward,
        (saved,) if spec.save_input else (),
        params=spec.k * spec.n + bias,
        weights=tuple((n, spec.k) for n in spec.outs),
        tensors=(*(n * spec.k for n in spec.outs), *(spec.outs if spec.bias else ())),
        forward_bytes=gathered * gathered_element_bytes(d),
        backward_bytes=gradients + weight_gradient_bytes(d, spec.k * max(spec.outs)),
    )
    return part if d.lora is None else with_adapters(d, spec, part)


def saved_element_bytes(d: Dims) -> float:
    """A linear layer keeps its input in the dtype its weight gradient reads (8 bits where matmuls do)."""
    return min(d.act_bytes, d.linear_bytes)


def gathered_element_bytes(d: Dims) -> float:
    """Of what sequence parallelism gathers. Transformer Engine quantizes before it gathers, whatever the format
    (`gather_along_first_dim` with a quantizer, transformer_engine/pytorch/distributed.py)."""
    return saved_element_bytes(d) if d.framework.quantizes_before_gather else d.act_bytes


def _gather_casts(d: Dims, name: str, phase: Phase, elements: int) -> tuple[Program, Program]:
    """What quantizes `elements` before they are gathered, a rank's own, and after."""
    if d.framework.quantizes_before_gather:
        return casts(d, name, phase, ceil_div(elements, d.tp)), ()
    return (), casts(d, name, phase, elements)


def casts(d: Dims, name: str, phase: Phase, elements: float, times: float = 1.0) -> Program:
    """Quantizing a 16-bit tensor for an 8- or 4-bit matmul: read once, written by rows and by columns.

    nvfp4 reads it once more before: beside a scale for 16 elements it has one for the tensor, of its largest value.
    `Dims.quantized_copies`: whether both are needed. `times` a micro-batch.
    """
    if not d.quantized:
        return ()
    reads, writes = 2 if d.linear == "nvfp4" else 1, d.quantized_copies
    moved = elements * (reads * d.act_bytes + writes * d.linear_bytes) * times
    return (memory_op(f"{name}_cast", phase, "cast", elements, moved, d.act, reads),)


def _gemms(d: Dims, spec: Linear, rows: int, chunk: str = "") -> Program:
    return tuple(
        gemm(spec.out_name(i) + chunk, F, rows, n, spec.k, d.linear, out_bytes=rows * n * d.act_bytes)
        for i, n in enumerate(spec.outs)
    )


def weight_casts(d: Dims, name: str, size: int) -> Program:
    """Weights are quantized once a step, in its first micro-batch: counted at 1/micro-batches in each.

    What ZeRO-3 gathers in 16 bits for each micro-batch is quantized as often; frozen weights never again.
    """
    if d.lora is not None:
        return ()
    return casts(d, f"{name}_weight", F, size, 1.0 / d.quantized_for)


def _chunks(d: Dims, spec: Linear) -> int:
    return CHUNKS if d.tp_overlap == "full" and d.tp > 1 and spec.mode != "plain" and spec.rows >= CHUNKS else 1


def _column_forward(d: Dims, spec: Linear) -> Program:
    weights = weight_casts(d, spec.name, spec.k * spec.n)
    if d.tp == 1 or not d.sp or spec.mode == "plain":
        return casts(d, spec.name, F, spec.rows * spec.k) + weights + _gemms(d, spec, spec.rows)
    own, whole = _gather_casts(d, spec.name, F, spec.rows * spec.k)
    size = spec.rows * spec.k * gathered_element_bytes(d)
    chunks = _chunks(d, spec)
    if chunks == 1:
        gather = collective(f"{spec.name}_gather", "all_gather", size, F)
        return (*own, gather, *whole, *weights, *_gemms(d, spec, spec.rows))
    names = [f"{spec.name}_gather{c}" for c in range(chunks)]
    items: list[Item] = [*own, *(collective(x, "all_gather", size / chunks, F, x) for x in names), *whole, *weights]
    for c, name in enumerate(names):
        items += (Wait(name, F), *_gemms(d, spec, ceil_div(spec.rows, chunks), f"_chunk{c}"))
    return tuple(items)


def _row_forward(d: Dims, spec: Linear) -> Program:
    before = casts(d, spec.name, F, spec.rows * spec.k) + weight_casts(d, spec.name, spec.k * spec.n)
    if d.tp == 1:
        return before + _gemms(d, spec, spec.rows)
    kind = "reduce_scatter" if d.sp else "all_reduce"
    size = spec.rows * spec.n * d.act_bytes
    chunks = _chunks(d, spec)
    if chunks == 1:
        return (*before, *_gemms(d, spec, spec.rows), collective(f"{spec.name}_{kind}", kind, size, F))
    items: list[Item] = list(before)
    names = [f"{spec.name}_{kind}{c}" for c in range(chunks)]
    for c, name in enumerate(names):
        items += _gemms(d, spec, ceil_div(spec.rows, chunks), f"_chunk{c}")
        items.append(collective(name, kind, size / chunks, F, name))
    return (*items, *(Wait(name, F) for name in names))


def _input_gradient(d: Dims, spec: Linear, rows: int, chunk: str = "") -> Program:
    """`dX = dY W`, summed over the matmuls that share the input."""
    items: list[Item] = []
    for i, n in enumerate(spec.outs):
        items.append(
            gemm(
                f"{spec.out_name(i)}_dgrad{chunk}",
                I,
                rows,
                spec.k,
                n,
                d.linear,
                out_bytes=rows * spec.k * d.act_bytes,
            )
        )
        if i:
            items.append(accumulate(d, f"{spec.name}_dgrad_sum{chunk}", rows * spec.k))
    return tuple(items)


def _weight_gradients(d: Dims, spec: Linear) -> Program:
    items: list[Item] = []
    for i, n in enumerate(spec.outs):
        items += weight_gradient(d, f"{spec.out_name(i)}_wgrad", spec.rows, spec.k, n)
        if spec.bias:
            elements = (ceil_div(spec.rows, d.tp) if spec.mode == "row" and d.sp else spec.rows) * n
            items.append(
                memory_op(f"{spec.out_name(i)}_bias_grad", W, "elementwise", elements, elements * d.act_bytes, d.act)
            )
    return tuple(items)


def _column_backward(d: Dims, spec: Linear) -> Program:
    """Input gradient, its reduction, weight gradient; what runs beside what is `tp_overlap`."""
    cast = casts(d, f"{spec.name}_grad", I, spec.rows * spec.n)
    if d.tp == 1 or spec.mode == "plain":
        return cast + _input_gradient(d, spec, spec.rows) + _weight_gradients(d, spec)
    size, size_again = spec.rows * spec.k * d.act_bytes, spec.rows * spec.k * gathered_element_bytes(d)
    kind = "reduce_scatter" if d.sp else "all_reduce"
    name, again = f"{spec.name}_dgrad_{kind}", f"{spec.name}_regather"
    blocking = d.tp_overlap == "none"
    items: list[Item] = []
    if d.sp and not blocking:
        items.append(collective(again, "all_gather", size_again, W, again))
    items += cast
    chunks = _chunks(d, spec)
    names = [name if chunks == 1 else f"{name}{c}" for c in range(chunks)]
    for c, handle in enumerate(names):
        items += _input_gradient(d, spec, ceil_div(spec.rows, chunks), "" if chunks == 1 else f"_chunk{c}")
        items.append(collective(handle, kind, size / chunks, I, "" if blocking else handle))
    if d.sp:
        items.append(collective(again, "all_gather", size_again, W) if blocking else Wait(again, W))
    items += _weight_gradients(d, spec)
    return tuple(items) if blocking else (*items, *(Wait(h, I) for h in names))


def _row_backward(d: Dims, spec: Linear) -> Program:
    if d.tp == 1 or not d.sp:
        cast = casts(d, f"{spec.name}_grad", I, spec.rows * spec.n)
        return cast + _input_gradient(d, spec, spec.rows) + _weight_gradients(d, spec)
    own, whole = _gather_casts(d, f"{spec.name}_grad", I, spec.rows * spec.n)
    size = spec.rows * spec.n * gathered_element_bytes(d)
    chunks = _chunks(d, spec)
    name = f"{spec.name}_grad_gather"
    if chunks == 1:
        gather = collective(name, "all_gather", size, I)
        return (*own, gather, *whole, *_input_gradient(d, spec, spec.rows), *_weight_gradients(d, spec))
    names = [f"{name}{c}" for c in range(chunks)]
    items: list[Item] = [*own, *(collective(x, "all_gather", size / chunks, I, x) for x in names), *whole]
    for c, handle in enumerate(names):
        items += (Wait(handle, I), *_input_gradient(d, spec, ceil_div(spec.rows, chunks), f"_chunk{c}"))
    return (*items, *_weight_gradients(d, spec))
