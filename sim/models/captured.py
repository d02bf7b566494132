"""A captured program's operators as the simulator prices them.

Matmuls and attention are priced by their shapes. All else is bound by memory: its inputs are read and its outputs
written once. An operator that is not known here is priced by its bytes and counted (`unknown`).
"""

from __future__ import annotations

import math

from sim.core.program import TORCH_SOFTMAX, TORCH_SOFTMAX_BACKWARD, Compute, Phase, Role
from sim.inputs.program_file import BYTES, CapturedOperator, Tensor
from sim.models.captured_layout import casts_of, is_transposing, kernel_of, single_elements
from sim.models.captured_recurrent import RECURRENT, recurrent_computes
from sim.models.head import ALIGNED
from sim.prices.roofline import shape_flops

MATMUL_INPUTS = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1}  # place of the left matrix
CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")
GROUPED = ("aten._grouped_mm", "calibrate.grouped_mm")
ATTENTION = "aten._scaled_dot_product_"
FLASH = "flash2"
KINDS = {
    "norm": "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm "
    "native_batch_norm native_batch_norm_backward",
    "softmax": "_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data",
    "embedding": "embedding embedding_dense_backward index index_put index_put_ index_select index_add gather scatter "
    "scatter_ scatter_add index_add_ scatter_add_ _unsafe_masked_index_put_accumulate nll_loss_forward",
    "cast": "_to_copy",
    "copy": "clone copy_ cat stack split_with_sizes_copy _chunk_cat slice_backward select_backward constant_pad_nd "
    "_local_scalar_dense",
    "elementwise": "add add_ sub mul mul_ div div_ neg pow rsqrt sqrt reciprocal exp log tanh tanh_backward sigmoid "
    "sigmoid_backward silu silu_backward gelu gelu_backward relu threshold_backward where sum mean amax max min var "
    "native_dropout native_dropout_backward fill_ zero_ zeros ones full zeros_like ones_like full_like new_zeros "
    "new_ones scalar_tensor arange cos sin cumsum eq ne lt le gt ge bitwise_and bitwise_or bitwise_not logical_and "
    "logical_or logical_not clamp clamp_ clamp_min masked_fill masked_fill_ rsub abs square softplus topk sort argsort "
    "histc bincount softplus_backward tril triu floor_divide remainder repeat roll flip linalg_vector_norm "
    "nll_loss_backward erf unsqueeze_ squeeze_ lerp_ addcmul_ addcdiv_ randn normal_ uniform_ random_ "
    "bernoulli_ logical_and_ relu_ all any max_pool2d_with_indices max_pool2d_with_indices_backward",
    "optimizer": "_fused_adamw_ _fused_adam_ _fused_sgd_",
}
KIND_OF = {f"aten.{name}": kind for kind, names in KINDS.items() for name in names.split()}
KIND_OF |= {"inductor.pointwise": "elementwise", "inductor.reduction": "norm"}
KERNELS = {
    "aten.native_layer_norm_backward": 2,
    "aten._fused_rms_norm_backward": 2,
    "aten.slice_backward": 2,
    "aten.select_backward": 2,
    "aten.embedding_dense_backward": 2,
    "aten.nll_loss_backward": 2,
    "aten.cat": 1,
}
KERNEL_OF = {  # of operators whose kernel differs from their kind's; where a profile lacks it, the kind's points serve
    "aten._softmax": TORCH_SOFTMAX,
    "aten._log_softmax": TORCH_SOFTMAX,
    "aten._softmax_backward_data": TORCH_SOFTMAX_BACKWARD,
    "aten._log_softmax_backward_data": TORCH_SOFTMAX_BACKWARD,
    "aten._safe_softmax": "safe",
    "aten.cat": "cat",
    "aten.slice_backward": "slice_backward",
    "aten.select_backward": "slice_backward",
    "aten.native_batch_norm": "batch",
    "aten.native_batch_norm_backward": "batch_backward",
    "aten.index": "index",
    "aten.index_put": "index_put",
    "aten.index_put_": "index_put",
    "aten._fused_adamw_": "adamw",
}
SECTOR_BYTES = 32  # the least that a GPU's memory reads or writes
WRITES_ALONE = ("aten.fill_", "aten.zero_", "aten.bernoulli_", "aten.normal_", "aten.uniform_", "aten.random_")
FLOATS = ("fp32", "bf16", "fp16", "fp8")
COPIES = ("aten.clone", "aten.copy_")


def computes_of(op: CapturedOperator) -> tuple[Compute, ...]:
    """A launched operator as the simulator's own: one, or the many that a recurrent layer is."""
    return recurrent_computes(op) if op.name in RECURRENT else (compute_of(op),)


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
    if op.name in CONVOLUTIONS and len(op.inputs) > 1 and op.outputs:
        return _convolution(op)
    if op.name.startswith(ATTENTION) and len(op.inputs) >= 3:
        return _attention(op)
    return _by_bytes(op)


def _matmul(op: CapturedOperator) -> Compute:
    first = MATMUL_INPUTS[op.name]
    left, right, out = op.inputs[first], op.inputs[first + 1], op.outputs[0]
    batch = left.shape[0] if len(left.shape) == 3 else 1
    m, k, n = *left.shape[-2:], right.shape[-1]
    role, phase = Role.OUTPUT, _phase(op)
    if op.phase == "backward":
        weights = batch == 1 and len(left.shape) == 2 and _transposed(left)  # dW = dYᵀ X, or Xᵀ dY
        role, phase = (Role.WEIGHT_GRADIENT, Phase.WEIGHT_GRAD) if weights else (Role.INPUT_GRADIENT, Phase.INPUT_GRAD)
    moved = float(left.bytes + right.bytes + out.bytes)
    aligned = BYTES.get(out.dtype, 4) > 2 or all(x % ALIGNED == 0 for x in (m, n, k))
    shape = (batch, m, n, k)
    flops = 2.0 * batch * m * n * k
    return Compute(op.name, "gemm", shape, left.dtype, flops, moved, phase, role=role, aligned=aligned)


def _convolution(op: CapturedOperator) -> Compute:
    """A convolution as the matmul that it is: outputs' places by output channels by what one of them sees.

    A backward has as many such products as it gives gradients (input, weight; a bias's is a sum). A transposed one is
    the same with input and output exchanged. It has the input's channels first in its weight; where both have as many,
    its stride shows, which at least doubles the places.
    """
    backward = op.name == CONVOLUTIONS[1]
    x, weight = op.inputs[1:3] if backward else op.inputs[:2]
    y = op.inputs[0] if backward else op.outputs[0]
    products = max(1, sum(len(t.shape) > 1 for t in op.outputs)) if backward else 1
    same = x.shape[1] == y.shape[1]
    if y.shape[1] != weight.shape[0] or (same and _places(y) >= 2 * _places(x)):
        x, y = y, x
    groups = max(1, x.shape[1] // weight.shape[1])
    shape = (products * groups, _places(y), weight.shape[0] // groups, math.prod(weight.shape[1:]))
    flops = 2.0 * math.prod(shape)
    moved = float(sum(t.bytes for t in (*op.inputs, *op.outputs)))
    role = Role.INPUT_GRADIENT if backward else Role.OUTPUT
    kernel = "convolution_backward" if backward else "convolution"
    return Compute(op.name, "gemm", shape, y.dtype, flops, moved, _phase(op), products, role=role, kernel=kernel)


def _places(x: Tensor) -> int:
    """Return the number of images times pixels (samples, voxels) of a tensor [images, channels, …]."""
    return x.shape[0] * math.prod(x.shape[2:])


def _transposed(x: Tensor) -> bool:
    return bool(x.strides) and x.strides[-2] == 1


def _grouped(op: CapturedOperator) -> Compute:
    """Groups share the rows evenly: nobody knows them before the data does."""
    left, right, ends = op.inputs[:3]
    groups = max(1, ends.shape[0] if ends.shape else 1)
    weights = len(right.shape) == 2
    rows = -(-(left.shape[1] if weights else left.shape[0]) // groups)
    m, n, k = (left.shape[0], right.shape[1], rows) if weights else (rows, right.shape[-1], left.shape[1])
    role, phase = Role.OUTPUT, _phase(op)
    if op.phase == "backward":
        role, phase = (Role.WEIGHT_GRADIENT, Phase.WEIGHT_GRAD) if weights else (Role.INPUT_GRADIENT, Phase.INPUT_GRAD)
    moved = float(left.bytes + right.bytes + sum(x.bytes for x in op.outputs))
    kernels = 1 if op.name == GROUPED[0] else groups  # torch's own kernel has bf16 alone
    flops = 2.0 * groups * m * n * k
    return Compute(op.name, "grouped_gemm", (groups, m, n, k), left.dtype, flops, moved, phase, kernels, role=role)


def _attention(op: CapturedOperator) -> Compute:
    backward = "backward" in op.name
    q, _, v = op.inputs[1:4] if backward else op.inputs[:3]
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    shape = (batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim, int(op.causal))
    kind = "attention_backward" if backward else "attention_forward"
    moved = float(sum(x.bytes for x in (*op.inputs, *op.outputs)))
    # a causal mask halves the work, as the simulator's own attention has it: half the diagonal is left out
    flops = shape_flops(kind, (*shape[:-1], 0)) * (0.5 if op.causal else 1.0)
    on_gpu = "for_cpu" not in op.name
    kernel = FLASH if "flash" in op.name and on_gpu else ""  # the memory-efficient one is nowhere measured by itself
    return Compute(op.name, kind, shape, q.dtype, flops, moved, _phase(op), kernel=kernel)


def _by_bytes(op: CapturedOperator) -> Compute:
    """An operator bound by memory; see `moved_bytes`."""
    kind = "permute" if op.name in COPIES and is_transposing(op) else kind_of(op.name)
    floats = [x for x in (*op.outputs, *op.inputs) if x.dtype in FLOATS]
    elements = max((x.elements for x in (*op.outputs, *op.inputs)), default=1)
    dtype = floats[0].dtype if floats else "fp32"
    kernel = kernel_of(op) if kind == "elementwise" else KERNEL_OF.get(op.name, "")
    return Compute(
        op.name,
        kind,
        (max(1, elements),),
        dtype,
        float(elements),
        moved_bytes(op),
        _phase(op),
        KERNELS.get(op.name, 1),
        kernel=kernel,
        single_elements=single_elements(op),
        casts=casts_of(op),
    )


def moved_bytes(op: CapturedOperator) -> float:
    """Bytes read and written: each tensor once, of tables that are looked up what is taken out of them.

    A loss's forward reads one log-probability of a row, its backward fills the whole gradient with zeros and writes one
    number of a row (ATen/native/cuda/Loss.cu: nll_loss_forward_reduce_cuda_kernel_2d, nll_loss_backward_out_cuda).
    A fused Adam reads parameters, gradients and moments and writes all but the gradients; other operators in place
    write what they read.
    """
    read, written = float(sum(x.bytes for x in op.inputs)), float(sum(x.bytes for x in op.outputs))
    if op.name in ("aten.embedding", "aten.index", "aten.index_select", "aten.gather"):
        return 2 * written + sum(x.bytes for x in op.inputs[1:])
    if op.name == "aten.nll_loss_forward" and len(op.inputs) > 1:
        return _rows_touched(op.inputs[1]) + written
    if op.name == "aten.nll_loss_backward" and len(op.inputs) > 2:
        return _rows_touched(op.inputs[2]) + written
    if op.name.startswith("aten._fused_adam"):
        return read * 7 / 4
    if op.name in ("aten.copy_", "aten._foreach_copy_"):
        return read  # the target is among the inputs, and written alone
    if op.name.endswith("_") and not op.name.startswith("aten._foreach"):
        return read if op.name in WRITES_ALONE else read + (op.inputs[0].bytes if op.inputs else 0)
    if op.name.startswith("aten._foreach") and op.name.endswith("_"):
        return 2 * read
    return read + written * KERNELS.get(op.name, 1)


def _rows_touched(targets: Tensor) -> float:
    """Bytes of the targets of a loss and of the one element of each row that they choose."""
    return float(targets.bytes + SECTOR_BYTES * targets.elements)


def kind_of(name: str) -> str:
    """The simulator's kind of an operator bound by memory; for many tensors, and what is not known: elementwise."""
    return KIND_OF.get(name, "elementwise")


def known(name: str) -> bool:
    """True where an operator is priced as itself, not by its bytes alone."""
    matmuls = (*MATMUL_INPUTS, *GROUPED, *CONVOLUTIONS, *RECURRENT)
    return name in matmuls or name.startswith((ATTENTION, "aten._foreach")) or name in KIND_OF


def _phase(op: CapturedOperator) -> Phase:
    if op.phase == "forward":
        return Phase.FORWARD
    return Phase.INPUT_GRAD if op.phase in ("backward", "recomputed") else Phase.OPTIMIZER
