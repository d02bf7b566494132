"""ZeRO-3's parameters in host memory: copied to the GPU before they are gathered, their gradients copied back behind
each reduction (docs/offload.md).

torch's FSDP2 copies each shard, in the dtype that is kept, on the stream of its copy-in, for which the gather waits
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `all_gather_inputs`; _fsdp_collectives.py: `foreach_all_gather`),
its first FSDP on a stream of its own (torch/distributed/fsdp/_runtime_utils.py: `_unshard`), and DeepSpeed on that of
its gathers (runtime/zero/partition_parameters.py: `all_gather_coalesced`). Gradients go to the host on the stream of
their reduction, so that the next reduction waits (`foreach_reduce`; `_offload_grad`; runtime/zero/stage3.py:
`partition_grads`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.operator_kinds import HOST_UPDATE
from sim.core.program import Block, BlockKind, Comm, Compute, ModelPart, Phase
from sim.core.timeline import HOST, TO_HOST
from sim.inputs.scenario import Scenario
from sim.models.frozen_weights import format_of
from sim.models.operators import memory_op
from sim.models.optimizers.step import trained_bytes
from sim.variants.frameworks.zero import ZeroEngine

SUM_ACCESSES = 3  # a gradient and the sum are read, and the sum is written


class OnHost(Struct, frozen=True):
    """What ZeRO-3 keeps in host memory; bytes are of an element. `shards`: ranks that share dense parameters, and
    experts. `gradient_bytes`: of a reduced gradient's copy; 0: none is copied while a backward runs.

    `adds`: from the second micro-batch on the host adds gradients up, and its thread waits for each copy first (FSDP2,
    `foreach_reduce`: `to_accumulate_grad`). `sums_visit`: sums come to the GPU, and in the last micro-batch go back in
    fp32 (DeepSpeed, `partition_grads`). Neither: sums stay on the GPU and each is copied (torch's first FSDP,
    `_accumulate_sharded_grad`). `waits`: the computation waits for each copy of parameters (FSDP2 on one rank,
    _fsdp_param_group.py: `wait_for_unshard`).
    """

    parameters: bool = False
    shards: tuple[int, int] = (1, 1)
    parameter_bytes: float = 0.0
    trained_bytes: float = 0.0
    few_bits_bytes: float = 0.0
    tied: int = 0  # elements of a matrix that the output gathers besides its own
    gradient_bytes: float = 0.0
    adds: bool = False
    sums_visit: bool = False
    waits: bool = False

    def shard_bytes(self, block: Block) -> float:
        """Bytes of a rank's shard of all that a block holds."""
        whole = block.params * self.trained_bytes
        whole += (block.frozen_params - block.few_bit_params) * self.parameter_bytes
        whole += block.few_bit_params * self.few_bits_bytes
        whole += self.tied * self.parameter_bytes if block.kind is BlockKind.HEAD else 0.0
        return whole / self.shards[0] + block.expert_params * self.parameter_bytes / self.shards[1]

    def fetched(self, unit: Sequence[Block], gathers: list[Comm], phase: Phase, handle: str) -> list[Comm]:
        """A unit's gathers behind the copy of its shard, which runs beside the computation if there is a `handle`."""
        size = sum(map(self.shard_bytes, unit)) if self.parameters else 0.0
        if not size:
            return gathers
        own = "" if self.waits or not handle else f"{handle}h"
        copy = Comm(f"{unit[0].name} parameters", "reload", HOST, size, phase, not own, own, HOST)
        return [copy, *(replace(c, after=own) for c in gathers)]

    def copied(self, elements: float, last: bool) -> list[tuple[str, float]]:
        """Kinds and bytes of the copies behind a reduction that leaves `elements`. `last`: of the step's last
        micro-batch."""
        size = elements * self.gradient_bytes
        copies = [("offload", size)] if size else []
        if size and self.sums_visit:
            copies += [("reload", size), *([("offload", elements * FP32_BYTES)] if last else [])]
        return copies

    def summed(self, copies: Sequence[Comm]) -> list[Compute]:
        """The host's sum of copied gradients and those of the micro-batches before."""
        moved = SUM_ACCESSES * sum(c.bytes for c in copies)
        made = memory_op("gradients on the host", Phase.WEIGHT_GRAD, HOST_UPDATE, moved, moved, "fp32")
        return [replace(made, part=ModelPart.OPTIMIZER)] if moved else []


def to_host(comms: Sequence[Comm]) -> list[Comm]:
    """Return the copies among a unit's reductions."""
    return [c for c in comms if c.stream == TO_HOST]


def on_host_of(scenario: Scenario, engine: ZeroEngine, shards: tuple[int, int], tied: int) -> OnHost:
    """What a scenario keeps in host memory with ZeRO-3; the rules have seen to the rest."""
    t, p = scenario.for_training, scenario.parallelism
    deepspeed = 3 in engine.on_host_at
    if p.zero < 3 or t.optimizer_offload != "cpu" or not (t.parameter_offload or deepspeed):
        return OnHost()
    few = format_of(t.lora)
    return OnHost(
        parameters=t.parameter_offload,
        shards=shards,
        parameter_bytes=dtype_bytes(t.param_dtype),
        trained_bytes=trained_bytes(t),
        few_bits_bytes=0.0 if few is None else few.data,
        tied=tied if p.reshard_after_forward else 0,
        gradient_bytes=dtype_bytes(t.grad_dtype),
        adds=engine.fsdp_version == 2,
        sums_visit=deepspeed,
        waits=engine.fsdp_version == 2 and shards[0] == 1,
    )
