"""Experts' tensors in buffers of a size that does not depend on the router, and a stash for what they keep.

Megatron-Core since 0.18: with `moe_expert_rank_capacity_factor` c a rank's experts get buffers for c times the mean
number of copies (transformer/moe/token_dispatcher.py: `num_permuted_tokens`), so that no kernel's size depends on the
router and one CUDA graph holds the step. Kernels compute the copies that came.

Without a stash each tensor that is kept has the buffer's size. With `moe_paged_stash` (transformer/moe/paged_stash.py)
what the fused experts keep of the copies that came is copied into pages on the device behind their forward, beside the
next layer up to its experts, and back behind the backward of the layer after (`PipelinePostScheduleFunction`,
`PipelinePreScheduleFunction`). The pages are allocated once: f times the most that the mean number of copies keeps
(`moe_paged_stash_buffer_size_factor_cuda`). The tensors themselves have the buffer's size and are there while they are
copied and while the layer's backward runs.

Left out: the copies' time, which other kernels hide, and what they take of the bandwidth: each byte is read and written
twice; pages in host memory for copies beyond the device's; the run without either where even these are too few.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.inputs.training_config import Training
from sim.models.operators import Operator


def in_static_buffers(training: Training, parts: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The parts of a rank's experts, which keep and hold what the mean number of copies needs, in such buffers."""
    capacity, stash = training.moe_expert_rank_capacity_factor, training.moe_paged_stash_buffer_size_factor_cuda
    if capacity is None:
        return parts
    beside = 0.0 if stash is None else capacity * sum(s.bytes for p in parts for s in p.saved)
    kept = capacity if stash is None else stash
    return tuple(
        replace(
            p,
            saved=tuple(s._replace(bytes=s.bytes * kept) for s in p.saved),
            forward_bytes=p.forward_bytes * capacity + beside,
            backward_bytes=p.backward_bytes * capacity + beside,
        )
        for p in parts
    )
