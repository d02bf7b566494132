"""Kernels that a framework's host launches after it has waited for the device, which is idle until they arrive."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, INT64_BYTES
from sim.core.program import BLOCK_END, Program
from sim.models.dims import Dims
from sim.models.operators import F, memory_op


def after_loss_check(d: Dims) -> Program:
    """Return the kernels, on one number each, that the host launches after it has waited for the loss to check that it
    is a number (Megatron-LM's `validate_result` in core/rerun_state_machine.py, before it `assert not loss.isnan()`).

    The host's time for them counts in full.
    """
    kernels = d.framework.kernels_after_loss_check
    if not kernels:
        return ()
    record = memory_op("loss_record", F, "elementwise", 1, kernels * 2 * FP32_BYTES, "fp32", kernels)
    return (BLOCK_END, replace(record, plain_host=True))


def after_batch_sizes(d: Dims) -> Program:
    """Return the kernels of tokens, labels, masks and positions [batch, seq] that the host launches on every stage
    after it has waited for a batch's sizes, which Megatron-LM of 2023 broadcasts on the device and copies back
    (core/tensor_parallel/data.py: `sizes_cuda.cpu()`).

    The host's time for them counts in full.
    """
    kernels = d.framework.kernels_after_batch_sizes
    if not kernels:
        return ()
    made = memory_op("batch", F, "elementwise", d.tokens, kernels * d.tokens * INT64_BYTES, "fp32", kernels)
    return (replace(made, plain_host=True), BLOCK_END)


def after_loss_filter(d: Dims) -> Program:
    """Return the kernels, on one number each, that the host launches behind a micro-batch once it has waited for its
    backward to read whether the loss is a number (Transformers' Trainer: `logging_nan_inf_filter`); they stand before
    the next forward, which takes the same time.

    The host's time for them counts in full.
    """
    kernels = d.framework.kernels_after_loss_filter
    if not kernels:
        return ()
    made = memory_op("loss_filter", F, "elementwise", 1, kernels * 2 * FP32_BYTES, "fp32", kernels)
    return (replace(made, plain_host=True), BLOCK_END)
