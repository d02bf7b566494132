"""Which kernel torch takes for an operator bound by memory, by the layout of its tensors.

`calibrate.run` measures each of these; where a profile lacks one, the kind's own points serve.
"""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.bytes import FOREACH
from sim.models.captured.indices import accumulates

FLOATS = ("fp64", "fp32", "bf16", "fp16", "fp8")
_POINTWISE = (
    "add sub mul div neg pow rsqrt sqrt reciprocal exp exp2 expm1 log log2 log10 log1p tanh tanh_backward sigmoid "
    "sigmoid_backward silu silu_backward gelu gelu_backward relu threshold threshold_backward elu elu_backward celu "
    "leaky_relu leaky_relu_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward hardtanh "
    "hardtanh_backward hardshrink hardshrink_backward mish mish_backward softplus softplus_backward softshrink "
    "softshrink_backward rrelu_with_noise rrelu_with_noise_backward log_sigmoid_forward log_sigmoid_backward "
    "_prelu_kernel _prelu_kernel_backward sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 sinc erf erfc "
    "erfinv lgamma digamma polygamma logit xlogy logaddexp logaddexp2 where eq ne lt le gt ge isnan isinf nan_to_num "
    "sign sgn floor ceil round trunc frac square abs rsub clamp clamp_min clamp_max maximum minimum fmax fmin fmod "
    "remainder floor_divide copysign hypot heaviside ldexp deg2rad rad2deg lerp addcmul addcdiv masked_fill "
    "bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not clone copy _to_copy "
    "__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift angle signbit isposinf isneginf gcd lcm igamma "
    "igammac i0 nextafter linalg_cross special_xlog1py special_zeta special_entr special_ndtri special_log_ndtr "
    "special_erfcx special_i0e special_i1 special_i1e bernoulli normal conj_physical logit_backward"
)
POINTWISE = frozenset(f"aten.{name}" for name in _POINTWISE.split())
INTO_PART = ("aten.slice_backward", "aten.select_backward")  # zeros, and a copy into a part of them
# Kernels that compute the place of each element, and load it by itself (aten/src/ATen/native/cuda: UpSample*.cu,
# *Pool*.cu, *Padding.cu, GridSampler.cu, Im2Col.cu, Col2Im.cu; IndexKernel.cu, flip_kernel; copies of permuted parts in
# native/PixelShuffle.cpp and TensorShape.cpp, repeat). Falcon-H1's flips take 1.42 times as long as their bytes on an
# H200 (scenarios/measured/gpu_programs_h200).
_ONE_BY_ONE = (
    "flip repeat pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool2d adaptive_max_pool3d max_pool3d_with_indices reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d grid_sampler_3d "
    "fractional_max_pool2d im2col col2im"
)
ONE_BY_ONE = frozenset(f"aten.{name}{end}" for name in _ONE_BY_ONE.split() for end in ("", "_backward"))
FUSED_ADAM = ("aten._fused_adamw_", "aten._fused_adam_")
NARROW = ("bf16", "fp16")
FUNCTIONS = {  # of one tensor; measured by themselves, as they compute more than they move where cores are slow
    "aten.tanh": "tanh",
    "aten.silu": "silu",
    "aten.silu_backward": "silu_backward",
    "aten.exp": "tanh",
    "aten.sigmoid": "tanh",
    "aten.gelu": "gelu",
    "aten.gelu_backward": "gelu_backward",
    "aten.bernoulli_": "random",
    "aten.uniform_": "random",
    "aten.normal_": "random",
    "aten.randn": "random",
    "aten.rand": "random",
    "aten.max_pool2d_with_indices": "max_pool",
}
PLACES = (
    "aten.max",
    "aten.min",
    "aten.argmax",
)  # also find where: torch's CPU kernel is not vectorized
REDUCTIONS = (
    *PLACES,
    *("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var", "aten.linalg_vector_norm", "aten._foreach_norm"),
)
IN_PLACE = ("aten.mul_", "aten.div_", "aten.relu_", "aten._foreach_mul_")  # by one number for each tensor
SMALL = 16  # an operand this many times smaller than the result stays in a cache


def is_pointwise(name: str) -> bool:
    """Tell whether an operator computes each element by itself, in place or not.

    >>> is_pointwise("aten.sigmoid"), is_pointwise("aten.sigmoid_"), is_pointwise("aten.sum")
    (True, True, False)
    """
    return name.removesuffix("_") in POINTWISE


def draws(name: str) -> bool:
    """Return whether an operator draws a random number for each element of its result."""
    return name == "aten.native_dropout" or FUNCTIONS.get(name) == "random"


def kernel_of(op: CapturedOperator) -> str:
    """The kernel of an elementwise operator; "" for one over contiguous tensors of one dtype and shape.

    >>> row, x = Tensor("fp32", (64,), ()), Tensor("fp32", (32, 64), ())
    >>> def add(*inputs): return CapturedOperator("aten.add", "forward", "", inputs, (x,), 1, False)
    >>> kernel_of(add(x, row)), kernel_of(add(x, x)), kernel_of(add(x)), kernel_of(add(x, x._replace(strides=(1, 32))))
    ('broadcast', '', 'unary', 'transposed')
    """
    if op.name in FUNCTIONS:
        return "function_transposed" if _mixes_layouts(op) else FUNCTIONS[op.name]
    if op.name in IN_PLACE:
        return "in_place"
    of_lists = op.name.startswith(FOREACH) and op.name not in REDUCTIONS  # each tensor has a shape of its own
    if of_lists or not op.inputs or not op.outputs:
        return ""
    out = op.outputs[0]
    if op.name in REDUCTIONS:
        layout = _reduction(op.inputs[0], out)
        return "max_last" if op.name in PLACES and out.shape and layout == "reduce_last" else layout
    whole = _whole(op)
    if _mixes_layouts(op):
        return "transposed"
    if len({x.dtype for x in (*whole, out) if x.dtype in FLOATS}) > 1:
        return "mixed"
    if any(1 < x.elements < out.elements for x in op.inputs):
        return "broadcast"
    return "unary" if len(whole) == 1 else ""


def is_vectorized(op: CapturedOperator) -> bool:
    """Tell whether torch reads and writes several neighbouring elements at once.

    torch has such kernels for pointwise operators whose operands lie in memory in one order without gaps and have one
    dtype (ATen/native/cuda/CUDALoops.cuh: gpu_kernel_impl); a cast from 32 to 16 bits has its own (Copy.cu). A
    concatenation of parts of tensors, a copy into a part, and `ONE_BY_ONE` have none. Other operators: true.

    >>> row, x = Tensor("fp32", (64,), ()), Tensor("fp32", (32, 64), ())
    >>> def add(*inputs): return CapturedOperator("aten.add", "forward", "", inputs, (x,), 1, False)
    >>> is_vectorized(add(x, x)), is_vectorized(add(x, row)), is_vectorized(add(x, x._replace(dtype="bf16")))
    (True, False, False)
    """
    if op.name == "aten.repeat" and op.inputs[:1] == op.outputs[:1]:  # once in each dimension
        return True
    if op.name in INTO_PART or op.name in ONE_BY_ONE:
        return False
    if op.name == "aten.cat":
        return not any(x.strides for x in op.inputs)
    if not is_pointwise(op.name) or not op.inputs:
        return True
    return _in_one_order((op.outputs or op.inputs)[0], op.inputs) and not casts_of(op)


def single_elements(op: CapturedOperator) -> float:
    """Return the elements that the operator's kernel handles one at a time; 0 if it is vectorized."""
    if op.name in FUSED_ADAM:
        return sum(x.elements for x in op.inputs) / 4  # parameters, gradients and two moments
    if accumulates(op):
        return float(op.inputs[-1].elements)  # a lane's loads are a warp apart (Indexing.cu, indexing_backward_kernel)
    if is_vectorized(op):
        return 0.0
    # The zeros around a part are written by another kernel, which is vectorized.
    counted = op.inputs if op.name in INTO_PART else (*op.outputs, *op.inputs)
    return float(max(math.prod(x.shape) for x in counted))


def casts_of(op: CapturedOperator) -> int:
    """Return the operands, with the result, for which a pointwise kernel chooses casts; 0 if dtypes are alike.

    >>> x, y = Tensor("fp32", (32, 64), ()), Tensor("bf16", (32, 64), ())
    >>> def casts(name, out, *inputs):
    ...     return casts_of(CapturedOperator(name, "forward", "", inputs, (out,), 1, False))
    >>> casts("aten.add", x, x, y), casts("aten._to_copy", x, y), casts("aten._to_copy", y, x)
    (3, 2, 0)
    """
    if not is_pointwise(op.name) or not op.inputs:
        return 0
    out = (op.outputs or op.inputs)[0]
    # The target of a copy in place is its first input.
    operands = (out, *(op.inputs[1:] if op.name == "aten.copy_" else op.inputs))
    copied = op.name in ("aten._to_copy", "aten.copy_")
    if copied and operands[-1].dtype == "fp32" and out.dtype in NARROW:
        return 0
    return len(operands) if len({x.dtype for x in operands if x.dtype in FLOATS}) > 1 else 0


def _in_one_order(out: Tensor, operands: tuple[Tensor, ...]) -> bool:
    """Tell whether all operands are as large as the result and lie in memory in its order, without gaps."""
    shape = out.shape
    if any(x.shape != shape for x in operands):
        return False
    strides = [x.strides or contiguous(shape) for x in (out, *operands)]
    dims = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: strides[0][d])
    expected = 1
    for d in dims:
        if any(s[d] != expected for s in strides):
            return False
        expected *= shape[d]
    return True


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie together, in elements."""
    strides: list[int] = []
    count = 1
    for n in reversed(shape):
        strides.append(count)
        count *= n
    return tuple(reversed(strides))


def _whole(op: CapturedOperator) -> list[Tensor]:
    """Return the operands about as large as the result."""
    return [x for x in op.inputs if x.elements * SMALL > op.outputs[0].elements]


def _mixes_layouts(op: CapturedOperator) -> bool:
    """Return whether some large operands are transposed and others not; if all are, torch walks them in their order."""
    return bool(op.outputs) and len({is_transposed(x) for x in (*_whole(op), op.outputs[0])}) > 1


def _reduction(x: Tensor, out: Tensor) -> str:
    """Over the last dimension, whose elements lie together, or over others."""
    if not x.shape or not out.shape:
        return "reduce_last"
    keeps = len(out.shape) == len(x.shape)
    last = out.shape[-1] == 1 if keeps else out.shape != x.shape[len(x.shape) - len(out.shape) :]
    return "reduce_last" if last else "reduce_first"


def has_channels_last(x: Tensor) -> bool:
    """Tell whether the channels of images [images, channels, height, width] lie together in memory."""
    return len(x.shape) > 3 and len(x.strides) > 1 and x.strides[1] == 1


def is_transposed(x: Tensor) -> bool:
    """Tell whether neighbours in the last dimension, among those of more than one place, do not lie together."""
    last = next((stride for n, stride in zip(x.shape[::-1], x.strides[::-1], strict=False) if n > 1), 1)
    return len(x.shape) > 1 and last > 1


def is_transposing(op: CapturedOperator) -> bool:
    """Tell whether a copy brings neighbours together that did not lie so."""
    return any(is_transposed(a) != is_transposed(b) for a in op.inputs[-1:] for b in op.outputs[:1])
