"""How torch runs the captured operators that memory bounds: kernels, and the bytes that they move.

What a record states is from torch's CUDA sources (aten/src/ATen/native/cuda unless another folder is named). A record
that states no bytes is the default: each input is read, and each output written, once. This is too little for
`_cdist_forward`, which reads two rows for each distance. An operator that is not in `KERNELS` is priced as one kernel
of the default's bytes, and counted as unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.inputs.program_file import CapturedOperator
from sim.models.captured.bytes import FOREACH, list_bytes, read_bytes, written_bytes
from sim.models.captured.indices import (
    MASK_KERNELS,
    embedding_gradient_bytes,
    embedding_passes,
    embedding_sorts,
    index_sorts,
    indexed_bytes,
    masked_scatter_bytes,
    masked_select_bytes,
    nonzero_bytes,
    passes,
    rows_bytes,
    taken_bytes,
    unique_bytes,
    unique_kernels,
)
from sim.models.captured.layout import POINTWISE
from sim.models.captured.ordering import sort_kernels, sort_passes, sorted_bytes, top_k_bytes, top_k_kernels
from sim.models.captured.softmaxes import SOFTMAXES, softmax_bytes
from sim.models.captured.waits import masks_of

TRITON = "triton."  # kernels that the code starts itself (calibrate/capture/gpu/triton_kernels.py)
SECTOR_BYTES = 32  # the least that a GPU's memory reads or writes


class Kernels(NamedTuple):
    """How torch runs an operator.

    `kind`: the simulator's kind of operator. `kernels`: how many kernels share the bytes evenly. `moved`: their bytes;
    None: by the default rule (`moved_bytes`). `small`: further kernels, over indices or statistics, whose launch takes
    longer than their work. `passes`: how many of these are passes of a sort, which take longer. `kernel`: the name of
    measured points in a profile; a profile that lacks them prices the operator by the points of its kind.
    """

    kind: str = "elementwise"
    kernels: int = 1
    moved: Callable[[CapturedOperator], float] | None = None
    small: Callable[[CapturedOperator], int] | int = 0
    kernel: str = ""
    passes: Callable[[CapturedOperator], int] | None = None

    def small_kernels(self, op: CapturedOperator) -> int:
        """Return the number of small kernels of an operator."""
        return self.small if isinstance(self.small, int) else self.small(op)

    def sort_passes(self, op: CapturedOperator) -> int:
        """Return how many of the small kernels are passes of a sort."""
        return self.passes(op) if self.passes is not None else 0


def _times(reads: float, writes: float) -> Callable[[CapturedOperator], float]:
    """Return the rule that inputs are read `reads` times and outputs are read or written `writes` times."""
    return lambda op: reads * read_bytes(op) + writes * written_bytes(op)


def _rows_touched(place: int) -> Callable[[CapturedOperator], float]:
    """Return the rule of a loss: its targets, at `place`, the one number of each row that they choose, the result."""

    def moved(op: CapturedOperator) -> float:
        if len(op.inputs) <= place:
            return read_bytes(op) + written_bytes(op)
        targets = op.inputs[place]
        return float(targets.bytes + SECTOR_BYTES * targets.elements) + written_bytes(op)

    return moved


def _into_copy(op: CapturedOperator) -> float:
    """A copy of the first input; then the others are read, and as many elements of the copy read and written."""
    target, others = op.inputs[0], op.inputs[1:]
    source = others[-1] if others else target
    return 2.0 * target.bytes + sum(x.bytes for x in others) + 2.0 * min(source.bytes, target.bytes)


def _into(touches: int) -> Callable[[CapturedOperator], float]:
    """Return the rule of a write into a part of the first input: it has as many elements as the last input.

    They are written (1), or read and written (2). One number (it has no shape) may go to all elements of the target.
    """

    def moved(op: CapturedOperator) -> float:
        target, others = op.inputs[0], op.inputs[1:]
        share = others[-1].elements / target.elements if others and others[-1].shape and target.elements else 1.0
        return sum(x.bytes for x in others) + touches * target.bytes * min(1.0, share)

    return moved


def _put(op: CapturedOperator) -> float:
    """Values are written; in a backward they are added, since only autograd's gradient of an index is then put."""
    return _into(2 if op.phase == "backward" else 1)(op)


def _shape_of_second(writes: int) -> Callable[[CapturedOperator], float]:
    """Return the rule of a backward that asks only the shape of its second input, and writes its result so often."""
    return lambda op: read_bytes(op) - sum(x.bytes for x in op.inputs[1:2]) + writes * written_bytes(op)


def _with_differences(op: CapturedOperator) -> float:
    """Gradients, rows and distances; a gradient for each pair of rows and place, written and read again to sum it."""
    grad, x = op.inputs[:2]
    return read_bytes(op) + written_bytes(op) + 2.0 * grad.bytes * x.shape[-1]


def _images(op: CapturedOperator) -> int:
    """Return the further kernels of an operator that starts one an image (Im2Col.cu: im2col_out_cuda_template)."""
    return op.inputs[0].shape[0] - 1 if op.inputs and len(op.inputs[0].shape) == 4 else 0


def _reduced(op: CapturedOperator) -> float:
    """A loss for each element, written and read again to sum it up (Loss.cpp: mse_loss_out and its like)."""
    return read_bytes(op) + 2.0 * op.inputs[0].bytes + written_bytes(op)


def _of(kernels: Kernels, names: str) -> dict[str, Kernels]:
    return {f"aten.{name}": kernels for name in names.split()}


_ZEROS_FIRST = Kernels(kernels=2, moved=_times(1, 2))  # zeros, to which another kernel adds
_WRITES = Kernels(moved=lambda op: written_bytes(op) or read_bytes(op))
NORM_BACKWARDS = ("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
NORM_OF_ONE_GRADIENT = Kernels("norm")
KERNELS: dict[str, Kernels] = {
    **{name: Kernels() for name in POINTWISE},  # and in place (`is_pointwise`)
    **_of(
        Kernels(),
        "sum mean amax amin max min var var_mean std std_mean prod any all argmin cumsum cumprod cummax cummin "
        "logcumsumexp cumsum_ linalg_vector_norm native_dropout native_dropout_backward zeros ones full "
        "scalar_tensor arange linspace eye randperm histc tril triu "
        "tril_ triu_ repeat roll flip lift_fresh squeeze_ unsqueeze_ as_strided_ avg_pool1d avg_pool2d avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
        "max_pool3d_with_indices upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_nearest_exact1d_backward "
        "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa upsample_trilinear3d "
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward grid_sampler_2d "
        "grid_sampler_3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d col2im searchsorted bucketize dot vdot mv addmv glu glu_backward _weight_norm_interface "
        "_weight_norm_interface_backward _cdist_forward _pdist_forward pixel_shuffle pixel_unshuffle channel_shuffle "
        "complex polar mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
        "_amp_update_scale_ _is_all_true norm tril_indices triu_indices aminmax repeat_interleave equal nansum trace "
        "kthvalue median nanmedian "
        "take poisson _standard_gamma segment_reduce _segment_reduce_backward renorm _assert_async addr "
        "_functional_assert_async multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
        "multilabel_margin_loss_backward soft_margin_loss_backward fractional_max_pool2d _linalg_check_errors",
    ),
    # what has the shape of an input does not read it
    **_of(
        _WRITES,
        "new_full new_zeros new_ones zeros_like ones_like full_like rand randn randint rand_like randn_like "
        "randint_like fill uniform logspace",
    ),
    "prims.inductor_seeds": _WRITES,
    **_of(_WRITES, "fill_ zero_ bernoulli_ normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_"),
    # UpSample*.cu, GridSampler.cpp, *Padding.cu, *Pool*.cu, MaxUnpooling.cu, UnfoldBackwardKernel.cu
    **_of(
        _ZEROS_FIRST,
        "upsample_linear1d_backward upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward "
        "upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward upsample_trilinear3d_backward "
        "grid_sampler_2d_backward grid_sampler_3d_backward unfold_backward max_unpool2d max_unpool3d diag_embed isin",
    ),
    **_of(Kernels(moved=_shape_of_second(1)), "avg_pool2d_backward _adaptive_avg_pool2d_backward"),
    **_of(
        Kernels(kernels=2, moved=_shape_of_second(2)),  # zeros, to which another kernel adds
        "avg_pool3d_backward _adaptive_avg_pool3d_backward reflection_pad1d_backward reflection_pad2d_backward "
        "reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward",
    ),
    "aten.argmax": Kernels(),
    # FakeQuantizeCore.cu: numbers and what is within the range, in one kernel, or each in its own; Distributions.cu
    **_of(
        Kernels(),
        "fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams "
        "_standard_gamma_grad _dirichlet_grad _sample_dirichlet",
    ),
    "aten.fake_quantize_per_channel_affine_cachemask": Kernels(kernels=2, moved=_times(2, 1)),
    # TensorFactories.cpp: places, and three to four functions of them in place
    **_of(Kernels(kernels=5, moved=_times(0, 9)), "hann_window hamming_window blackman_window bartlett_window"),
    # ReduceOps.cpp: what is not zero, as bytes, and their sum; Loss.cpp: five functions, and the mean
    "aten.count_nonzero": Kernels(kernels=2, moved=lambda op: _times(1, 1)(op) + 2.0 * op.inputs[0].elements),
    "aten.soft_margin_loss": Kernels(kernels=6, moved=_times(6, 1)),
    # Unique.cu: a sort of values with their places, what differs from its neighbour, a sum, results
    **_of(
        Kernels(moved=unique_bytes, small=unique_kernels, passes=lambda op: passes(op.inputs[0])),
        "_unique2 _unique unique_dim unique_consecutive",
    ),
    **_of(Kernels(kernels=2, moved=_with_differences), "_cdist_backward _pdist_backward"),  # DistanceKernel.cu
    "aten.bincount": Kernels(kernels=3, moved=_times(3, 2), small=1),  # least, largest and counts; zeros before
    "aten.im2col": Kernels(small=_images),
    "aten.topk": Kernels(moved=top_k_bytes, small=top_k_kernels),
    **_of(Kernels(moved=sorted_bytes, small=sort_kernels, passes=sort_passes), "sort argsort"),
    # ReduceOps.cpp, logsumexp_out_impl: largest, difference, exponential, sum, and five kernels over its results
    "aten.logsumexp": Kernels(kernels=4, moved=_times(6, 1), small=5),
    **_of(Kernels(kernels=2, moved=_reduced), "mse_loss smooth_l1_loss huber_loss binary_cross_entropy"),
    "aten._amp_foreach_non_finite_check_and_unscale_": Kernels(moved=_times(2, 0)),
    # SpectralOps.cpp: cuFFT takes one sweep for a dimension that fits in shared memory; c2r overwrites a copy
    **_of(Kernels(), "_fft_r2c _fft_c2c"),
    "aten._fft_c2r": Kernels(kernels=2, moved=_times(3, 1)),
    **dict.fromkeys(NORM_BACKWARDS, Kernels("norm", 2, _times(1, 2))),
    **_of(Kernels("norm"), "native_layer_norm _fused_rms_norm"),
    # group_norm_kernel.cu: moments, factors, result; in the backward sums, two kinds of factors, result, weights
    "aten.native_group_norm": Kernels("norm", 2, _times(2, 1), small=1),
    "aten.native_group_norm_backward": Kernels("norm", 2, _times(2, 1), small=3),
    **_of(Kernels("norm", kernel="batch"), "native_batch_norm cudnn_batch_norm"),
    **_of(Kernels("norm", kernel="batch_backward"), "native_batch_norm_backward cudnn_batch_norm_backward"),
    # RNN.cu: gates and state in one kernel; in the backward sums over a bias's rows besides
    **_of(Kernels(), "_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    "aten._thnn_fused_lstm_cell_backward_impl": Kernels(small=1),
    "aten._thnn_fused_gru_cell_backward": Kernels(small=2),
    # Generated kernels stream as fast with a reduction in them as without: 0.82 to 0.93 of the bandwidth in steps on an
    # H100 and 0.70 to 0.92 on an H200, where torch's layer norm reaches 0.54 (scenarios/measured/gpu_programs*).
    **dict.fromkeys(("inductor.reduction", "inductor.pointwise"), Kernels()),
    **dict.fromkeys(SOFTMAXES, Kernels("softmax", moved=softmax_bytes)),
    # Of programs captured until November 2026: since then its kernels are operators (attention.cpp: _safe_softmax).
    "aten._safe_softmax": Kernels("softmax", 4, _times(2, 3)),
    **_of(Kernels("embedding", moved=taken_bytes), "embedding index_select gather"),
    "aten.index": Kernels(
        "embedding", moved=indexed_bytes, small=lambda op: MASK_KERNELS * masks_of(op), kernel="index"
    ),
    **_of(
        Kernels("embedding", 2, embedding_gradient_bytes, embedding_sorts, passes=embedding_passes),
        "embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward",
    ),
    # EmbeddingBag.cu: each bag reads its rows
    **_of(
        Kernels("embedding", moved=lambda op: rows_bytes(op) + written_bytes(op)),
        "_embedding_bag _embedding_bag_forward_only",
    ),
    # Embedding.cu, embedding_renorm_cuda_: the indices without repeats; their rows, read and written
    "aten.embedding_renorm_": Kernels("embedding", moved=lambda op: 2.0 * rows_bytes(op), small=2),
    **_of(Kernels("embedding", moved=_put, small=index_sorts, kernel="index_put"), "index_put_ _index_put_impl_"),
    "aten.index_put": Kernels("embedding", small=index_sorts, kernel="index_put"),
    **_of(Kernels("embedding", moved=_into(1)), "scatter_ index_copy_ put_"),
    **_of(Kernels("embedding", moved=_into(2)), "scatter_add_ scatter_reduce_ index_add_"),
    "aten.index_fill_": Kernels("embedding"),
    # IndexKernel.cu, launch_masked_scatter_kernel; a copy of the target before it where it is not in place
    "aten.masked_scatter_": Kernels("embedding", 3, masked_scatter_bytes, small=2),
    "aten.masked_scatter": Kernels(
        "embedding", 4, lambda op: masked_scatter_bytes(op) + 2.0 * written_bytes(op), small=2
    ),
    # Nonzero.cu: a sum and a choice, which start a small kernel each, then places of all dimensions
    "aten.nonzero": Kernels(kernels=3, moved=nonzero_bytes, small=2),
    # TensorAdvancedIndexing.cpp: those places, and an index; in the backward the mask is expanded, and copied first
    "aten.masked_select": Kernels("embedding", 4, masked_select_bytes, small=2),
    "aten.masked_scatter_backward": Kernels("embedding", 5, masked_select_bytes, small=2),
    # Distributions.cpp, multinomial_out: least and largest, sums of rows, random numbers, quotients, the largest, and
    # between them comparisons and checks of single numbers. The host does not wait in torch 2.14; it read two before.
    "aten.multinomial": Kernels(kernels=5, moved=_times(7, 1), small=8),
    # TensorAdvancedIndexing.cpp: a copy of the target, and the same in place
    **_of(
        Kernels("embedding", 2, _into_copy),
        "scatter scatter_add scatter_reduce index_add index_copy index_fill put _unsafe_masked_index_put_accumulate",
    ),
    # Loss.cpp: log_sigmoid(x), 1 - y, its product with x, their difference, and the mean
    "aten.binary_cross_entropy_with_logits": Kernels(kernels=5, moved=_times(5.5, 1)),
    # LossCTC.cu, ctc_loss_gpu_template, ctc_loss_backward_gpu_template: sums from the first frame on; sums from the
    # last on, a filled gradient, its sums by letter, and zeros behind the end of a sequence
    "aten._ctc_loss": Kernels(),
    "aten._ctc_loss_backward": Kernels(
        kernels=4, moved=lambda op: read_bytes(op) + 2.0 * op.inputs[-1].bytes + 3.0 * written_bytes(op)
    ),
    # Loss.cu: nll_loss_forward_reduce_cuda_kernel_2d, nll_loss_backward_out_cuda
    **_of(Kernels("embedding", moved=_rows_touched(1)), "nll_loss_forward nll_loss2d_forward"),
    **_of(Kernels(kernels=2, moved=_rows_touched(2)), "nll_loss_backward nll_loss2d_backward"),
    "aten._to_copy": Kernels("cast"),
    **_of(Kernels("copy"), "clone stack split_with_sizes_copy _chunk_cat _local_scalar_dense"),
    "aten.copy_": Kernels("copy", moved=read_bytes),  # the target is among the inputs, and written alone
    "aten.cat": Kernels("copy", kernel="cat"),
    # native/TensorShape.cpp: zeros, and a copy into a part of them
    **_of(Kernels("copy", 2, _times(2, 1), kernel="slice_backward"), "slice_backward select_backward"),
    "aten.diagonal_backward": Kernels("copy", 2, lambda op: 2.0 * read_bytes(op) + written_bytes(op)),  # on zeros
    "aten.diagonal_copy": Kernels("copy", moved=_times(0, 2)),
    # PadNd.cpp: a filled result, into whose middle the input is copied; the others: a copy of the first input
    "aten.constant_pad_nd": Kernels("copy", 2, _times(2, 1)),
    # Of programs captured until November 2026: since then its copy and masked_fill_ are operators.
    "aten.masked_fill": Kernels(kernels=2, moved=lambda op: read_bytes(op) + 3.0 * written_bytes(op)),
    **_of(Kernels("copy", 2, _into_copy), "slice_scatter select_scatter as_strided_scatter diagonal_scatter"),
    # A fused Adam reads parameters, gradients and moments and writes all but the gradients.
    "aten._fused_adamw_": Kernels("optimizer", moved=_times(7 / 4, 0), kernel="adamw"),
    "aten._fused_adam_": Kernels("optimizer", moved=_times(7 / 4, 0)),
    **_of(Kernels("optimizer", moved=list_bytes), "_fused_sgd_ _fused_adagrad_"),
    "aten._foreach_copy_": Kernels(moved=read_bytes),
    # bitsandbytes 0.50, csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise and its like: the gradient is read alone,
    # though the operator's schema says that it changes.
    **dict.fromkeys(
        ("bitsandbytes.optimizer_update_8bit_blockwise", "bitsandbytes.optimizer_update_32bit"),
        Kernels("optimizer", moved=lambda op: read_bytes(op) + written_bytes(op) - op.inputs[0].bytes),
    ),
}
UNKNOWN = Kernels()


def kernels_of(op: CapturedOperator) -> Kernels:
    """Return how torch runs an operator; what is not known is one elementwise kernel.

    A norm's backward that gives one gradient, as the input's where weights are frozen, is one kernel
    (layer_norm_kernel.cu: LayerNormBackwardKernelImplInternal).
    """
    if op.name in NORM_BACKWARDS and len(op.outputs) == 1:
        return NORM_OF_ONE_GRADIENT
    return KERNELS.get(op.name, UNKNOWN)


def moved_bytes(op: CapturedOperator) -> float:
    """Return the bytes read and written: by the operator's rule, else each tensor once, or twice where it is in place.

    >>> from sim.inputs.program_file import Tensor
    >>> x = Tensor("fp32", (8,), ())
    >>> def add(name, out): return CapturedOperator(name, "forward", "", (x, x), (out,), 1, False)
    >>> moved_bytes(add("aten.add", x)), moved_bytes(add("aten.add_", x))
    (96.0, 96.0)
    """
    rule = kernels_of(op).moved
    if rule is not None:
        return rule(op)
    if op.name.startswith(FOREACH) and op.name.endswith("_"):
        return list_bytes(op)
    if op.name.endswith("_") and not op.name.startswith(TRITON):  # which names what it writes
        return read_bytes(op) + (op.inputs[0].bytes if op.inputs else 0)
    return read_bytes(op) + written_bytes(op)
