"""Where the host waits for a GPU because it needs a number that the GPU computes.

torch copies the number to the host and synchronizes the stream, so the host issues what follows anew
(aten/src/ATen/native/cuda: CUDAScalar.cu, `_local_scalar_dense_cuda`; Nonzero.cu; Unique.cu; SummaryOps.cu, `bincount`;
aten/src/ATen/native: Repeat.cpp; TensorAdvancedIndexing.cpp, whose masks are turned into places by `nonzero`;
BatchLinearAlgebra.cpp, `_linalg_check_errors`, which eigenvalues and singular values end with).
"""

from __future__ import annotations

from sim.core.program import Comm, Phase
from sim.core.timeline import HOST
from sim.inputs.program_file import CapturedOperator

READ = "aten._local_scalar_dense"  # nothing but such a copy
NUMBER_BYTES = 8
WAITS = {
    READ: 1,
    "aten.nonzero": 1,
    "aten.masked_select": 1,
    "aten.masked_scatter_backward": 1,
    "aten.repeat_interleave": 1,
    "aten.equal": 1,
    **dict.fromkeys(("aten._linalg_check_errors", "aten._linalg_eigh", "aten._linalg_svd", "aten.linalg_pinv"), 1),
    "calibrate.grouped_mm": 1,  # where groups end (GroupedMMUtils.h: offs.cpu()); torch's own kernel does not wait
    **dict.fromkeys(("aten._unique2", "aten._unique", "aten.unique_dim", "aten.unique_consecutive"), 1),
    "aten.bincount": 2,  # the least and the largest
}
INDEXING = ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")


def masks_of(op: CapturedOperator) -> int:
    """Return how many masks of an indexing become places; one number put under a mask is filled in instead.

    >>> from sim.inputs.program_file import Tensor
    >>> x, mask, one = Tensor("fp32", (8, 4), ()), Tensor("bool", (8,), ()), Tensor("fp32", (), ())
    >>> def by(name, *inputs): return CapturedOperator(name, "forward", "", inputs, (x,), 1, False)
    >>> masks_of(by("aten.index", x, mask)), masks_of(by("aten.index_put_", x, mask, one))
    (1, 0)
    """
    if op.name not in INDEXING or (op.name != "aten.index" and not op.inputs[-1].shape):
        return 0
    return sum(x.dtype == "bool" for x in op.inputs[1:])


def waits_of(op: CapturedOperator, phase: Phase) -> tuple[Comm, ...]:
    """Return the copies of numbers for which the host waits, in the order of their stream."""
    size = sum(x.bytes for x in op.inputs) if op.name == READ else NUMBER_BYTES
    return (Comm(op.name, "offload", HOST, float(size), phase),) * (WAITS.get(op.name, 0) + masks_of(op))
