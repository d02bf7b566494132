"""The kernels of torch's own cross-entropy of logits that one rank has whole.

torch computes the logarithms of the softmax in one kernel, and their gradient in one
(aten/src/ATen/native/cuda/SoftMax.cu: `log_softmax_cuda_out`, `log_softmax_backward_cuda_out`). A profile of
`calibrate.run` has points of the whole loss; without those each kernel has its own price.
"""

from __future__ import annotations

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute
from sim.models.dims import Dims
from sim.models.operators import F, I, memory_op
from sim.models.torch_kernels.softmax_rows import torch_log_softmax_backward, torch_softmax


def forward_kernels(d: Dims, vocab: int, launched: int) -> tuple[Compute, ...]:
    """The logits' copy in fp32, their log-softmax, and the rest of the `launched` kernels, on one number a token or
    fewer (ATen/native/cuda/NLLLoss2d.cu, Loss.cu: `nll_loss_forward_out_cuda_template`)."""
    n = float(d.tokens * vocab)
    softmax = memory_op(
        "log_softmax", F, "softmax", n, 2 * FP32_BYTES * n, "fp32", kernel=torch_softmax(vocab, FP32_BYTES)
    )
    own = (*_copy(d, n), softmax)
    others = launched - len(own)
    return (*own, memory_op("nll_loss", F, "elementwise", d.tokens, 2 * FP32_BYTES * d.tokens, "fp32", others))


def backward_kernels(d: Dims, vocab: int, launched: int, zeros_bytes: float) -> tuple[Compute, ...]:
    """The gradient of the logarithms, which is zero but for one number a token (4 bytes a logit); the logits' gradient
    of it and of the logarithms (12); its copy in 16 bits. `zeros_bytes`: of a gradient to which this one is added."""
    n = float(d.tokens * vocab)
    kernel = torch_log_softmax_backward(vocab)
    softmax = memory_op("log_softmax_backward", I, "softmax", n, 3 * FP32_BYTES * n, "fp32", kernel=kernel)
    own = (softmax, *_copy(d, n))
    moved = FP32_BYTES * n + zeros_bytes
    return (memory_op("nll_loss_backward", I, "elementwise", n, moved, "fp32", launched - len(own)), *own)


def _copy(d: Dims, n: float) -> tuple[Compute, ...]:
    if d.act_bytes == FP32_BYTES:
        return ()
    return (memory_op("logits_cast", F, "cast", n, (d.act_bytes + FP32_BYTES) * n, d.act),)
