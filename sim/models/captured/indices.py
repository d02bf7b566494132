"""Bytes and small kernels of operators that take rows by index, place or mask, as torch runs them on a GPU."""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.bytes import written_bytes

PLACE_BYTES = 8  # an int64
FEW_INDICES = 3072  # up to which an embedding's gradient is summed without a sort (Embedding.cu)
RADIX_BITS = 8  # of a key that one pass of a sort handles (cub's DeviceRadixSort)
SORT_STARTS = 2  # cub's histogram and prefix sums before the passes
MASK_KERNELS = 5  # of `nonzero` (Nonzero.cu)


ACCUMULATES = ("aten.index_put_", "aten._index_put_impl_", "aten.index_put")


def accumulates(op: CapturedOperator) -> bool:
    """Tell whether values are added at their places, as autograd's gradient of an index does."""
    return op.phase == "backward" and op.name in ACCUMULATES


def taken_bytes(op: CapturedOperator) -> float:
    """Bytes of a lookup: what is taken out of the table, read and written, and the indices."""
    return 2 * written_bytes(op) + sum(x.bytes for x in op.inputs[1:])


def masked_scatter_bytes(op: CapturedOperator) -> float:
    """The mask's copy as large as the target and its running sum in int64, both read; the target and the values."""
    target, _, *values = op.inputs
    return (1 + 1 + 8 + 1 + 8) * target.elements + 2.0 * target.bytes + sum(x.bytes for x in values)


def _places(elements: int, dimensions: int, found: float) -> float:
    """Bytes of a mask, counted and read again to write flat places, and of places of each dimension made of these."""
    return 2.0 * elements + PLACE_BYTES * found * (1 if dimensions < 2 else 2 + dimensions)


def nonzero_bytes(op: CapturedOperator) -> float:
    """The mask is counted and read again; then places of each dimension."""
    x, dimensions = op.inputs[0], max(1, len(op.inputs[0].shape))
    return _places(x.bytes, dimensions, op.outputs[0].elements / dimensions)


def masked_select_bytes(op: CapturedOperator) -> float:
    """The mask's copy where it is expanded; places, by which values are chosen."""
    (x, mask), chosen = op.inputs[:2], op.outputs[0]
    dimensions = len(x.shape)
    copied = 0.0 if mask.shape == x.shape and not mask.strides else float(x.elements)
    places = _places(x.elements, dimensions, chosen.elements)
    return copied + places + PLACE_BYTES * dimensions * chosen.elements + 2.0 * written_bytes(op)


def indexed_bytes(op: CapturedOperator) -> float:
    """Return the bytes that an indexed look-up reads: the rows taken, the indices, and of a boolean mask the places of
    its true entries, one for each row taken."""
    masks = [x for x in op.inputs[1:] if x.dtype == "bool"]
    row = math.prod(op.inputs[0].shape[sum(max(1, len(x.shape)) for x in masks) :])
    found = op.outputs[0].elements / max(1, row)
    return taken_bytes(op) + sum(_places(x.bytes, max(1, len(x.shape)), found) for x in masks)


def rows_bytes(op: CapturedOperator) -> float:
    """A row of the first input for each index; all other inputs."""
    table, indices, *others = op.inputs
    rows = indices.elements * table.bytes / max(1, table.shape[0])
    return rows + sum(x.bytes for x in (indices, *others))


def _sorts_indices(op: CapturedOperator) -> bool:
    """A table's gradient sorts its indices if they are many; that of bags always, but not where maxima have places."""
    grad, indices, *of_bags = op.inputs
    if of_bags:
        return all(x.shape != grad.shape for x in of_bags)
    return indices.elements > FEW_INDICES


def embedding_gradient_bytes(op: CapturedOperator) -> float:
    """Zeros; the chosen rows, read; with a sort their sums in fp32, written and read; the table's rows, written."""
    grad, indices, table = op.inputs[0], op.inputs[1], op.outputs[0]
    elements = indices.elements * table.shape[-1] if _sorts_indices(op) else grad.elements
    rows = elements * grad.bytes / max(1, grad.elements)
    sums = 2.0 * 4.0 * elements if _sorts_indices(op) else 0.0
    return written_bytes(op) + rows + sums + min(rows, written_bytes(op))


def embedding_sorts(op: CapturedOperator) -> int:
    """Return the kernels over indices: their range, their sort, what begins where (EmbeddingBackwardKernel.cu)."""
    return 1 + SORT_STARTS + passes(op.inputs[1]) + 7 if _sorts_indices(op) else 0


def embedding_passes(op: CapturedOperator) -> int:
    """Return the passes of the sort of a table's indices."""
    return passes(op.inputs[1]) if _sorts_indices(op) else 0


def index_sorts(op: CapturedOperator) -> int:
    """Return the small kernels of an accumulation, which autograd's gradient of an index is.

    Each index: its remainder by the dimension's size, and a product with the stride, summed; then a division, a range,
    and a sort by as many bits as the rows have (Indexing.cu, index_put_with_sort_kernel).
    """
    if not accumulates(op):
        return 0
    indices = max(1, len(op.inputs) - 2)
    rows = math.prod(_indexed_sizes(op))
    return 3 * indices - 1 + 2 + SORT_STARTS + math.ceil(max(1, rows.bit_length()) / RADIX_BITS)


def _indexed_sizes(op: CapturedOperator) -> tuple[int, ...]:
    """Return the sizes of the dimensions that an accumulation's indices choose from: as the shape of its values says.

    A full slice before an index (`x[:, places]`, `x[None, places]`) is no tensor, and so not in the program. Indices
    with such a slice between them count as the first dimensions.

    >>> from sim.inputs.program_file import Tensor
    >>> x, places, values = Tensor("fp32", (1, 64, 8), ()), Tensor("int64", (16,), ()), Tensor("fp32", (1, 16, 8), ())
    >>> _indexed_sizes(CapturedOperator("aten.index_put", "backward", "", (x, places, values), (x,), 1, False))
    (64,)
    """
    target, *indices, values = op.inputs
    sizes, count = target.shape, len(indices)
    chosen = _broadcast([x.shape for x in indices])
    for first in range(len(sizes) - count + 1):
        if (*sizes[:first], *chosen, *sizes[first + count :]) == values.shape:
            return sizes[first : first + count]
    return sizes[: max(1, count)]


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that tensors of these shapes have together."""
    longest = max(map(len, shapes), default=0)
    return tuple(max(sizes) for sizes in zip(*((1,) * (longest - len(s)) + s for s in shapes), strict=True))


def rows_in_turn(op: CapturedOperator) -> float:
    """Return the rows that a gradient of an index adds to one row of its result, one after another, in the mean.

    A warp adds all rows of one index in a loop (Indexing.cu, indexing_backward_kernel).
    """
    if not accumulates(op):
        return 0.0
    indices = op.inputs[1:-1]
    if not indices or any(x.dtype == "bool" for x in indices):
        return 0.0
    return max(x.elements for x in indices) / max(1, math.prod(_indexed_sizes(op)))


def passes(x: Tensor) -> int:
    return max(1, 8 * x.bytes // max(1, x.elements) // RADIX_BITS)


def unique_bytes(op: CapturedOperator) -> float:
    """Values and their places go through each pass of a sort; neighbours are compared, and results written."""
    x = op.inputs[0]
    return 2.0 * (x.bytes + PLACE_BYTES * x.elements) * passes(x) + 2.0 * x.bytes + written_bytes(op)


def unique_kernels(op: CapturedOperator) -> int:
    """Return the small kernels: of the sort, of differences, their sum, and what each of three results needs."""
    return SORT_STARTS + passes(op.inputs[0]) + 5
