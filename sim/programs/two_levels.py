"""Parameters and gradients that are sharded, or sent, on two levels: over ranks near by, and over all of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sim.core.program import Comm, Compute, ModelPart, Phase
from sim.core.timeline import REPLICA
from sim.models.operators import memory_op

FOUR_BITS = 0.5  # bytes
SECOND_ACCESSES = 3  # a second copy is zeroed, and copied out of the whole parameter


def behind_replicas(gathers: Sequence[Comm], shards: tuple[int, int]) -> list[Comm]:
    """Return a unit's gathers, each behind the gather over replicas of the part that its rank has of a shard.

    So a step begins where replicas of shards share the optimizer (`outer_dp_sharding_strategy`). Megatron's FSDP does it
    for every gather while `microbatch_count` is 0, which the end of a backward raises: for the first backward, too, and
    for all forwards that a pipeline's stage runs before it (megatron_fsdp 0.6.1, megatron_fsdp.py:
    `all_gather_and_wait_parameters_ready`, `_root_post_backward`; param_and_grad_buffer.py: `all_gather_params`).
    `shards`: ranks that share dense parameters, and experts.
    """
    out: list[Comm] = []
    for message, (group, size) in zip(gathers, _groups(gathers, shards), strict=True):
        handle = message.handle and f"{message.handle}o"
        outer = replace(message, group=group, bytes=message.bytes / size, handle=handle, stream=REPLICA)
        out += [outer, replace(message, after=handle)]
    return out


def _groups(gathers: Sequence[Comm], shards: tuple[int, int]) -> list[tuple[str, int]]:
    by_group = {"shard": ("replica", shards[0]), "expert_shard": ("expert_replica", shards[1])}
    return [by_group[message.group] for message in gathers]


def quantized_gradients(reduced: Sequence[Comm], local: int, parameter_bytes: float) -> list[Compute]:
    """The kernels of gradients that are exchanged in 4 bits (ZeRO++, Wang et al. 2023, arXiv 2306.10209, section 3.3;
    DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py: `all_to_all_quant_reduce`).

    Before the exchange within nodes gradients are quantized; behind it the parts of `local` ranks are added up and
    quantized again; behind the exchange between nodes they are dequantized and added up, on as many numbers. Their
    scales are not counted.
    """
    elements = sum(c.bytes for c in reduced if c.group == "local") / FOUR_BITS
    if not elements:
        return []
    part = elements / local
    moved = elements * (parameter_bytes + FOUR_BITS)  # swizzle_quant
    moved += (elements + part) * FOUR_BITS  # quantized_reduction
    moved += part * (FOUR_BITS + parameter_bytes) + part * 2 * parameter_bytes  # dequantize, sum of chunks
    made = memory_op("quantize gradients", Phase.WEIGHT_GRAD, "copy", elements, moved, "bf16", 4)
    return [replace(made, part=ModelPart.OPTIMIZER)]


def second_copy(elements: float, ranks: int, parameter_bytes: float) -> list[Compute]:
    """The copy of a rank's part of gathered parameters behind their first forward (DeepSpeed 0.19.8,
    runtime/zero/partition_parameters.py: `_partition_param_sec`), which `ranks` ranks share."""
    moved = SECOND_ACCESSES * elements / ranks * parameter_bytes
    made = memory_op("second copy", Phase.FORWARD, "copy", elements / ranks, moved, "bf16", 2)
    return [replace(made, part=ModelPart.PARAMETER_COPIES)]
