"""Clocks that torch's kernels take for their instructions, where these outlast the bytes.

`Clocks.shared` are of one multiprocessor, and all share them. `Clocks.alone` are of one thread block that works while
others wait or have ended. The constants are of torch 2.11 on an H200 at 1.98 GHz, read off single operators by shape
(scenarios/measured/gpu_kernels/h200.json); the training steps in scenarios/measured/gpu_programs_h200 showed which
operators need them. fp16 is taken to be as bf16 where torch runs its own kernels.

Batch norms (cuda/Normalization.cuh): one thread block adds up a channel, so few channels of many places leave
multiprocessors idle. Channels that lie last in memory are added up by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sim.core.operator_kinds import PLACE_CLOCKS
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.bytes import FOREACH
from sim.models.captured.layout import FLOATS, NARROW, has_channels_last
from sim.models.captured.ordering import chosen_clocks, scan_clocks, selected_clocks
from sim.models.captured.reductions import SUMS, sum_shape
from sim.models.captured.resized import RESIZED, resized_clocks
from sim.models.captured.softmaxes import SOFTMAXES, softmax_clocks
from sim.models.torch_kernels.latencies import LOAD_CLOCKS
from sim.models.torch_kernels.layer_norm_clocks import Clocks, layer_norm_clocks
from sim.models.torch_kernels.lists_of_tensors import FUNCTION_CLOCKS, NORM_CLOCKS
from sim.models.torch_kernels.softmax_rows import VECTOR_BYTES


class BatchNorm(NamedTuple):
    """Clocks of a batch norm for each element, and for each place of a channel and each image's channel."""

    element: float
    place: float = 0.0  # of the one block that adds up a channel
    plane: float = 0.0


# Forward and backward, of torch's own kernels (bf16) and of cuDNN's, measured in fp32. cuDNN's kernels of channels that
# lie last stream: 0.85 and 1.3 clocks are three and five sweeps of 4 bytes at 3.7 to 4 TB/s, so 16 bits take half.
OWN_CHANNELS_FIRST = {"forward": BatchNorm(0.85, 1.5, 130.0), "backward": BatchNorm(0.59, 3.27, 65.0)}
CUDNN_CHANNELS_FIRST = {"forward": BatchNorm(0.6, 0.85, 50.0), "backward": BatchNorm(0.5, 2.71, 65.0)}
OWN_CHANNELS_LAST = {"forward": BatchNorm(1.2), "backward": BatchNorm(1.0)}
CUDNN_CHANNELS_LAST = {"forward": BatchNorm(0.85), "backward": BatchNorm(1.3)}
# For each result of windows of 3 x 3, which were measured. A thread goes through the places of a result's window, and
# in the backward through the windows that a place lies in (DilatedMaxPool2d.cu).
POOL_CLOCKS, POOL_BACKWARD_CLOCKS, POOL_WINDOW = 4.2, 11.6, 9
GATHER_CLOCKS, SCATTER_ADD_CLOCKS = 1.0, 3.2  # an element along a row
# An element that is added at an index of an inner dimension: its place is computed (Indexing.cu: indexFuncLargeIndex).
INDEX_ADD_CLOCKS = PLACE_CLOCKS
ROLL_CLOCKS = 1.24
# A sum of neighbours, for each row: 64 numbers of a row take as long as 256. A warp adds up several shorter rows at
# once (Reduce.cuh: set_block_dimension).
SUM_CLOCKS, SUM_NARROW_CLOCKS, WARP = 60.0, 100.0, 32
STRIDED_SUM_CLOCKS = 1.8  # for each element, if they do not lie together (Mamba 2 and Falcon-H1)


def _direction(op: CapturedOperator) -> str:
    return "backward" if "backward" in op.name else "forward"


def _layer_norm(op: CapturedOperator) -> Clocks:
    """Return a layer norm's; its first input is the input, or the result's gradient.

    >>> x, w = Tensor("bf16", (32768, 1024), ()), Tensor("bf16", (1024,), ())
    >>> forward = CapturedOperator("aten.native_layer_norm", "forward", "", (x, w, w), (x,), 1, False)
    >>> round(_layer_norm(forward).shared / 132 / 1.98e3)  # microseconds on an H200; measured: 78.7
    78
    """
    x = op.inputs[0]
    weights = next((t for t in op.inputs[1:] if t.shape and t.shape == x.shape[-len(t.shape) :]), None)
    width = math.prod(weights.shape) if weights is not None and weights.shape != x.shape else x.shape[-1]
    backward = _direction(op) == "backward"
    found = layer_norm_clocks(x.elements / max(1, width), width, backward, x.dtype in NARROW)
    return found if len(op.outputs) > 1 else found._replace(alone=0.0)


def _batch_norm(op: CapturedOperator) -> Clocks:
    """Return a batch norm's; one that uses its running means has no sums, and two of a forward's three sweeps."""
    backward = _direction(op) == "backward"
    x = op.inputs[1] if backward else op.inputs[0]
    if len(x.shape) < 3:
        return Clocks()
    own, last = op.name.startswith("aten.native"), has_channels_last(x)
    if last:
        costs = (OWN_CHANNELS_LAST if own else CUDNN_CHANNELS_LAST)[_direction(op)]
    else:
        costs = (OWN_CHANNELS_FIRST if own else CUDNN_CHANNELS_FIRST)[_direction(op)]
    streamed = 0.5 if last and not own and x.dtype in NARROW else 1.0
    shared = x.elements * costs.element * streamed
    planes = x.shape[0] * x.shape[1] * costs.plane
    if not backward and len(op.outputs) > 1 and not op.outputs[1].elements:
        return Clocks(shared * 2 / 3 + planes)
    return Clocks(shared + planes, x.elements / x.shape[1] * costs.place)


def _sum(op: CapturedOperator) -> Clocks:
    """Return the clocks of a sum over neighbours, or over numbers that do not lie together."""
    shape = sum_shape(op)
    if shape is None or not shape.joined:
        return Clocks()  # a thread computes each place (`single_places`)
    if shape.stride > 1:
        return Clocks(shape.rows * shape.columns * STRIDED_SUM_CLOCKS)
    if not shape.neighbours:
        return Clocks()
    of_warp = min(WARP, 1 << int(shape.rows).bit_length() - 1) / WARP
    return Clocks(shape.columns * of_warp * (SUM_NARROW_CLOCKS if op.inputs[0].dtype in NARROW else SUM_CLOCKS))


def _top_k(op: CapturedOperator) -> Clocks:
    return chosen_clocks(op, op.inputs[0].dtype in NARROW)


def _selected(op: CapturedOperator) -> Clocks:
    return selected_clocks(op, op.inputs[0].dtype in NARROW) if len(op.outputs) > 1 else Clocks()


def _whole_rows(rows: Tensor, places: Tensor, width: int) -> bool:
    """Tell whether each place stands for a whole row of `width` elements, which a kernel moves 16 bytes at once.

    IndexKernelUtils.h of torch 2.14: fast_gather_kernel_eligible, fast_scatter_add_kernel_eligible. A row may have
    several dimensions, as a node's heads: torch's iterator joins those whose elements lie together.
    """
    expanded = len(places.shape) > 1 and places.strides == (1, *(0,) * (len(places.shape) - 1)) and not rows.strides
    row_bytes = _width(rows) * rows.bytes // max(1, rows.elements)
    return expanded and _width(rows) == _width(places) == width and row_bytes % VECTOR_BYTES == 0


def _width(x: Tensor) -> int:
    """Return the elements of a row, which all dimensions but the first make."""
    return math.prod(x.shape[1:])


def _gather(op: CapturedOperator) -> Clocks:
    """Return none for whole rows.

    >>> x, places = Tensor("bf16", (64, 256), ()), Tensor("int64", (32, 256), (1, 0))
    >>> def gather(places): return CapturedOperator("aten.gather", "forward", "", (x, places), (x,), 1, False)
    >>> _gather(gather(places)).shared, _gather(gather(places._replace(strides=()))).shared
    (0.0, 16384.0)
    """
    x, places = op.inputs[:2]
    whole = _whole_rows(x, places, _width(places))
    return Clocks() if whole else Clocks(op.outputs[0].elements * GATHER_CLOCKS)


def _scatter_add(op: CapturedOperator) -> Clocks:
    """Return none for whole rows of floats (IndexKernelUtils.h since torch 2.14: vectorized_scatter_add_kernel_launch).

    >>> nodes, rows = Tensor("bf16", (8, 64), ()), Tensor("bf16", (32, 64), ())
    >>> places = Tensor("int64", (32, 64), (1, 0))
    >>> def add(places):
    ...     return CapturedOperator("aten.scatter_add_", "forward", "", (nodes, places, rows), (nodes,), 1, False)
    >>> _scatter_add(add(places)).shared, round(_scatter_add(add(places._replace(strides=()))).shared)
    (0.0, 6554)
    """
    target, places, added = op.inputs[:3]
    whole = added.dtype in FLOATS and not target.strides and _whole_rows(added, places, _width(target))
    return Clocks() if whole else Clocks(added.elements * SCATTER_ADD_CLOCKS)


def _index_add(op: CapturedOperator) -> Clocks:
    """Return those of a scatter_add where rows are added, which torch 2.14 then calls (Indexing.cu:
    index_add_cuda_impl, along the first dimension).

    >>> nodes, rows, places = Tensor("bf16", (8, 64), ()), Tensor("bf16", (32, 64), ()), Tensor("int64", (32,), ())
    >>> def add(target, added):
    ...     return CapturedOperator("aten.index_add_", "forward", "", (target, places, added), (target,), 1, False)
    >>> columns = nodes._replace(shape=(64, 8)), rows._replace(shape=(64, 32))
    >>> _index_add(add(nodes, rows)).shared, round(_index_add(add(*columns)).shared)
    (0.0, 1434)
    """
    target, places, added = op.inputs[:3]
    if added.dtype not in FLOATS or added.shape != places.shape[:1] + target.shape[1:]:
        return Clocks(added.elements * INDEX_ADD_CLOCKS)
    rows, width = added.shape[0], added.elements // max(1, added.shape[0])
    flat = target._replace(shape=(target.shape[0], width)), added._replace(shape=(rows, width))
    return _scatter_add(op._replace(inputs=(flat[0], Tensor(places.dtype, (rows, width), (1, 0)), flat[1])))


def _frames_in_turn(place: int) -> Callable[[CapturedOperator], Clocks]:
    """Return the rule of sums over frames of speech, each of which waits for the one before (cuda/LossCTC.cu).

    The frames are the first dimension of the input at `place`. A thread reads one of its frame's probabilities.
    """
    return lambda op: Clocks(0.0, op.inputs[place].shape[0] * LOAD_CLOCKS)


def _pool(results: Tensor, window: int, clocks: float) -> Clocks:
    return Clocks(results.elements * clocks * (window or POOL_WINDOW) / POOL_WINDOW)


def _each_result(clocks: float) -> Callable[[CapturedOperator], Clocks]:
    return lambda op: Clocks(op.outputs[0].elements * clocks)


def _each_input(place: int, clocks: float) -> Callable[[CapturedOperator], Clocks]:
    return lambda op: Clocks(op.inputs[place].elements * clocks) if len(op.inputs) > place else Clocks()


def _foreach(op: CapturedOperator) -> Clocks:
    # Lists of a function's operands have as many elements; the outputs are those of one list, or of the results.
    reduces = op.name == "aten._foreach_norm"
    lists = op.inputs if reduces else op.outputs or op.inputs
    return Clocks(sum(x.elements for x in lists) * (NORM_CLOCKS if reduces else FUNCTION_CLOCKS))


_OF: dict[str, Callable[[CapturedOperator], Clocks]] = {
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm,
    **dict.fromkeys(
        [f"aten.{lib}_batch_norm{end}" for lib in ("native", "cudnn") for end in ("", "_backward")], _batch_norm
    ),
    "aten.max_pool2d_with_indices": lambda op: _pool(op.outputs[0], op.window, POOL_CLOCKS),
    "aten.max_pool2d_with_indices_backward": lambda op: _pool(op.inputs[0], op.window, POOL_BACKWARD_CLOCKS),
    "aten.gather": _gather,
    **dict.fromkeys(("aten.scatter_add", "aten.scatter_add_"), _scatter_add),
    # ScatterGatherKernel.cu: the kernel of a scatter_add of single elements, with other functions
    "aten.scatter_reduce": _each_input(-1, SCATTER_ADD_CLOCKS),
    "aten.scatter_reduce_": _each_input(-1, SCATTER_ADD_CLOCKS),
    "aten.scatter": _each_input(1, GATHER_CLOCKS),
    "aten.scatter_": _each_input(1, GATHER_CLOCKS),
    **dict.fromkeys(("aten.index_add", "aten.index_add_"), _index_add),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("cumsum", "cumsum_", "cumprod", "logcumsumexp", "cummax", "cummin")], scan_clocks
    ),
    "aten._ctc_loss": _frames_in_turn(0),
    "aten._ctc_loss_backward": _frames_in_turn(1),
    "aten.roll": _each_result(ROLL_CLOCKS),
    "aten.topk": _top_k,
    **dict.fromkeys(("aten.kthvalue", "aten.median", "aten.nanmedian"), _selected),
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys(SOFTMAXES, softmax_clocks),
    **dict.fromkeys(RESIZED, resized_clocks),
}


def clocks_of(op: CapturedOperator) -> Clocks:
    """Return the clocks that an operator's instructions take; none where nothing is known of them."""
    if not op.inputs:
        return Clocks()
    if op.name in _OF and op.outputs:
        return _OF[op.name](op)
    return _foreach(op) if op.name.startswith(FOREACH) else Clocks()
