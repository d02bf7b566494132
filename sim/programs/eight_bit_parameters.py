"""Layers' matrices that are parameters in the matmuls' 8 bits, without 16-bit ones (`training.fp8_param_gather`).

Megatron-Core's distributed optimizer updates fp32 copies as usual (optimizer/distrib_optimizer.py:
`_copy_main_params_to_model_params`). Of each matrix of which it has a part, a rank copies that to 16 bits, finds its
largest value where the scale is the step's own, and casts it; between the two all ranks agree on the largest values
(fp8_utils.py: `quantize_param_shard`; Transformer Engine, tensor/utils.py: `cast_master_weights_to_fp8`). What is then
gathered has 8 bits. With MXFP8 the copy to 16 bits is gathered, in the gradients' buffer, and cast where it arrives
(`_copy_main_params_to_param_buffer`; distributed/param_and_grad_buffer.py: `finish_param_sync`). Left out: that such
matrices have buckets of their own.

Its FSDP shards and gathers them in 8 bits, forward and backward, and makes the other order of what a backward gathers
(megatron_fsdp.py: `fp8_create_transpose_cache`; here it is made in the forward, which takes as long).

Beside adapters these matrices are frozen. They stay in 8 bits, and are neither updated nor gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Block, Comm, Item, ModelPart, Phase
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.operators import memory_op
from sim.models.precision.quantizing import cached_weight_bytes, gathers_parameters


class EightBitParameters(Struct, frozen=True):
    """Bytes of an element of such a matrix: `kept` in all its orders, `gathered`; `reads` of 16 bits by its cast, 0
    where none is made of a shard; `block`: numbers with one scale, 0: the whole matrix."""

    kept: float = 0.0
    gathered: float = 0.0
    reads: int = 0
    block: int = 0

    def elements(self, b: Block) -> tuple[float, float]:
        """Return of a block the dense elements and those of experts that are such parameters."""
        if not self.kept:
            return 0.0, 0.0
        found = b.quantized_bytes / self.kept
        experts = min(found, float(b.expert_params))
        return found - experts, experts

    def shares(self, b: Block, usual_bytes: float) -> tuple[float, float]:
        """Return what of `usual_bytes` a gather brings of a block's average dense element and of an expert's."""
        saved = 1.0 - self.gathered / usual_bytes
        pairs = zip(self.elements(b), (b.params, b.expert_params), strict=True)
        dense, experts = (1.0 - saved * found / max(1, whole) for found, whole in pairs)
        return dense, experts

    def casts(self, blocks: Sequence[Block], shard: int, expert_shard: int) -> list[Item]:
        """Return what casts a rank's part of these matrices, beyond the copy to 16 bits, and the message about their
        largest values. A rank has a part of one in `shard` matrices, and at the ends of its shard of one more."""
        if not self.reads:
            return []
        out: list[Item] = []
        found = [self.elements(b) for b in blocks]
        counts = [(_matrices(b), sum(m.number for m in b.expert_matrices)) for b in blocks]
        for group, ranks, i in (("shard", shard, 0), ("expert_shard", expert_shard, 1)):
            whole, matrices = sum(f[i] for f in found), sum(c[i] for c, f in zip(counts, found, strict=True) if f[i])
            if not whole:
                continue
            n, kernels = whole / ranks, self.reads * (matrices // ranks + 1)
            moved = n * (self.reads * dtype_bytes("bf16") + dtype_bytes("fp8"))
            cast = memory_op("cast 8-bit parameters", Phase.OPTIMIZER, "cast", n, moved, "bf16", kernels)
            out.append(replace(cast, part=ModelPart.OPTIMIZER))
            size = FP32_BYTES * (whole / self.block if self.block else matrices)
            if ranks > 1:
                out.append(Comm("largest values of 8-bit parameters", "all_reduce", group, size, Phase.OPTIMIZER))
        return out


def _matrices(b: Block) -> int:
    """Count a block's dense matrices as they are kept, several of one input in one tensor."""
    least = min((m.rows * m.columns for m in b.matrices), default=0)
    return sum(n >= least for n in b.tensors) if least else 0


def eight_bit_parameters(scenario: Scenario) -> EightBitParameters:
    """The record of a scenario; all 0 where parameters have 16 bits or more."""
    d = dims(scenario)
    if not d.eight_bit_parameters or d.recipe is None:
        return EightBitParameters()
    kept = cached_weight_bytes(d)
    if d.lora is not None or not gathers_parameters(d.recipe):
        return EightBitParameters(kept, d.act_bytes)
    own_bytes = d.recipe.weight_scale_bytes
    block = round(FP32_BYTES / own_bytes) if own_bytes else 0
    return EightBitParameters(kept, dtype_bytes("fp8"), 1 if d.recipe.from_history else 2, block)
