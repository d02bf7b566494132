"""The optimizer's step and the gradients' clipping for n parameters: bound by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.dtypes import dtype_bytes
from sim.models.operators import memory_op
from sim.program import Comm, Item, Phase, Program

if TYPE_CHECKING:
    from sim.scenario import Scenario

FP32_BYTES = 4.0


def optimizer_items(n_params: int, scenario: Scenario, norm_ranks: int = 1) -> Program:
    """Clipping, then AdamW or SGD over `n_params` parameters (this rank's shard, where it is sharded), in one pass.

    The gradients' norm is reduced over `norm_ranks` ranks (one fp32 number: over the model's ranks, then over those
    that shard the optimizer). AdamW reads the gradient, reads and writes the fp32 parameter and two fp32 moments
    (24 bytes), and writes the low-precision parameter where the fp32 one is a master copy. SGD without momentum reads
    the gradient and reads and writes the fp32 parameter.
    """
    if n_params <= 0:
        return ()
    t = scenario.training
    assert t is not None
    low = 0.0 if dtype_bytes(t.param_dtype) == FP32_BYTES else dtype_bytes(t.param_dtype)
    state = 24.0 if t.optimizer == "adamw" else 8.0
    moved = n_params * (dtype_bytes(t.grad_dtype) + state + low)
    update = memory_op(t.optimizer, Phase.OPTIMIZER, "optimizer", n_params, moved, "fp32")
    return (*clip_items(n_params, scenario, norm_ranks), update)


def clip_items(n_params: int, scenario: Scenario, norm_ranks: int = 1) -> Program:
    """The gradients' norm (read once), its reduction, and their scaling (read and written)."""
    t, p = scenario.training, scenario.parallelism
    assert t is not None
    size = n_params * dtype_bytes(t.grad_dtype)
    items: list[Item] = [memory_op("grad_norm", Phase.OPTIMIZER, "elementwise", n_params, size, "fp32")]
    groups = [g for g, wanted in (("model", p.tp * p.pp > 1), ("shard", p.zero > 0 and p.shard_size > 1)) if wanted]
    if norm_ranks > 1:
        items += [Comm(f"grad norm over {g}", "all_reduce", g, FP32_BYTES, Phase.OPTIMIZER) for g in groups]
    items.append(memory_op("grad_scale", Phase.OPTIMIZER, "elementwise", n_params, 2 * size, "fp32"))
    return tuple(items)
