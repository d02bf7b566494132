"""Which dimensions a sum, or another reduction, goes over, and in which order torch walks through its input.

torch drops dimensions of one place and joins those that lie in memory without gaps (ATen/TensorIterator.cpp:
coalesce_dimensions). Threads go along the dimension whose neighbours lie closest: a summed one, or one that stays
(native/cuda/Reduce.cuh: setReduceConfig). Where several summed dimensions are left, a thread computes the place of each
number (`input_calc`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sim.core.program import SumShape
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.layout import contiguous
from sim.models.torch_kernels.row_sums import WIDEST

# All run in the template of sums (native/cuda: gpu_reduce_kernel in ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
# ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu, ReduceNormKernel.cu, ReduceLogicKernel.cu and those of the least).
# Sums and means were measured; the others are taken to be as fast.
_SUMS = "sum mean nansum prod amax amin max min argmax argmin all any var std var_mean std_mean norm linalg_vector_norm"
SUMS = tuple(f"aten.{name}" for name in _SUMS.split())
VARIANCES = ("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
VARIANCES_AT_ONCE = 2  # numbers that a thread loads before it adds them (ReduceMomentKernel.cu: std_var_kernel_impl)


class _Dim(NamedTuple):
    places: int
    stride: int  # of the input, in elements
    made: int  # of the result, in elements


def sum_shape(op: CapturedOperator) -> SumShape | None:
    """Return what a sum or another reduction goes over; None of other operators."""
    if op.name not in SUMS or not op.inputs or not op.outputs:
        return None
    found = summed_to(op.inputs[0], op.outputs[0].shape, op.outputs[0].strides)
    return found._replace(at_once=VARIANCES_AT_ONCE) if found and op.name in VARIANCES else found


def summed_to(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> SumShape | None:
    """Return what a sum goes over whose result has this shape; None of a sum of nothing, or where it does not tell.

    >>> x = Tensor("bf16", (64, 128, 56, 56), ())
    >>> summed_to(x, (1, 128, 1, 1))  # of channels: images, and places of each, which lie apart
    SumShape(rows=200704, columns=128, neighbours=True, joined=False, stride=1, at_once=4)
    >>> summed_to(x, (64, 128))
    SumShape(rows=3136, columns=8192, neighbours=True, joined=True, stride=1, at_once=4)
    >>> summed_to(x, (128, 56, 56))
    SumShape(rows=64, columns=401408, neighbours=False, joined=True, stride=1, at_once=4)
    """
    stays = _stays(x.shape, shape)
    if stays is None or not x.elements:
        return None
    made = iter([s for n, s in zip(shape, strides or contiguous(shape), strict=True) if n > 1])
    kept: list[_Dim] = []
    summed: list[_Dim] = []
    for n, stride, stay in zip(x.shape, x.strides or contiguous(x.shape), stays, strict=True):
        if n > 1:
            (kept if stay else summed).append(_Dim(n, stride, next(made) if stay else 0))
    if not summed:
        return None
    summed.sort(key=lambda d: d.stride)
    kept.sort(key=lambda d: d.made)
    neighbours = not kept or summed[0].stride < kept[0].stride
    return SumShape(
        math.prod(d.places for d in summed),
        math.prod(d.places for d in kept),
        neighbours,
        all(b.stride == a.stride * a.places for a, b in pairwise(summed)),
        (summed if neighbours else kept)[0].stride,
    )


def single_places(shape: SumShape) -> float:
    """Return how many places the threads of a sum compute: one for each number, or for neighbouring columns together.

    >>> single_places(SumShape(200704, 128, neighbours=True, joined=False)), single_places(SumShape(200704, 128))
    (25690112.0, 0.0)
    """
    if shape.joined:
        return 0.0
    at_once = 1 if shape.neighbours or shape.stride > 1 else math.gcd(WIDEST, int(shape.columns))
    return shape.rows * shape.columns / at_once


def _stays(shape: Sequence[int], out: Sequence[int]) -> list[bool] | None:
    """Tell which dimensions of a sum's input stay: as the result says, else the last ones, the first, or any."""
    if len(out) == len(shape):
        pairs = list(zip(shape, out, strict=True))
        return [b == a for a, b in pairs] if all(b in (1, a) for a, b in pairs) else None
    gone = len(shape) - len(out)
    if gone < 0:
        return None
    if tuple(shape[gone:]) == tuple(out):
        return [False] * gone + [True] * len(out)
    found, left = [], list(out)
    for n in shape:
        found.append(bool(left) and left[0] == n)
        if found[-1]:
            left.pop(0)
    return None if left else found
