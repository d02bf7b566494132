"""The optimizer's step and the gradients' clipping for n parameters: bound by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Phase, Program
from sim.models.frameworks import framework_of
from sim.models.operators import memory_op

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import Training

# Decay (2 accesses), first moment scaled (2) and joined by the gradient (3), second moment likewise (2 and 3), its root
# (2) divided (2) and shifted (2), the parameter moved (4).
ADAMW_OPERATOR_ACCESSES = 22


def optimizer_items(n_params: int, scenario: Scenario) -> Program:
    """AdamW or SGD over `n_params` parameters (this rank's shard, where it is sharded), in one pass.

    AdamW reads the gradient, reads and writes the parameter that it updates and two moments (24 bytes in fp32), and
    writes the low-precision parameter where the updated one is an fp32 master copy; where it is not one kernel, see
    `ADAMW_OPERATOR_ACCESSES`. SGD without momentum reads the
    gradient, and reads and writes the parameter.

    >>> from types import SimpleNamespace as N
    >>> t = N(param_dtype="bf16", grad_dtype="fp32", optimizer="adamw", optimizer_dtype="fp32", master_weights=None,
    ...       framework="eager", software_date=None)
    >>> optimizer_items(1000, N(for_training=t))[0].bytes
    30000.0
    """
    if n_params <= 0:
        return ()
    t = scenario.for_training
    held = kept_bytes(t)
    updated = held.master or dtype_bytes(t.param_dtype)
    state = 2.0 * (updated + held.moments)
    written = dtype_bytes(t.param_dtype) if held.master else 0.0
    moved = n_params * (dtype_bytes(t.grad_dtype) + state + written)
    if t.optimizer == "adamw" and framework_of(t).adamw_by_operators:
        moved = n_params * (ADAMW_OPERATOR_ACCESSES * updated + written)
    return (memory_op(t.optimizer, Phase.OPTIMIZER, "optimizer", n_params, moved, "fp32", kernel=t.optimizer),)


class KeptBytes(NamedTuple):
    """Bytes of a parameter that the optimizer keeps: Adam's moments, and the fp32 copy of a 16-bit parameter."""

    moments: float
    master: float

    @property
    def total(self) -> float:
        """Both."""
        return self.moments + self.master


def kept_bytes(t: Training) -> KeptBytes:
    """Optimizer states of a parameter: 8 + 4 bytes for AdamW on 16-bit parameters, 4 where all is in 16 bits.

    With 16-bit moments and no master copy a parameter, its 16-bit gradient and its states take 2 + 2 + 4 bytes.
    """
    copied = t.master_weights is None and dtype_bytes(t.param_dtype) < FP32_BYTES
    moments = 2 * dtype_bytes(t.optimizer_dtype) if t.optimizer == "adamw" else 0.0
    return KeptBytes(moments, FP32_BYTES if copied else 0.0)


def clip_items(n_params: int, scenario: Scenario) -> Program:
    """The gradients' norm (read once), then their scaling by the clipping factor (read and written).

    Between the two the squared norms of all ranks' parts are summed: four bytes over the model's groups.
    """
    if n_params <= 0:
        return ()
    t = scenario.for_training
    size = n_params * dtype_bytes(t.grad_dtype)
    return (
        memory_op("grad_norm", Phase.OPTIMIZER, "elementwise", n_params, size, "fp32", kernel="grad_norm"),
        memory_op("grad_scale", Phase.OPTIMIZER, "elementwise", n_params, 2 * size, "fp32", kernel="grad_scale"),
    )


def gradient_buffer_items(n_params: int, scenario: Scenario) -> Program:
    """What Megatron does to its whole gradient buffer besides reducing it (`framework: megatron`).

    It reads it for a norm that shows NaNs, scales it to the mean over data-parallel ranks before it is reduced, and
    zeroes it for the next step (megatron/core/distributed: `check_grads`, `start_grad_sync`, `zero_grad_buffer`). Where
    each micro-batch's gradients are reduced (ZeRO-2 and -3) no more is kept than a shard: `n_params` are those of it.

    Elsewhere gradients are freed rather than zeroed, and NCCL averages.

    >>> from types import SimpleNamespace as N
    >>> t, p = N(framework="megatron", grad_dtype="fp32", software_date=None), N(dp=2, cp=1)
    >>> [i.bytes for i in gradient_buffer_items(1000, N(for_training=t, parallelism=p))]
    [4000.0, 8000.0, 4000.0]
    """
    t, p = scenario.for_training, scenario.parallelism
    if n_params <= 0:
        return ()
    framework, size = framework_of(t), n_params * dtype_bytes(t.grad_dtype)
    passes = {
        "grad_check": 1 * framework.checks_gradients,
        "grad_average": 2 * (framework.averages_gradients and p.dp * p.cp > 1),
        "grad_zero": 1 * framework.zeroes_gradients,
    }
    return tuple(
        memory_op(name, Phase.OPTIMIZER, "elementwise", n_params, count * size, "fp32")
        for name, count in passes.items()
        if count
    )
