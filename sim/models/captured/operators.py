"""A captured program's operators as the simulator prices them.

Matmuls, attention and solvers are priced by their shapes. All else is bound by memory (`captured/kernels.py`). An
operator that is not known is priced by its bytes and counted (`unknown`).
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from sim.core.attention_pairs import Alignment, half_diagonal_pairs
from sim.core.operator_kinds import ATTENTION_LAUNCHES, shape_flops
from sim.core.program import ALIGNED, TORCH_SOFTMAX_UNALIGNED, Comm, Compute, Phase, Role, SumShape
from sim.core.timeline import HOST
from sim.inputs.program_file import BYTES, CONVOLUTIONS, CapturedOperator, HostCopy, Tensor
from sim.models.captured.bytes import FOREACH, written_bytes
from sim.models.captured.convolutions import convolution, convolution_computes, copy_before
from sim.models.captured.indices import rows_in_turn
from sim.models.captured.instructions import clocks_of
from sim.models.captured.kernels import KERNELS, kernels_of, moved_bytes
from sim.models.captured.layout import (
    casts_of,
    draws,
    is_pointwise,
    is_transposed,
    is_transposing,
    kernel_of,
    single_elements,
)
from sim.models.captured.ordering import SMALL_SORT, row_of
from sim.models.captured.recurrent import RECURRENT, multiplied, recurrent_computes
from sim.models.captured.reductions import single_places, sum_shape
from sim.models.captured.softmaxes import SOFTMAXES, softmax_kernel
from sim.models.captured.solvers import SOLVERS, TRIANGULAR, solver
from sim.models.captured.waits import READ, waits_of
from sim.models.operators import further_kernels

# Place of the left matrix.
MATMUL_INPUTS = {
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten._scaled_mm", "aten._scaled_mm_v2", "aten._int_mm"), 0),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm", "aten.addmm_", "aten.baddbmm_", "aten._addmm_activation"), 1),
    **dict.fromkeys(("aten.addbmm", "aten.addbmm_"), 1),
}
TORCH_GROUPED = ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
GROUPED = (*TORCH_GROUPED, "calibrate.grouped_mm")
ATTENTION = "aten._scaled_dot_product_"
VARLEN = "torch_attn._varlen_attn"
FLEX = ("calibrate.flex_attention", "calibrate.flex_attention_backward")
# Speeds of a profile: what torch picks (cuDNN's kernel on Hopper, FlashAttention-2 on Ampere); the FlashAttention-2
# that torch bundles; Triton's; the memory-efficient kernel, whose speed in 16 bits profiles of an A100 and of Hopper
# state.
KERNEL_OF = {
    "cudnn": "torch",
    "flash": "torch_2024",
    "varlen": "torch_2024",
    "efficient": "efficient",
    "flex": "triton",
}
COMPLEX_PRODUCTS = 4  # real products of a complex one
FLOATS = ("fp32", "bf16", "fp16", "fp8")
# How many inputs are copied first if their elements do not lie in the result's order.
CONTIGUOUS = {
    "aten.native_layer_norm": 1,
    "aten.native_layer_norm_backward": 2,
    "aten.native_group_norm": 1,
    "aten.native_group_norm_backward": 2,
    **dict.fromkeys(SOFTMAXES, 1),
}
COPIES = ("aten.clone", "aten.copy_")


def computes_of(op: CapturedOperator, on_gpu: bool = True) -> tuple[Compute, ...]:
    """A launched operator as the simulator's own: one, or the many that a recurrent layer is.

    On a GPU some operators also start small kernels, as those of a sort. The host issues further kernels of one call in
    C++, faster than Python issues operators.
    """
    if op.name in RECURRENT:
        return recurrent_computes(op)
    if not on_gpu:
        return (compute_of(op),)
    if is_convolution(op):
        made = convolution_computes(op, _phase(op))
    else:
        found = kernels_of(op)
        small = found.small_kernels(op)
        ones = further_kernels(op.name, _phase(op), small, found.sort_passes(op))
        made = (*_copies_before(op), compute_of(op), *((ones,) if small else ()))
    calls = (replace(c, one_call=True) if c.kernels > 1 and not c.within_call else c for c in made)
    return tuple(replace(c, graphed=True) if op.graphed else c for c in calls)


def _copies_before(op: CapturedOperator) -> list[Compute]:
    """Copies that an operator's own call makes of its inputs first.

    A layer norm's are of an input whose elements do not lie together (layer_norm_kernel.cu: expect_contiguous), a group
    norm's also of images with the channels last (native/group_norm.cpp: native_group_norm, native_group_norm_backward),
    until torch 2.15, whose result keeps them last. A softmax's, and its gradient's, are of either (SoftMax.cu:
    host_softmax, host_softmax_backward). Some products are added to a copy (`_adds_to_copy`). A triangular solver works
    in place on a copy of the right-hand sides in the result's order (BatchLinearAlgebra.cpp:
    linalg_solve_triangular_out). A long sort along another dimension than the last runs on transposed copies of its
    input and results (Sort.cpp: sort_cuda_kernel).
    """
    if op.name == TRIANGULAR and op.outputs and len(op.inputs) > 1:
        right, result = op.inputs[1], op.outputs[0]
        return [copy_before(op, result, _phase(op), is_transposed(right) != is_transposed(result))]
    if op.name in CONTIGUOUS:
        layout = op.outputs[0].strides if op.outputs else ()  # the kernel reads the layout that its result has
        copied = [x for x in op.inputs[: CONTIGUOUS[op.name]] if x.strides != layout]
    elif op.name == "aten.sort" and op.dims_behind and row_of(op) > SMALL_SORT:
        return [copy_before(op, x, _phase(op), permutes=True) for x in (*op.inputs[:1], *op.outputs)]
    elif _adds_to_copy(op):
        return [_copy_of_added(op)]
    else:
        copied = []
    return [copy_before(op, x, _phase(op), is_transposed(x)) for x in copied]


def _copy_of_added(op: CapturedOperator) -> Compute:
    """Return the copy to which a product is added: cudaMemcpy where it is laid out as the result (cuda/Copy.cu).

    Llama 1B under torch.compile on an H200 has one such product, and one copy between places of the GPU, which streams
    at 0.88 of the bandwidth (scenarios/measured/gpu_programs_h200).
    """
    added, result = op.inputs[0], op.outputs[0]
    copy = copy_before(op, result, _phase(op), is_transposed(result))
    return replace(copy, single_elements=0.0) if added == result else copy


def _adds_to_copy(op: CapturedOperator) -> bool:
    """Tell whether torch copies what a product is added to, and then adds the product to the copy.

    The matmul itself adds a bias alone, and not to one row or column (Blas.cpp of torch 2.14: addmm_out_cuda_impl,
    isInputCompliesAddmmCudaLt; baddbmm_out_cuda_impl).

    >>> x, w, y = Tensor("bf16", (32, 64), ()), Tensor("bf16", (64, 256), ()), Tensor("bf16", (32, 256), ())
    >>> bias, row = Tensor("bf16", (256,), ()), Tensor("bf16", (1, 64), ())
    >>> def to_copy(*inputs):
    ...     return _adds_to_copy(CapturedOperator("aten.addmm", "forward", "", inputs, (y,), 1, False))
    >>> to_copy(bias, x, w), to_copy(y, x, w), to_copy(bias, row, w)
    (False, True, True)
    """
    if op.name == "aten.addmm" and op.outputs:
        added, left, right = op.inputs[:3]
        return len(added.shape) > 1 or 1 in (*left.shape, *right.shape)
    return op.name == "aten.baddbmm" and bool(op.outputs)


def copy_kind(copy: HostCopy) -> str:
    """Return the kind of communication that a copy between the host's memory and the GPU's is."""
    return "reload" if copy.to_device else "offload"


def items_of(op: CapturedOperator, on_gpu: bool = True) -> tuple[Compute | Comm, ...]:
    """A launched operator as the simulator's own, copies between host and GPU among them.

    A copy lies in its stream's order: what follows it waits for it, even if the host does not. A number that the host
    reads is such a copy too.
    """
    if not on_gpu:
        return computes_of(op, on_gpu)
    if op.host_copy is None:
        return (*(() if op.name == READ else computes_of(op)), *waits_of(op, _phase(op)))
    return (Comm(op.name, copy_kind(op.host_copy), HOST, written_bytes(op), _phase(op)),)


def compute_of(op: CapturedOperator) -> Compute:
    """A launched operator as one of the simulator's own.

    >>> x, w = Tensor("bf16", (32, 64), ()), Tensor("bf16", (64, 256), ())
    >>> op = CapturedOperator("aten.mm", "forward", "up", (x, w), (Tensor("bf16", (32, 256), ()),), 1, False)
    >>> compute_of(op).shape, compute_of(op).flops
    ((1, 32, 256, 64), 1048576.0)
    """
    if op.name in MATMUL_INPUTS and op.outputs:
        return _matmul(op)
    if op.name in GROUPED:
        return _grouped(op)
    if is_convolution(op):
        return convolution(op, _phase(op))
    if op.name.startswith(ATTENTION) and len(op.inputs) >= 3:
        return _attention(op)
    if op.name in FLEX:
        return _flex_attention(op)
    if op.name.startswith(VARLEN) and len(op.inputs) >= 4:
        return _attention(_as_equally_long(op), "last")  # FlashAttention's own interface
    if op.name in SOLVERS and op.inputs and len(op.inputs[0].shape) >= 2:
        return solver(op, _phase(op))
    return _by_bytes(op)


def _matmul(op: CapturedOperator) -> Compute:
    first = MATMUL_INPUTS[op.name]
    left, right, out = op.inputs[first], op.inputs[first + 1], op.outputs[0]
    batch = left.shape[0] if len(left.shape) == 3 else 1
    m, k, n = *left.shape[-2:], right.shape[-1]
    k *= COMPLEX_PRODUCTS if left.dtype.startswith("complex") else 1
    role, phase = Role.OUTPUT, _phase(op)
    if op.phase == "backward":
        weights = batch == 1 and len(left.shape) == 2 and _transposed(left)  # dW = dYᵀ X, or Xᵀ dY
        role, phase = (Role.WEIGHT_GRADIENT, Phase.WEIGHT_GRAD) if weights else (Role.INPUT_GRADIENT, Phase.INPUT_GRAD)
    moved = float(left.bytes + right.bytes + out.bytes)
    alignment = ALIGNED if BYTES.get(out.dtype, 4) > 2 else math.gcd(ALIGNED, *map(_row_stride, (left, right, out)))
    shape = (batch, m, n, k)
    flops = 2.0 * batch * m * n * k
    if op.name == "aten.bmm" and k == 1:  # a Triton kernel since torch 2.14 (torch/_native/ops/bmm_outer_product)
        return Compute(op.name, "elementwise", (batch * m * n,), out.dtype, flops, moved, phase, role=role)
    return Compute(op.name, "gemm", shape, multiplied(op, left), flops, moved, phase, role=role, alignment=alignment)


def _row_stride(x: Tensor) -> int:
    """The elements between a matrix's rows, or columns where it is transposed; 0 for one row or column.

    >>> _row_stride(Tensor("bf16", (8191, 64), ())), _row_stride(Tensor("bf16", (64, 8191), (1, 64)))
    (64, 64)
    """
    if 1 in x.shape[-2:]:
        return 0
    rows, columns = x.strides[-2:] if x.strides else (x.shape[-1], 1)
    return rows if columns == 1 else columns if rows == 1 else x.shape[-1]


def _transposed(x: Tensor) -> bool:
    return bool(x.strides) and x.strides[-2] == 1


def _grouped(op: CapturedOperator) -> Compute:
    """Groups share the rows evenly: nobody knows them before the data does."""
    left, right = op.inputs[:2]
    ends = next((x for x in op.inputs[2:] if x.dtype == "int32"), None)  # scales lie before them
    groups = ends.shape[0] if ends is not None and ends.shape else max(left.shape[0], right.shape[0])
    weights = len(right.shape) == 2
    rows = -(-(left.shape[1] if weights else left.shape[0]) // groups)
    m, n, k = (left.shape[0], right.shape[1], rows) if weights else (rows, right.shape[-1], left.shape[1])
    role, phase = Role.OUTPUT, _phase(op)
    if op.phase == "backward":
        role, phase = (Role.WEIGHT_GRADIENT, Phase.WEIGHT_GRAD) if weights else (Role.INPUT_GRADIENT, Phase.INPUT_GRAD)
    moved = float(left.bytes + right.bytes + sum(x.bytes for x in op.outputs))
    kernels = 1 if op.name in TORCH_GROUPED else groups  # torch's own kernel has bf16 alone
    flops = 2.0 * groups * m * n * k
    return Compute(op.name, "grouped_gemm", (groups, m, n, k), left.dtype, flops, moved, phase, kernels, role=role)


def _attention(op: CapturedOperator, aligned: Alignment = "first") -> Compute:
    backward = "backward" in op.name
    q, _, v = op.inputs[1:4] if backward else op.inputs[:3]
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    kind = "attention_backward" if backward else "attention_forward"
    flops = shape_flops(kind, (batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim, 0))
    block = (q_len, kv_len, 0)
    if op.causal:
        flops *= half_diagonal_pairs(q_len, kv_len, aligned) / max(1, q_len * kv_len)
        block = _causal_block(q_len, kv_len, aligned)
    shape = (batch, heads, kv_heads, *block[:2], head_dim, v_dim, block[2])
    moved = float(sum(x.bytes for x in (*op.inputs, *op.outputs)))
    on_gpu = "for_cpu" not in op.name
    kernel = next((k for part, k in KERNEL_OF.items() if part in op.name), "") if on_gpu else ""
    others = op.inputs[4:] if backward else op.inputs[3:]
    masked = any(x.shape[1:] != q.shape[1:] and x.shape[-2:] == (q_len, kv_len) for x in others)
    phase = _phase(op)
    launches = ATTENTION_LAUNCHES[kind] if on_gpu else 1
    return Compute(
        op.name, kind, shape, q.dtype, flops, moved, phase, launches, kernel=kernel, drops=op.drops, masked=masked
    )


def _causal_block(q_len: int, kv_len: int, aligned: Alignment) -> tuple[int, int, int]:
    """Queries, keys and mask of a block with as many pairs, as `Compute.shape` has it: aligned to the last key.

    >>> _causal_block(8, 16, "first"), _causal_block(16, 8, "first"), _causal_block(8, 16, "last")
    ((8, 8, 1), (16, 6, 0), (8, 16, 1))
    """
    if aligned == "last" or q_len == kv_len:
        return q_len, kv_len, 1
    if q_len < kv_len:
        return q_len, q_len, 1
    return q_len, max(1, round(half_diagonal_pairs(q_len, kv_len, aligned) / q_len)), 0


def masked_flops(op: CapturedOperator) -> float:
    """Return the FLOPs that an operator's causal mask saves; 0 without one."""
    return compute_of(op._replace(causal=False)).flops - compute_of(op).flops if op.causal else 0.0


def _flex_attention(op: CapturedOperator) -> Compute:
    """FlexAttention: FLOPs of the keys that the block mask lets queries see, bytes of all keys."""
    first = len(op.inputs) - 5 - 2 if "backward" in op.name else 0
    before, (q, k, v, *seen), after = op.inputs[:first], op.inputs[first : first + 5], op.inputs[first + 5 :]
    found = _attention(op._replace(inputs=(*before, q, *seen, *after)))
    return replace(found, bytes=found.bytes + k.bytes + v.bytes - sum(x.bytes for x in seen))


def _as_equally_long(op: CapturedOperator) -> CapturedOperator:
    """Attention of joined sequences, [tokens, heads, head size], as if all were equally long.

    The first int32 tensors have one place more than there are sequences: where each begins.
    """
    starts = next((x for x in op.inputs if x.dtype == "int32"), None)
    count = max(1, starts.shape[0] - 1) if starts is not None else 1

    def apart(x: Tensor) -> Tensor:
        tokens, heads, size = x.shape
        return Tensor(x.dtype, (count, heads, max(1, round(tokens / count)), size), ())

    return op._replace(inputs=tuple(apart(x) if len(x.shape) == 3 else x for x in op.inputs))


def _by_bytes(op: CapturedOperator) -> Compute:
    """An operator bound by memory; see `moved_bytes`."""
    found = kernels_of(op)
    instructions = clocks_of(op)
    kind = "permute" if op.name in COPIES and is_transposing(op) else found.kind
    floats = [x for x in (*op.outputs, *op.inputs) if x.dtype in FLOATS]
    elements = max((x.elements for x in (*op.outputs, *op.inputs)), default=1)
    kernel = _kernel(op, kind, found.kernel)
    sums = sum_shape(op)
    return Compute(
        op.name,
        kind,
        (max(1, elements),),
        floats[0].dtype if floats else "fp32",
        float(elements),
        moved_bytes(op),
        _phase(op),
        found.kernels,
        kernel=kernel,
        single_elements=_single_elements(op, kernel, sums),
        casts=casts_of(op),
        rows_in_turn=rows_in_turn(op),
        sums=sums,
        clocks=instructions.shared,
        lone_clocks=instructions.alone,
        random_numbers=float(op.outputs[0].elements) if op.outputs and draws(op.name) else 0.0,
    )


def _single_elements(op: CapturedOperator, kernel: str, sums: SumShape | None) -> float:
    if sums is not None:
        return single_places(sums)
    return float(op.inputs[0].elements) if kernel == TORCH_SOFTMAX_UNALIGNED else single_elements(op)


def _kernel(op: CapturedOperator, kind: str, kernel: str) -> str:
    """The kernel of an operator that is bound by memory; `kernel`: as the table of kernels names it."""
    if kind == "elementwise":
        return kernel_of(op)
    return softmax_kernel(op) if kind == "softmax" else kernel


def is_convolution(op: CapturedOperator) -> bool:
    """Tell whether an operator is a convolution, forward or backward."""
    return op.name in CONVOLUTIONS and len(op.inputs) > 1 and bool(op.outputs)


def known(name: str) -> bool:
    """True where an operator is priced as itself, not by its bytes alone."""
    if name in KERNELS or name in SOLVERS or is_pointwise(name) or name.startswith((ATTENTION, VARLEN, FOREACH)):
        return True
    return name in (*MATMUL_INPUTS, *GROUPED, *CONVOLUTIONS, *RECURRENT, *FLEX)


def _phase(op: CapturedOperator) -> Phase:
    if op.phase == "forward":
        return Phase.FORWARD
    return Phase.INPUT_GRAD if op.phase in ("backward", "recomputed") else Phase.OPTIMIZER
