"""Parameters and gradients that are sharded, or sent, on two levels: over ranks near by, and over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, ModelPart, Phase
from sim.core.timeline import DP, REPLICA
from sim.models.operators import memory_op

FOUR_BITS = 0.5  # bytes
SECOND_ACCESSES = 3  # a second copy is zeroed, and copied out of the whole parameter


def behind_replicas(gathers: Sequence[Comm], shards: tuple[int, int]) -> list[Comm]:
    """Return a unit's gathers, each behind the gather over replicas of the part that its rank has of a shard.

    So a step begins where replicas of shards share the optimizer (`outer_dp_sharding_strategy`). Megatron's FSDP does
    it for every gather while `microbatch_count` is 0, which the end of a backward raises: for the first backward, too,
    and for all forwards that a pipeline's stage runs before it (megatron_fsdp 0.6.1, megatron_fsdp.py:
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


def quantized_messages(name: str, elements: float, tensors: int, ranks: tuple[int, int], handle: str) -> list[Comm]:
    """The exchanges of gradients in 4 bits (ZeRO++, Wang et al. 2023, arXiv 2306.10209, section 3.3), each over `ranks`
    of a node, then over one rank of each node.

    DeepSpeed goes through a bucket tensor by tensor, and sends the scales of each by a message of their own (0.19.8,
    runtime/comm/coalesced_collectives.py: `all_to_all_quant_reduce`). `tensors` are taken as equal, and as square
    matrices, whose scales are an fp32 number for each row.
    """
    own = elements / max(1, tensors)
    of_tensor = {"": own * FOUR_BITS, " scales": math.sqrt(own) * FP32_BYTES}
    out: list[Comm] = []
    for i in range(tensors if elements else 0):
        for group, parts, n in (("local", 1, ranks[0]), ("between", ranks[0], ranks[1])):
            for what, size in of_tensor.items():
                own_handle = handle and f"{handle}{group}{i}{what}"
                label, phase = f"{name} gradients{what}", Phase.WEIGHT_GRAD
                made = Comm(label, "all_to_all", group, size / parts, phase, not handle, own_handle, DP)
                out += [made] if n > 1 else []
    return out


def quantized_gradients(elements: float, tensors: int, ranks: tuple[int, int], parameter_bytes: float) -> list[Compute]:
    """The kernels around `quantized_messages` (`all_to_all_quant_reduce`).

    Each tensor is copied into its bucket, and quantized. Behind the exchange within nodes the ranks' parts are added up
    and quantized again (`quantized_reduction`); behind the exchange between nodes they are dequantized and added up
    from 0 (`sum` of `chunk`), node by node, and divided.
    """
    if not elements:
        return []
    local, nodes = ranks
    part = elements / local
    moved = elements * 2 * parameter_bytes
    moved += elements * (parameter_bytes + FOUR_BITS)  # swizzle_quant
    moved += (elements + part) * FOUR_BITS  # quantized_reduction
    moved += part * (FOUR_BITS + parameter_bytes)  # dequantize
    moved += part / nodes * (2 + 3 * (nodes - 1) + 2) * parameter_bytes
    kernels = tensors * (4 + nodes + 1)
    made = memory_op("quantize gradients", Phase.WEIGHT_GRAD, "copy", elements, moved, "bf16", kernels)
    return [replace(made, part=ModelPart.OPTIMIZER)]


def second_copy(elements: float, tensors: int, ranks: int, parameter_bytes: float) -> list[Compute]:
    """The copy of a rank's part of gathered parameters behind their first forward, tensor by tensor (DeepSpeed 0.19.8,
    runtime/zero/partition_parameters.py: `_partition_param_sec`), which `ranks` ranks share."""
    moved = SECOND_ACCESSES * elements / ranks * parameter_bytes
    made = memory_op("second copy", Phase.FORWARD, "copy", elements / ranks, moved, "bf16", 2 * tensors)
    return [replace(made, part=ModelPart.PARAMETER_COPIES)]
