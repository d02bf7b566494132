"""Async tensor parallelism of torch: chunks of a matmul, and copies of a rank's rows by the GPUs' copy engines.

torch/distributed/_symmetric_memory/__init__.py: `_pipelined_multi_all_gather_and_consume` copies a rank's rows into a
buffer that the others read, multiplies its own, then copies and multiplies the rows of each other rank.
`_pipelined_produce_and_all2all` multiplies the rows of each other rank, which copies the result from there, and its own
last; one kernel sums what arrived (`_fused_matmul_reduce_scatter_impl`). Work alternates between two streams, so the
chunks of two ranks are taken for one matmul. Left out: barriers, of a few microseconds each; the copies of a layer's
incoming gradient and of attention's result to the order in which chunks are read, of a rank's part alone.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from sim.core.program import Comm, Compute, Item, Phase, Program, Wait
from sim.models.dims import Dims, ceil_div
from sim.models.operators import collective, memory_op

STREAMS = 2
Product = Callable[[int, str], Program]  # (number of rows, ending of the names) -> the matmuls over these rows


def copies_chunks(d: Dims) -> bool:
    """Tell whether matmuls and messages of sequence parallelism are such chunks."""
    return d.tp_overlap == "full" and d.sp and d.tp > 1 and d.framework.sequence.copied_chunks


def weight_gradient_copies(d: Dims, name: str, rows: int, width: int) -> Program:
    """The copy of gathered rows for the weight gradient, which reads [batch·seq, hidden], where chunks have left
    [seq, batch, hidden]. Of one sequence these are the same; a recipe's transposing kernel reads either.

    `_fused_all_gather_matmul_impl` returns `unflatten(A_flat)`. Code that Inductor of torch 2.6 and 2.14 generated on a
    CPU for two sequences has a kernel for each of the four gathered tensors of a Llama layer; for one, that of 2.6 has
    none.
    """
    if not copies_chunks(d) or d.batch == 1 or d.recipe is not None:
        return ()
    return (memory_op(f"{name}_order", Phase.WEIGHT_GRAD, "copy", rows * width, 2 * rows * width * d.act_bytes, d.act),)


def _others(ranks: int) -> list[int]:
    """The other ranks in groups whose chunks run together.

    >>> _others(8), _others(2)
    ([2, 2, 2, 1], [1])
    """
    return [min(STREAMS, ranks - 1 - at) for at in range(0, ranks - 1, STREAMS)]


def _message(d: Dims, name: str, kind: str, size: float, ranks: int, phase: Phase) -> Comm:
    """The copies of the rows of `ranks` ranks; the rows of all ranks have `size` bytes."""
    made = collective(name, kind, size * ranks / (d.tp - 1), phase, name)
    return replace(made, within_call=True, sms=0)


def _chunk(product: Product, rows: int, ranks: int, place: int) -> Program:
    """The matmuls of `ranks` ranks, each over `rows` rows; a Python loop issues them, without autograd."""
    made = product(rows * ranks, f"_chunk{place}")
    return tuple(replace(i, within_call=True) if place and isinstance(i, Compute) else i for i in made)


def gather_chunks(d: Dims, rows: int, phase: Phase, name: str, size: float, product: Product) -> list[Item]:
    """A gather of `rows` rows (`size` bytes) and the matmul over them, chunk by chunk.

    The rank's own rows are copied twice: into the buffer that the other ranks read, and beside the rows that arrive,
    which are kept for the weight gradients.
    """
    own, groups = ceil_div(rows, d.tp), _others(d.tp)
    shared = memory_op(f"{name}_shared", phase, "copy", size / d.tp / d.act_bytes, 4 * size / d.tp, d.act, 2)
    names = [f"{name}{c}" for c in range(1, len(groups) + 1)]
    sent = (_message(d, x, "all_gather", size, ranks, phase) for x, ranks in zip(names, groups, strict=True))
    items: list[Item] = [replace(shared, one_call=True), *sent, *_chunk(product, own, 1, 0)]
    for place, (handle, ranks) in enumerate(zip(names, groups, strict=True), 1):
        items += [Wait(handle, phase), *_chunk(product, own, ranks, place)]
    return items


def scatter_chunks(d: Dims, rows: int, phase: Phase, name: str, size: float, product: Product) -> list[Item]:
    """A matmul of `rows`, whose result of `size` bytes is summed over ranks; each keeps the sum of its own rows."""
    own, groups, items = ceil_div(rows, d.tp), _others(d.tp), list[Item]()
    names = [f"{name}{c}" for c in range(len(groups))]
    for place, (handle, ranks) in enumerate(zip(names, groups, strict=True)):
        items += _chunk(product, own, ranks, place)
        items.append(_message(d, handle, "reduce_scatter", size, ranks, phase))
    items += [*_chunk(product, own, 1, len(groups)), *(Wait(handle, phase) for handle in names)]
    moved = size + size / d.tp
    return [*items, memory_op(f"{name}_sum", phase, "elementwise", size / d.act_bytes, moved, d.act)]
