"""What a rank computes around its data-parallel messages: gathered parameters are copied into place, gradients on their
way out are copied, joined and divided as `ZeroEngine` says (`models.operators` has their conversion); and the waits for
messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from sim.core.program import Block, Comm, Compute, ModelPart, Phase, Program, Wait
from sim.core.timeline import DP, HOST, REPLICA
from sim.models.operators import memory_op
from sim.programs.data_parallel import DataParallel
from sim.programs.two_levels import quantized_gradients

DDP_ACCESSES = 4  # see `ZeroEngine.copies_replicas`


def waits(comms: Iterable[Comm], phase: Phase) -> list[Wait]:
    """A wait for each communication that runs in the background; one that blocks has no handle to wait for."""
    return [Wait(c.handle, phase) for c in comms if c.handle]


def behind_input(comms: Iterable[Comm]) -> list[Comm]:
    """Return communications that wait for their action's input."""
    return [replace(c, behind_input=True) for c in comms]


def unpack(gathered: Iterable[Comm], dp: DataParallel, phase: Phase) -> list[Compute]:
    """The copy of gathered shards (of every parameter, rank by rank) into whole parameters.

    It reads and writes them once on the computation's stream (torch's FSDP2: `foreach_all_gather_copy_out`).
    Parameters that are gathered in fp32 are written in the precision of the layers; there is no other copy where
    parameters are views of what is gathered (`ZeroEngine.copies_gathered`). 8-bit integers become fp16 numbers, which
    are joined to tensors and cast to bf16 (deepspeed/runtime/zero/partition_parameters.py: `AllGatherCoalescedHandle`).
    """
    if not dp.engine.copies_gathered and dp.gathered_bytes == dp.parameter_bytes:
        return []
    messages = [c for c in gathered if c.stream not in (REPLICA, HOST)]  # shards arrive in place
    size = sum(c.bytes for c in messages)
    elements = size / dp.gathered_bytes
    kernels = 1 if dp.gather_bucket_bytes is None else len(messages)
    moved = size + elements * dp.parameter_bytes
    moved += 2 * dp.dequantized_copies * elements * dp.parameter_bytes
    kernels *= 1 + dp.dequantized_copies
    made = memory_op("unpack", phase, "copy", elements, moved, "bf16", kernels)
    return [replace(made, part=ModelPart.PARAMETER_COPIES)] if size else []


def cast(gathered: Iterable[Comm], dp: DataParallel, phase: Phase) -> list[Compute]:
    """Parameters that ZeRO-1 and -2 gathered in fp32, copied into the 16-bit ones that the layers use.

    What is gathered in 16 bits is gathered into place.
    """
    return unpack(gathered, dp, phase) if dp.gathered_bytes != dp.parameter_bytes else []


def gradients_of(item: Compute) -> tuple[int, int]:
    """Elements of dense and expert weights whose gradient this computation completes: its output's size."""
    if item.phase is not Phase.WEIGHT_GRAD:
        return 0, 0
    if item.kind == "gemm" and len(item.shape) == 4:
        batch, m, n, _ = item.shape
        return batch * m * n, 0
    if item.kind == "grouped_gemm":
        groups, m, n, _ = item.shape
        return 0, groups * m * n
    return 0, 0


def limit_bytes(dp: DataParallel) -> float:
    """Return the bytes at which a bucket of gradients is full; 0: each tensor fills one, infinite: nothing does."""
    if dp.zero == 3 and not dp.engine.buckets_shards:
        return float("inf")
    return {"per_parameter": 0.0, "bucketed": dp.bucket_bytes}.get(dp.sync, float("inf"))


def join_gradients(reduced: Sequence[Comm], dp: DataParallel, tensors: int, elements: float) -> list[Compute]:
    """The copies and the division of gradients before the messages `reduced` send them (`ZeroEngine.joining_accesses`).
    `tensors`: how many gradients; `elements`: theirs, which count only where ZeRO++ quantizes them."""
    if dp.local > 1:
        return quantized_gradients(elements, tensors, (dp.local, dp.shard // dp.local), dp.parameter_bytes)
    size, engine = sum(c.bytes for c in reduced if c.stream == DP), dp.engine
    elements, (each, once) = size / dp.gradient_bytes, engine.joining_kernels
    moved = size * engine.joining_accesses + elements * dp.parameter_bytes * engine.views_accesses
    if dp.copies_replicas:
        moved, each, once = DDP_ACCESSES * size, 2, 0
    if not moved:
        return []
    made = memory_op("join gradients", Phase.WEIGHT_GRAD, "copy", elements, moved, "bf16", each * tensors + once)
    return [replace(made, part=ModelPart.OPTIMIZER, looped=dp.copies_replicas)]  # torch's reducer is in C++


def after_backward(blocks: tuple[Block, ...], dp: DataParallel) -> Program:
    """Gradients reduced once all backwards are done (`DataParallel.at_the_end`), nothing beside them."""
    if not dp.at_the_end or dp.each_micro_batch or dp.zero == 3:
        return ()
    dense, experts = sum(b.params for b in blocks), sum(b.expert_params for b in blocks)
    tensors = sum(len(b.tensors) for b in blocks)
    reduced = dp.reduce("all", dense, experts, "", tensors=tensors)
    return (*join_gradients(reduced, dp, tensors, dense + experts), *reduced)
