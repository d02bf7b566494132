"""The optimizer's step and the gradients' clipping for n parameters: bound by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.dtypes import dtype_bytes
from sim.models.operators import memory_op
from sim.program import Phase, Program

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

FP32_BYTES = 4.0


def optimizer_items(n_params: int, scenario: Scenario) -> Program:
    """AdamW or SGD over `n_params` parameters (this rank's shard, where it is sharded), in one pass.

    AdamW reads the gradient, reads and writes the fp32 parameter and two fp32 moments (24 bytes), and writes
    the low-precision parameter where the fp32 one is a master copy. SGD without momentum reads the gradient,
    and reads and writes the fp32 parameter.

    >>> from types import SimpleNamespace as N
    >>> t = N(param_dtype="bf16", grad_dtype="fp32", optimizer="adamw")
    >>> optimizer_items(1000, N(training=t))[0].bytes
    30000.0
    """
    if n_params <= 0:
        return ()
    t = scenario.training
    assert t is not None
    stored = dtype_bytes(t.param_dtype)
    state = 24.0 if t.optimizer == "adamw" else 8.0
    moved = n_params * (dtype_bytes(t.grad_dtype) + state + (stored if stored < FP32_BYTES else 0.0))
    return (memory_op(t.optimizer, Phase.OPTIMIZER, "optimizer", n_params, moved, "fp32"),)


def clip_items(n_params: int, scenario: Scenario) -> Program:
    """The gradients' norm (read once), then their scaling by the clipping factor (read and written).

    Between the two the squared norms of all ranks' parts are summed: four bytes over the model's groups.
    """
    if n_params <= 0:
        return ()
    t = scenario.training
    assert t is not None
    size = n_params * dtype_bytes(t.grad_dtype)
    return (
        memory_op("grad_norm", Phase.OPTIMIZER, "elementwise", n_params, size, "fp32"),
        memory_op("grad_scale", Phase.OPTIMIZER, "elementwise", n_params, 2 * size, "fp32"),
    )


def gradient_buffer_items(n_params: int, scenario: Scenario) -> Program:
    """What Megatron does to its whole gradient buffer besides reducing it (`elementwise: megatron`).

    It reads it for a norm that shows NaNs, scales it to the mean over data-parallel ranks before it is reduced, and
    zeroes it for the next step (megatron/core/distributed: `check_grads`, `start_grad_sync`, `zero_grad_buffer`). Where
    each micro-batch's gradients are reduced (ZeRO-2 and -3) no more is kept than a shard: `n_params` are those of it.

    Elsewhere gradients are freed rather than zeroed, and NCCL averages.

    >>> from types import SimpleNamespace as N
    >>> t, p = N(elementwise="megatron", grad_dtype="fp32"), N(dp=2, cp=1)
    >>> [i.bytes for i in gradient_buffer_items(1000, N(training=t, parallelism=p))]
    [4000.0, 8000.0, 4000.0]
    """
    t, p = scenario.training, scenario.parallelism
    assert t is not None
    if t.elementwise != "megatron" or n_params <= 0:
        return ()
    size = n_params * dtype_bytes(t.grad_dtype)
    passes = {"grad_check": 1, "grad_average": 2 if p.dp * p.cp > 1 else 0, "grad_zero": 1}
    return tuple(
        memory_op(name, Phase.OPTIMIZER, "elementwise", n_params, count * size, "fp32")
        for name, count in passes.items()
        if count
    )
