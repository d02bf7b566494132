"""Linear layers and their tensor parallelism: column, row, or plain, with and without sequence parallelism.

Shoeybi et al. 2019 (Megatron-LM) section 3; Korthikanti et al. 2022 section 4.2.2 for sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, Item, NeededBy, Phase, Program, Saved, SumShape, TensorRole, Wait
from sim.models.copied_chunks import copies_chunks, gather_chunks, scatter_chunks, weight_gradient_copies
from sim.models.dims import Dims, ceil_div
from sim.models.lora import with_adapters
from sim.models.operators import (
    F,
    I,
    Linear,
    Operator,
    W,
    collective,
    gemm,
    memory_op,
    weight_gradient,
    weight_gradient_bytes,
)
from sim.models.precision.casts import input_gradient_casts, kept_copies, operand_casts, reads_wide
from sim.models.precision.quantizing import (
    casts_again,
    gather_casts,
    gathered_element_bytes,
    gathers_quantized,
    gradient_casts,
    input_casts,
    saved_element_bytes,
    transposes,
    weight_casts,
    weight_casts_again,
)
from sim.models.precision.swizzles import linear_swizzles

MLP_TARGETS = ("mlp_up", "mlp_down")
CHUNKS = 4  # of a chunked overlap, as Transformer Engine's userbuffers split a matmul on up to 8 ranks


def linear(d: Dims, spec: Linear) -> Operator:
    """The layer with its weight and bias gradients, casts to 8-bit formats and tensor-parallel communication.

    Column: forward nothing (an all-gather of the input with sequence parallelism), backward an all-reduce of
    the input's gradient (a reduce-scatter, and the input gathered again for the weight gradient). Row:
    forward an all-reduce (a reduce-scatter), backward nothing (an all-gather of the output's gradient).
    """
    split = d.tp > 1 and spec.mode != "plain"
    column_sp = split and d.sp and spec.mode == "column"
    input_rows = ceil_div(spec.rows, d.tp) if column_sp and not d.framework.keeps_gathered else spec.rows
    kept = d.act_bytes if spec.original else saved_element_bytes(d)
    size = input_rows * spec.k * kept * kept_copies(d, spec)
    saved = Saved(f"{spec.name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT)
    forward = _column_forward(d, spec) if spec.mode != "row" else _row_forward(d, spec)
    backward = _column_backward(d, spec) if spec.mode != "row" else _row_backward(d, spec)
    forward += _biases_apart(d, spec)
    bias = spec.n if spec.bias else 0
    gathered = spec.rows * (spec.k if spec.mode == "column" else spec.n) if split and d.sp else 0
    gathered = 0 if d.partial_rows and spec.mode == "row" else gathered
    ordered = bool(in_order(d, "", gathered, F, gathered=True))  # beside what arrived
    gradients = (spec.rows * (spec.k + spec.n) + gathered) * d.act_bytes
    if reads_wide(d, spec):  # the input's gradient in fp32, beside it those before it
        gradients += spec.rows * spec.k * FP32_BYTES * min(2, len(spec.outs))
    part = Operator(
        spec.name,
        forward,
        backward,
        (saved,) if spec.save_input else (),
        params=spec.k * spec.n + bias,
        weights=tuple((n, spec.k) for n in spec.outs),
        tensors=(*(n * spec.k for n in spec.outs), *(spec.outs if spec.bias else ())),
        shared=_shared(d, spec),
        forward_bytes=(1 + ordered) * gathered * gathered_element_bytes(d),
        backward_bytes=gradients + weight_gradient_bytes(d, spec.k * max(spec.outs)),
        module=spec.module,
    )
    return part if d.lora is None else with_adapters(d, spec, part)


def _shared(d: Dims, spec: Linear) -> tuple[int, ...]:
    """Elements of each tensor that all ranks of tp hold whole, as `Block.shared` has them: a matrix that no rank has
    only a part of, and biases behind a sum over tp, of sequence parallelism's own tokens."""
    if not d.sums_shared_once or spec.mode == "column" or d.lora is not None:
        return ()
    whole = tuple(n * spec.k for n in spec.outs) if spec.mode == "plain" else ()
    return (*whole, *(spec.outs if spec.bias else ()))


def _biases_apart(d: Dims, spec: Linear) -> Program:
    """The sum of each result and its bias, which torch does not vectorize, where the model's code makes it."""
    if not spec.bias or not d.code.adds_biases_apart:
        return ()
    sizes = [(spec.out_name(i), spec.rows * n) for i, n in enumerate(spec.outs)]
    sums = (memory_op(f"{name}_bias", F, "elementwise", n, 2 * d.act_bytes * n, d.act) for name, n in sizes)
    return tuple(replace(i, single_elements=float(i.shape[0])) for i in sums)


def _gemms(d: Dims, spec: Linear, rows: int, chunk: str = "") -> Program:
    return tuple(
        gemm(spec.out_name(i) + chunk, F, rows, n, spec.k, d.linear, out_bytes=rows * n * d.act_bytes, kernel=d.matmul)
        for i, n in enumerate(spec.outs)
    )


def _chunks(d: Dims, spec: Linear) -> int:
    if d.framework.sequence.copied_chunks and not d.sp:  # torch cuts up no all-reduce
        return 1
    return CHUNKS if d.tp_overlap == "full" and d.tp > 1 and spec.mode != "plain" and spec.rows >= CHUNKS else 1


def _within_call(d: Dims, items: Program, sms: int | None = None) -> Program:
    """Items as the library's call for a matmul issues them after its first kernel; its messages take `sms`."""
    if not d.overlaps_in_library:
        return items
    made = (replace(i, sms=sms) if isinstance(i, Comm) else i for i in items)
    return tuple(
        replace(i, within_call=True) if isinstance(i, Comm) or (isinstance(i, Compute) and i.kind == "gemm") else i
        for i in made
    )


def _library_sms(d: Dims, spec: Linear) -> tuple[int | None, int | None, int | None]:
    """Multiprocessors of the library's messages beside the input gradient, the weight gradient, and in a row layer."""
    buffers = d.framework.userbuffers
    if buffers is None:
        return None, None, None
    return buffers.mlp if spec.target in MLP_TARGETS else buffers.attention


def _scatters_round_ring(d: Dims) -> bool:
    """Tell whether the library brings a row layer's result home round a ring (`UserBuffers`)."""
    buffers = d.framework.userbuffers
    low = d.recipe is not None and d.lora is None
    return d.overlaps_in_library and low and buffers is not None and buffers.rings_of_low_precision


def _gather_chunks(d: Dims, spec: Linear) -> int:
    """A gather is cut up with the matmul where it brings the matmul's own operand. What is quantized only after it has
    arrived comes whole: torch's async tensor parallelism looks for a matmul that reads what was gathered
    (torch/_inductor/fx_passes/micro_pipeline_tp.py: `find_all_gather_patterns`)."""
    return _chunks(d, spec) if _overlaps_gathers(d) else 1


def _overlaps_gathers(d: Dims) -> bool:
    return d.tp_overlap != "none" and (d.recipe is None or gathers_quantized(d))


def _starts_with_own_rows(d: Dims) -> bool:
    """Tell whether a matmul of gathered rows does its own while the others arrive: nothing quantizes the whole
    first."""
    return d.framework.starts_with_own_rows and d.tp_overlap == "wgrad" and d.recipe is None


def _own_and_others(d: Dims, rows: int) -> list[tuple[str, int]]:
    """Parts of a matmul over gathered rows: its own, and those before and after them (of two ranks, one of both)."""
    own = ceil_div(rows, d.tp)
    others = rows - own
    before = others // 2 if d.tp > 2 else others
    return [(f"_{name}", n) for name, n in (("own", own), ("before", before), ("after", others - before)) if n]


def _over_gathered(
    d: Dims,
    spec: Linear,
    phase: Phase,
    name: str,
    casts: tuple[Program, Program],
    size: float,
    product: Callable[[Dims, Linear, int, str], Program],
) -> list[Item]:
    """Rows gathered under sequence parallelism, and the matmuls that read them: after the gather, chunk by chunk beside
    it, or with the rank's own rows beside it. `casts`: of the rank's own rows before the gather, of all after it.

    `overlaps_in_library`: the rank's own rows first, then those of each rank before it in a ring, which its neighbour
    passes on meanwhile (Transformer Engine, comm_gemm_overlap.h: CommOverlapP2PBase, split_overlap_ag)."""
    own, whole = casts
    chunks = 1 if phase is F and spec.target in d.waiting_layers else _gather_chunks(d, spec)
    if chunks == 1 and _starts_with_own_rows(d):
        gather = collective(name, "all_gather", size, phase, name)
        mine, *others = (product(d, spec, rows, part) for part, rows in _own_and_others(d, spec.rows))
        return [*own, gather, *mine, Wait(name, phase), *whole, *chain.from_iterable(others)]
    if copies_chunks(d) and chunks > 1:
        return [*own, *whole, *gather_chunks(d, spec.rows, phase, name, size, partial(product, d, spec))]
    if chunks == 1:
        arrived = (collective(name, "all_gather", size, phase), *in_order(d, name, size, phase, gathered=True))
        return [*own, *arrived, *whole, *product(d, spec, spec.rows, "")]
    ring = d.overlaps_in_library
    parts = d.tp if ring else chunks
    kind = "send_recv" if ring else "all_gather"
    names = [f"{name}{c}" for c in range(parts)]
    sent = tuple(collective(x, kind, size / parts, phase, x) for x in names[ring:])
    items: list[Item] = [*own, *_within_call(d, sent, sms=0), *whole]
    for c, handle in enumerate(names):
        made = product(d, spec, ceil_div(spec.rows, parts), f"_chunk{c}")
        items += [] if ring and c == 0 else [Wait(handle, phase)]
        items += _within_call(d, made) if c else made
    return items


def _column_forward(d: Dims, spec: Linear) -> Program:
    cut = len(spec.outs) if spec.mode == "column" else 0
    weights = operand_casts(d, spec) + weight_casts(d, spec.name, spec.k * spec.n, cut)
    swizzled = linear_swizzles(d, spec, F)
    if d.tp == 1 or not d.sp or spec.mode == "plain":
        cast = input_casts(d, spec.name, spec.rows * spec.k, spec.mode == "column" and spec.joins_norm, spec.original)
        return cast + weights + swizzled + _gemms(d, spec, spec.rows)
    own, whole = gather_casts(d, spec.name, F, spec.rows * spec.k, normed=spec.joins_norm)
    size = spec.rows * spec.k * gathered_element_bytes(d)
    # A message about weights' scales would wait for the gather that matmuls overlap with.
    agreed = d.recipe is not None and d.recipe.agrees_everywhere
    parts = (own + weights, whole) if agreed else (own, whole + weights + swizzled)
    return tuple(_over_gathered(d, spec, F, f"{spec.name}_gather", parts, size, _gemms))


def _row_forward(d: Dims, spec: Linear) -> Program:
    before = input_casts(d, spec.name, spec.rows * spec.k, False, spec.original, cut_rows=spec.rows)
    before += weight_casts(d, spec.name, spec.k * spec.n, len(spec.outs), cut_rows=spec.n)
    before = operand_casts(d, spec) + before + linear_swizzles(d, spec, F)
    if d.tp == 1 or d.partial_rows:
        return before + _gemms(d, spec, spec.rows)
    kind = "reduce_scatter" if d.sp else "all_reduce"
    size = spec.rows * spec.n * d.act_bytes
    chunks = _chunks(d, spec)
    if chunks == 1:
        made = (*_gemms(d, spec, spec.rows), *in_order(d, spec.name, size, F))
        return (*before, *made, collective(f"{spec.name}_{kind}", kind, size, F))
    if copies_chunks(d):
        return (*before, *scatter_chunks(d, spec.rows, F, f"{spec.name}_{kind}", size, partial(_gemms, d, spec)))
    if _scatters_round_ring(d):
        return (*before, *_row_ring(d, spec, size))
    items: list[Item] = list(before)
    names = [f"{spec.name}_{kind}{c}" for c in range(chunks)]
    for c, name in enumerate(names):
        chunk = _gemms(d, spec, ceil_div(spec.rows, chunks), f"_chunk{c}")
        items += _within_call(d, chunk) if c else chunk
        items += _within_call(d, (collective(name, kind, size / chunks, F, name),), _library_sms(d, spec)[2])
    return (*items, *(Wait(name, F) for name in names))


def _row_ring(d: Dims, spec: Linear, size: float) -> Program:
    """A row layer's matmul, whose result of `size` bytes each other rank gets of its rows; its own come last, and a
    kernel sums what arrived."""
    items: list[Item] = []
    names = [f"{spec.name}_scatter{c}" for c in range(d.tp - 1)]
    for c in range(d.tp):
        chunk = _gemms(d, spec, ceil_div(spec.rows, d.tp), f"_chunk{c}")
        items += _within_call(d, chunk) if c else chunk
        items += _within_call(d, tuple(collective(n, "send_recv", size / d.tp, F, n) for n in names[c : c + 1]), 0)
    summed = memory_op(f"{spec.name}_sum", F, "elementwise", size / d.act_bytes, size + size / d.tp, d.act)
    return (*items, *(Wait(name, F) for name in names), summed)


def _input_gradient(d: Dims, spec: Linear, rows: int, chunk: str = "", only: int | None = None) -> Program:
    """`dX = dY W`, summed over the matmuls that share the input; `only`: the part of one of them."""
    items: list[Item] = []
    written = rows * spec.k * d.act_bytes
    for i, n in enumerate(spec.outs):
        if only not in (None, i):
            continue
        name = f"{spec.out_name(i)}_dgrad{chunk}"
        items.append(gemm(name, I, rows, spec.k, n, d.linear, out_bytes=written, kernel=d.matmul))
        items += input_gradient_casts(d, spec, i, rows)
    return tuple(items)


def _weight_gradients(d: Dims, spec: Linear) -> Program:
    items: list[Item] = []
    for i, n in enumerate(spec.outs):
        items += weight_gradient(d, f"{spec.out_name(i)}_wgrad", spec.rows, spec.k, n)
        if spec.bias:
            elements = (ceil_div(spec.rows, d.tp) if spec.mode == "row" and d.sp else spec.rows) * n
            moved, kernels = elements * d.act_bytes, 1 + d.autocast  # the sum, and its cast to fp32
            summed = memory_op(f"{spec.out_name(i)}_bias_grad", W, "elementwise", elements, moved, d.act, kernels)
            # Transformer Engine's matmul sums a bias's gradient, too (BGRADB).
            items.append(replace(summed, sums=SumShape(elements / n, n) if d.framework.plain_host else None))
    return tuple(items)


def _column_backward(d: Dims, spec: Linear) -> Program:
    """Input gradient, its reduction, weight gradient; what runs beside what is `tp_overlap`.

    Under sequence parallelism the input is gathered again, unless the framework kept it whole.
    """
    cut = len(spec.outs) if spec.mode == "column" else 0
    cast = gradient_casts(d, spec.name, spec.rows * spec.n, cut, spec.rows)
    cast += weight_casts_again(d, spec.name, spec.k * spec.n, cut, spec.k)
    cast += linear_swizzles(d, spec, I)
    again = casts_again(d, spec.name, spec.rows * spec.k, spec.original)
    if d.tp == 1 or spec.mode == "plain":
        again += linear_swizzles(d, spec, W)
        return cast + _input_gradient(d, spec, spec.rows) + again + _weight_gradients(d, spec)
    again += transposes(d, spec.name, spec.rows * spec.k) if d.sp else ()
    again += weight_gradient_copies(d, spec.name, spec.rows, spec.k)
    again += linear_swizzles(d, spec, W)
    regathers = d.sp and not d.framework.keeps_gathered
    size, size_again = spec.rows * spec.k * d.act_bytes, spec.rows * spec.k * gathered_element_bytes(d)
    kind = "reduce_scatter" if d.sp else "all_reduce"
    name, regather = f"{spec.name}_dgrad_{kind}", f"{spec.name}_regather"
    apart = d.framework.sequence.sums_apart and len(spec.outs) > 1
    blocking = d.tp_overlap == "none" or apart or (d.framework.sequence.copied_chunks and not d.sp)
    items: list[Item] = []
    beside_input, beside_weights, _ = _library_sms(d, spec)
    early = _overlaps_gathers(d)
    if regathers and early:
        items += _within_call(d, (collective(regather, "all_gather", size_again, W, regather),), beside_input)
    items += cast
    if copies_chunks(d) and not apart:
        items += scatter_chunks(d, spec.rows, I, name, size, partial(_input_gradient, d, spec))
        return (*items, *again, *_weight_gradients(d, spec))
    each = d.framework.reduces_each_input and not d.sp and len(spec.outs) > 1
    chunks = 1 if apart or each or d.overlaps_in_library else _chunks(d, spec)
    parts = _gradient_of_each(d, spec) if each else _gradient_by_rows(d, spec, name, chunks)
    names = [handle for handle, _ in parts]
    for handle, made in parts:
        items += made
        sent = collective(handle, kind, size / chunks, I, "" if blocking else handle)
        items += _within_call(d, (sent,), beside_weights)
    if regathers:
        items.append(collective(regather, "all_gather", size_again, W) if not early else Wait(regather, W))
    items += (*again, *_weight_gradients(d, spec))
    return tuple(items) if blocking else (*items, *(Wait(h, I) for h in names))


def in_order(d: Dims, name: str, size: float, phase: Phase, gathered: bool = False) -> Program:
    """The copy of a tensor of `size` bytes around a message of sequence parallelism (`SequenceMessages.orders`)."""
    of_framework = d.framework.sequence
    viewed = gathered and of_framework.views_one and d.batch == 1
    if not of_framework.orders or not d.sp or d.tp == 1 or viewed:
        return ()
    return (memory_op(f"{name}_order", phase, "copy", size / d.act_bytes, 2 * size, d.act),)


def _gradient_of_each(d: Dims, spec: Linear) -> list[tuple[str, Program]]:
    """The part of the input's gradient of each matmul that shares the input, by the name of its message."""
    found = [(i, f"{spec.out_name(i)}_dgrad_all_reduce") for i in range(len(spec.outs))]
    return [(handle, _input_gradient(d, spec, spec.rows, only=i)) for i, handle in found]


def _gradient_by_rows(d: Dims, spec: Linear, name: str, chunks: int) -> list[tuple[str, Program]]:
    """Chunks of the input's gradient, by the names of their messages."""
    if chunks == 1:
        alone = in_order(d, name, spec.rows * spec.k * d.act_bytes, I) if len(spec.outs) == 1 else ()
        return [(name, _input_gradient(d, spec, spec.rows) + alone)]
    rows = ceil_div(spec.rows, chunks)
    return [(f"{name}{c}", _input_gradient(d, spec, rows, f"_chunk{c}")) for c in range(chunks)]


def _row_backward(d: Dims, spec: Linear) -> Program:
    weights = weight_casts_again(d, spec.name, spec.k * spec.n) + linear_swizzles(d, spec, I)
    last = casts_again(d, spec.name, spec.rows * spec.k, spec.original)
    if d.tp == 1 or not d.sp or d.partial_rows:
        cast = gradient_casts(d, spec.name, spec.rows * spec.n)
        last += linear_swizzles(d, spec, W)
        return cast + weights + _input_gradient(d, spec, spec.rows) + last + _weight_gradients(d, spec)
    own, whole = gather_casts(d, f"{spec.name}_grad", I, spec.rows * spec.n)
    last += casts_again(d, f"{spec.name}_grad", spec.rows * spec.n)
    last += transposes(d, f"{spec.name}_grad", spec.rows * spec.n)
    last += weight_gradient_copies(d, f"{spec.name}_grad", spec.rows, spec.n)
    last += linear_swizzles(d, spec, W) + _weight_gradients(d, spec)
    size = spec.rows * spec.n * gathered_element_bytes(d)
    casts = (own, whole + weights)
    return (*_over_gathered(d, spec, I, f"{spec.name}_grad_gather", casts, size, _input_gradient), *last)
