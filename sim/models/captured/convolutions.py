"""Captured convolutions: the matmul, or the kernel of depthwise ones, and what torch runs around them on a GPU.

aten/src/ATen/native/Convolution.cpp: cuDNN's convolutions have no bias (native/cudnn/ConvShared.cpp), so another kernel
adds it to the result (`_convolution`), and its gradient is a sum (`convolution_backward`). Inputs and gradients are
copied first if their channels do not lie as those of the convolution; images of one dimension lie in their own order.
cuDNN computes 16 bits with the channels last, so its call moves them there and back, unless the filter is one place and
rows of places are aligned. Samples of one dimension are images of one row to it (`view_as_4d`), and are moved too. Of
fewer than eight channels, as those of an image, it uses no tensor cores.
A convolution with one channel in each group runs in torch's own kernels (cuda/DepthwiseConv2d.cu), unless the channels
lie last or the dtype is fp16: then in cuDNN's (`use_cudnn_depthwise`).
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from sim.core.program import ALIGNED, DEPTHWISE, Compute, Phase, Role
from sim.inputs.program_file import CONVOLUTIONS, CapturedOperator, Tensor
from sim.models.captured.layout import NARROW, has_channels_last, is_transposed
from sim.models.captured.recurrent import multiplied
from sim.models.captured.reductions import single_places, summed_to

CUDNN_CHANNELS = 32  # from which cuDNN runs depthwise convolutions of fp16
CUDNN_FILTERS = (1, 3, 5)  # the widths of square filters for which it does
# Single operators on an H200 (scenarios/measured/gpu_kernels/h200.json). 64 images of 3 channels run at the speed of
# fp32 with the channels filled up to four. An element of a tensor that is moved takes half a clock. Depthwise filters
# of 3 x 3 and of 7 x 7 take these clocks, a product in the backward longer.
TENSOR_CORE_CHANNELS, FILLED_CHANNELS = 8, 4
MOVED_CLOCKS = 0.5
PLANE_RESULT_CLOCKS, PLANE_PRODUCT_CLOCKS, CHANNELS_LAST_PRODUCT_CLOCKS = 1.04, 0.17, 0.04
BACKWARD_PRODUCT = 1.64  # times a product of the forward
PLAIN_DIMS = 3  # images of one dimension: [images, channels, samples]


def convolution_computes(op: CapturedOperator, phase: Phase) -> tuple[Compute, ...]:
    """Return the kernels of a convolution on a GPU: copies of its inputs, the products, what a bias needs.

    >>> def t(*shape): return Tensor("bf16", shape, ())
    >>> x, w, b, y = t(8, 8, 32, 32), t(16, 8, 3, 3), t(16), t(8, 16, 32, 32)
    >>> op = CapturedOperator("aten.convolution", "forward", "", (x, w, b), (y,), 1, False)
    >>> [(c.kind, c.shape) for c in convolution_computes(op, Phase.FORWARD)]
    [('gemm', (1, 8192, 16, 72)), ('copy', (196608,)), ('elementwise', (131072,))]
    """
    x, weight, y = _tensors(op)
    backward = op.name == CONVOLUTIONS[1]
    last = _runs_channels_last(op, x, weight)
    copies = [
        copy_before(op, t, phase, is_transposed(t) or has_channels_last(t) or not t.strides)
        for t in ((y, x) if backward else (x,))
        if _is_copied(t, last)
    ]
    depthwise = _is_depthwise(x, weight, y)
    own = depthwise and not _in_cudnn(x, weight)
    products = _depthwise(op, phase, own) if depthwise else _by_fp32(convolution(op, phase), x, weight)
    moved = [_moved(op, x, y, phase)] if not (depthwise or last) and _moves_channels(x, weight, y) else []
    bias: list[Compute] = []
    if backward and any(len(t.shape) == 1 for t in op.outputs):
        bias.append(_bias_gradient(op, phase, y))
    elif not backward and len(op.inputs) > 2 and not own:
        bias.append(_around(op, phase, y, 2.0 * y.bytes, "broadcast", y.elements))
    return (*copies, products, *moved, *bias)


def _by_fp32(op: Compute, x: Tensor, weight: Tensor) -> Compute:
    """The product as it runs with too few channels for tensor cores."""
    channels = weight.shape[1]
    if op.dtype not in NARROW or channels >= TENSOR_CORE_CHANNELS or channels < x.shape[1]:
        return op
    filled = (
        1.0 if op.role is Role.INPUT_GRADIENT else math.ceil(channels / FILLED_CHANNELS) * FILLED_CHANNELS / channels
    )
    shape = (*op.shape[:3], round(op.shape[3] * filled))
    return replace(op, dtype="fp32", shape=shape)


def _runs_channels_last(op: CapturedOperator, x: Tensor, weight: Tensor) -> bool:
    """Tell whether a convolution runs with the channels last: its input or its weight says so, or its result shows it.

    A weight of one place has the strides of both orders (ATen/native/ConvUtils.h: cudnn_conv_suggest_memory_format).

    >>> x, y = Tensor("bf16", (2, 64, 32, 32), ()), Tensor("bf16", (2, 64, 32, 32), (65536, 1, 2048, 64))
    >>> weight = Tensor("bf16", (64, 64, 1, 1), ())
    >>> op = CapturedOperator("aten.convolution", "forward", "", (x, weight), (y,), 1, False)
    >>> _runs_channels_last(op, x, weight), [c.kind for c in convolution_computes(op, Phase.FORWARD)]
    (True, ['permute', 'gemm'])
    """
    return any(map(has_channels_last, (x, weight, *op.outputs[:1])))


def _moves_channels(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Tell whether cuDNN's call moves the channels of its images to the last dimension, and back."""
    if x.dtype not in NARROW:
        return False
    one_place = math.prod(weight.shape[2:]) == 1 and x.shape[2:] == y.shape[2:]
    return not (one_place and math.prod(x.shape[2:]) % ALIGNED == 0)


def _moved(op: CapturedOperator, x: Tensor, y: Tensor, phase: Phase) -> Compute:
    elements = _products(op) * (x.elements + y.elements)
    size = 2.0 * _products(op) * (x.bytes + y.bytes)
    return Compute(op.name, "copy", (elements,), x.dtype, 0.0, size, phase, 0, clocks=MOVED_CLOCKS * elements)


def convolution(op: CapturedOperator, phase: Phase) -> Compute:
    """A convolution as the matmul that it is: outputs' places by output channels by what one of them sees.

    A backward has as many such products as it gives gradients (input, weight; a bias's is a sum). A transposed one is
    the same with input and output exchanged. It has the input's channels first in its weight; where both have as many,
    its stride shows, which at least doubles the places.
    """
    backward = op.name == CONVOLUTIONS[1]
    x, weight, y = _tensors(op)
    if _is_exchanged(x, weight, y):
        x, y = y, x
    products = _products(op)
    groups = max(1, x.shape[1] // weight.shape[1])
    shape = (products * groups, _places(y), weight.shape[0] // groups, math.prod(weight.shape[1:]))
    flops = 2.0 * math.prod(shape)
    moved = float(sum(t.bytes for t in (*op.inputs, *op.outputs)))
    role = Role.INPUT_GRADIENT if backward else Role.OUTPUT
    kernel = "convolution_backward" if backward else "convolution"
    dtype = multiplied(op, y)
    return Compute(op.name, "gemm", shape, dtype, flops, moved, phase, products, role=role, kernel=kernel)


def _tensors(op: CapturedOperator) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight, and output or its gradient."""
    if op.name == CONVOLUTIONS[1]:
        y, x, weight = op.inputs[:3]
        return x, weight, y
    return op.inputs[0], op.inputs[1], op.outputs[0]


def _products(op: CapturedOperator) -> int:
    return max(1, sum(len(t.shape) > 1 for t in op.outputs)) if op.name == CONVOLUTIONS[1] else 1


def _is_exchanged(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Tell whether it is a transposed convolution."""
    same = x.shape[1] == y.shape[1]
    return y.shape[1] != weight.shape[0] or (same and _places(y) >= 2 * _places(x))


def _places(x: Tensor) -> int:
    """Return the number of images times pixels (samples, voxels) of a tensor [images, channels, …]."""
    return x.shape[0] * math.prod(x.shape[2:])


def _is_depthwise(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Tell whether each output channel sees one input channel (ConvParams::is_depthwise)."""
    return x.shape[1] > 1 and weight.shape[1] == 1 and not _is_exchanged(x, weight, y)


def _in_cudnn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether cuDNN runs a depthwise convolution (`use_cudnn_depthwise`).

    Of fp16 with a stride of 2 it does so for some sizes; here for all.
    """
    if has_channels_last(x):
        return True
    width, square = weight.shape[-1], len(weight.shape) == 4 and len(set(weight.shape[2:])) == 1
    flat = len(weight.shape) == PLAIN_DIMS
    fits = flat or (square and width in CUDNN_FILTERS)
    return x.dtype == "fp16" and fits and x.shape[1] >= CUDNN_CHANNELS


def _is_copied(x: Tensor, last: bool) -> bool:
    """Tell whether a tensor has another layout than the convolution: channels last, or its own order.

    determine_backend_memory_format, cudnn_conv_suggest_memory_format.
    """
    return not has_channels_last(x) if last else bool(x.strides)


def copy_before(op: CapturedOperator, x: Tensor, phase: Phase, permutes: bool) -> Compute:
    """A copy of an input that an operator's own call makes first; torch has no vectorized kernel for it."""
    kind, single = "permute" if permutes else "copy", float(x.elements)
    return Compute(op.name, kind, (x.elements,), x.dtype, 0.0, 2.0 * x.bytes, phase, 0, single_elements=single)


def _depthwise(op: CapturedOperator, phase: Phase, own: bool) -> Compute:
    """Kernels that compute an output, or a gradient, by one thread each; `own`: torch's, which loads one by one.

    Each product loads an input and a weight, in the backward a gradient in place of one of them. Those over samples of
    one dimension have a rule of their own (`sim.prices.unvectorized`).
    """
    x, weight, y = _tensors(op)
    count, taps = _products(op), math.prod(weight.shape[2:])
    products = float(count * y.elements * taps)
    moved = float(sum(t.bytes for t in (*op.inputs, *op.outputs)) + (count - 1) * y.bytes)
    over_samples = len(x.shape) <= PLAIN_DIMS
    of_one = CHANNELS_LAST_PRODUCT_CLOCKS * taps if not own else PLANE_RESULT_CLOCKS + PLANE_PRODUCT_CLOCKS * taps
    longer = BACKWARD_PRODUCT if op.name == CONVOLUTIONS[1] else 1.0
    return Compute(
        op.name,
        "elementwise",
        (y.elements,),
        y.dtype,
        2.0 * products,
        moved,
        phase,
        count,
        kernel=DEPTHWISE,
        single_elements=products if own and over_samples else 0.0,
        clocks=0.0 if over_samples else longer * count * y.elements * of_one,
    )


def _bias_gradient(op: CapturedOperator, phase: Phase, y: Tensor) -> Compute:
    """The sum over images and their places; with the channels first these lie apart, and a thread computes each."""
    sums = summed_to(y, (1, y.shape[1], *(1,) * (len(y.shape) - 2)))
    places = 0.0 if sums is None else single_places(sums)
    return replace(_around(op, phase, y, y.bytes, "reduce_first", places), sums=sums)


def _around(op: CapturedOperator, phase: Phase, y: Tensor, size: float, kernel: str, single: float = 0.0) -> Compute:
    """A kernel over the output, or its gradient, that the convolution's own call issues."""
    kind, shape = "elementwise", (y.elements,)
    return Compute(op.name, kind, shape, y.dtype, 0.0, size, phase, 0, kernel=kernel, single_elements=single)
