"""Bytes that a rank holds for the whole step: parameters, gradients, optimizer states, workspaces.

States per parameter (Rajbhandari et al. 2020, section 3.1): stored parameter, gradient in `grad_dtype`, and for AdamW
two fp32 moments, with an fp32 master copy where parameters are kept in 16 bits: 2+2+12 with 16-bit gradients, 2+4+12
with fp32 ones, 4+4+8 in fp32, and 2+2+4 with 16-bit moments and no master copy (`step.kept_bytes`). ZeRO-1
shards the optimizer, ZeRO-2 also the gradients, ZeRO-3 also the parameters. Of fp32 parameters that are cast on use,
FSDP frees a layer's 16-bit copies after it; elsewhere (torch.autocast) each layer's backward needs its own, and all
but the embedding's are there. Captured blocks know their states' own bytes, and their casts are saved activations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Block, BlockKind
from sim.inputs.training_config import Training
from sim.models.dims import dims
from sim.models.frozen_weights import format_of
from sim.models.optimizers.step import (
    kept_bytes,
    main_gradient_bytes,
    matrix_kept_bytes,
    trained_bytes,
    update_temporary_bytes,
)
from sim.models.source import captured_of, compute_bytes, source_of
from sim.programs.data_parallel import DataParallel
from sim.programs.gathered_units import gathered_elements
from sim.programs.stages import Stage
from sim.ranks.plan import Plan
from sim.variants.frameworks.records import framework_of, frees_gradients
from topology.spec import GpuSpec


class States(Struct, frozen=True):
    """Bytes that a rank holds for the whole step, and transient bytes of gathering and reducing.

    `gradients` is 0 if gradients are freed between steps (`Block.own`, `zero_grad`); `at_end` is transient memory of
    clipping and optimizer.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    at_end: float = 0.0


class _Elements(Struct, frozen=True):
    """Elements of parameters on one rank: trained dense ones, trained experts', frozen ones, and `sharded`, the trained
    ones of its shard."""

    dense: int
    experts: int
    frozen: float
    sharded: float
    updated: float = 0.0  # of these, those whose optimizer states the rank has

    @property
    def whole(self) -> float:
        return float(self.dense + self.experts)


def states(plan: Plan, stages: Sequence[Stage]) -> States:
    """Parameters, gradients and optimizer states of a rank that holds these stages, by dtype and ZeRO stage."""
    t, dp = plan.scenario.for_training, stages[0].dp
    blocks = [b for s in stages for b in s.blocks]
    if any(b.own is not None for b in blocks):
        return _own_states(plan, stages)
    dense, frozen = sum(b.params for b in blocks), float(sum(b.frozen_params for b in blocks))
    experts = sum(b.expert_params for b in blocks)
    # Experts have fewer replicas than dense layers have, so their states are cut into fewer shards.
    own, own_experts = dense / dp.shard, experts / dp.expert_shard
    updated = own / dp.outer + own_experts / dp.expert_outer
    n = _Elements(dense, experts, frozen, own + own_experts, updated)
    optimizer = _optimizer_bytes(t, dp, blocks, n)
    away, visits = t.optimizer_offload, t.optimizer_offload is True  # the states come for the update, or never
    # A copy of the gradients for the optimizer, which is freed before the next step's first backward.
    cast = FP32_BYTES if dp.engine.shard_bytes and dp.zero >= 1 and away != "cpu" else 0.0
    if main_gradient_bytes(t) > dtype_bytes(t.grad_dtype):
        cast = main_gradient_bytes(t)
    temporary = update_temporary_bytes(t) * (n.updated if dp.zero >= 1 else n.whole)
    return States(
        _parameter_bytes(t, dp, blocks, n) + _reference_bytes(t, stages),
        _gradient_bytes(t, plan.scenario.sum_dtype, stages, n),
        0.0 if away else optimizer,
        _transient_bytes(plan, stages, blocks, n),
        (optimizer if visits else 0.0) + temporary + _copied_gradients(t, dp, blocks, n, cast),
    )


def _copied_gradients(t: Training, dp: DataParallel, blocks: Sequence[Block], n: _Elements, cast: float) -> float:
    """The copy of a rank's gradients for the optimizer, `cast` bytes each, beside what there is until then. Of few at a
    time (`ZeroEngine.updated_elements`) they are joined in one tensor first, when what was gathered is freed
    (deepspeed/runtime/zero/stage3.py: `_partition_all_parameters`, `_prepare_fp32_grad_for_sub_group`)."""
    if not (cast and dp.zero == 3 and dp.engine.updated_elements):
        return cast * (n.updated if dp.zero >= 1 else n.whole)
    gathered = _gathered_bytes(blocks, dp) if dp.passes else 0.0
    return max(0.0, (cast + dtype_bytes(t.grad_dtype)) * min(n.sharded, dp.engine.updated_elements) - gathered)


def _parameter_bytes(t: Training, dp: DataParallel, blocks: Sequence[Block], n: _Elements) -> float:
    """Parameters as they are kept between uses. Of those in few bits ZeRO-3 cuts the numbers; their scales are no
    parameters and stay whole, on the GPU even if parameters lie on the host (bitsandbytes, nn/modules.py:
    `fix_4bit_weight_quant_state_from_module`)."""
    kept, few = dtype_bytes(t.param_dtype), sum(b.few_bit_params for b in blocks)
    data, scale = (own.data, own.scales) if (own := format_of(t.lora)) is not None else (kept, 0.0)
    if dp.zero < 3:
        eight_bit = sum(sum(dp.eight_bit.elements(b)) for b in blocks)  # their tensors hold all orders of them
        wide = n.whole * trained_bytes(t) + (n.frozen - eight_bit) * kept - few * (kept - data - scale)
        return wide + _eight_bit_bytes(dp, blocks)
    scales, trained = few * scale, n.sharded * trained_bytes(t)
    if dp.host.parameters:
        return scales
    # ZeRO-3's shards of 8-bit parameters by rows; what they are gathered to, and its other order, pass.
    found = [dp.eight_bit.elements(b) for b in blocks]
    saved = sum(n / dp.shard + n_experts / dp.expert_shard for n, n_experts in found) * (kept - dp.eight_bit.gathered)
    trained -= saved
    second = sum(b.held_params for b in blocks) / dp.secondary * dp.parameter_bytes if dp.secondary > 1 else 0.0
    return second + trained + n.frozen / dp.shard * kept - few / dp.shard * (kept - data) + scales


def _eight_bit_bytes(dp: DataParallel, blocks: Sequence[Block]) -> float:
    """Parameters in 8 bits that no gather brings, in the orders that are kept (Transformer Engine's tensors own their
    numbers and the transposed ones)."""
    return sum(b.quantized_bytes for b in blocks) if dp.eight_bit.kept and dp.zero < 3 else 0.0


def _reference_bytes(t: Training, stages: Sequence[Stage]) -> float:
    """The weights of a frozen reference beside the trained model, cut as its own are: ZeRO-3 and FSDP shard both,
    others keep it whole (TRL 1.16, trl/models/utils.py: `prepare_deepspeed`, `prepare_fsdp`)."""
    if t.reference != "model":
        return 0.0
    dp, blocks = stages[0].dp, [b for s in stages for b in s.reference]
    experts, held = sum(b.expert_params for b in blocks), float(sum(b.held_params for b in blocks))
    return _parameter_bytes(t, dp, blocks, _Elements(0, experts, held, experts / dp.expert_shard))


def _gradient_bytes(t: Training, sum_dtype: str, stages: Sequence[Stage], n: _Elements) -> float:
    """Gradients that are there for the whole step: none where they are freed between steps or go to the host. Where
    those of a row of micro-batches are reduced at once, the row's stage has whole ones beside the shards."""
    dp = stages[0].dp
    # With ZeRO-2 whole gradients are kept all the same where micro-batches add up before they are reduced.
    gradients_sharded = dp.zero >= 2 and dp.keeps_shards
    gradients = 0.0 if dp.fleeting_gradient_bytes or dp.on_host else (n.sharded if gradients_sharded else n.whole)
    buckets = dp.late_gradient_bytes if dp.zero == 0 and dp.shard * dp.replica > 1 else 0.0  # DDP's
    whole = max(sum(b.params + b.expert_params for b in s.blocks) for s in stages) if reduces_rows(dp) else 0.0
    # A sum that waits for the replicas takes the place of gradients, which torch frees between steps (foreach_reduce),
    # or lies beside them where they are kept.
    own_bytes = dtype_bytes(t.grad_dtype if dp.keeps_shards else sum_dtype)
    held_back = dp.held_back_bytes
    each = max(own_bytes, held_back) if frees_gradients(t, dp.zero) else own_bytes + held_back
    beside = n.whole * dp.gradient_bytes if dp.copies_replicas else 0.0  # buckets that gradients are copied into
    return gradients * (each + buckets) + whole * own_bytes + beside


def reduces_rows(dp: DataParallel) -> bool:
    """True if a row of micro-batches adds up whole gradients, of which a shard stays."""
    return dp.each_row and max(dp.shard, dp.expert_shard) > 1


def _optimizer_bytes(t: Training, dp: DataParallel, blocks: Sequence[Block], n: _Elements) -> float:
    """Moments and master copies, from ZeRO-1 on of the rank's shard."""
    optimizer, of_matrix = kept_bytes(t).total, matrix_kept_bytes(t).total
    dense_matrices = sum(shape.elements for b in blocks for shape in b.matrices)
    expert_matrices = sum(shape.elements for b in blocks for shape in b.expert_matrices)
    zero_1 = dp.zero >= 1
    in_matrices = dense_matrices / (dp.shard if zero_1 else 1) + expert_matrices / (dp.expert_shard if zero_1 else 1)
    # Muon keeps one moment of matrices, and AdamW's two of all else.
    return (n.updated if zero_1 else n.whole) * optimizer + in_matrices * (of_matrix - optimizer)


def _transient_bytes(plan: Plan, stages: Sequence[Stage], blocks: Sequence[Block], n: _Elements) -> float:
    """Copies of parameters that uses make, gathered or cast, and temporaries of the largest block."""
    t, dp, gathered = plan.scenario.for_training, stages[0].dp, 0.0
    if dp.passes:
        gathered = _gathered_bytes(blocks, dp)
    elif dp.casts is None and dtype_bytes(t.param_dtype) > compute_bytes(t.precision):
        gathered = _cast_elements(plan, dp, blocks) * dp.parameter_bytes
    # Quantized copies are there as long as what they were made of: two blocks' where FSDP frees what it gathered.
    orders = dp.eight_bit.kept / dp.eight_bit.gathered if dp.zero == 3 and dp.eight_bit.gathered else 0.0
    beside = (orders - 1) / orders if orders else 1.0  # one order of 8-bit parameters is what is gathered
    quantized = sorted((b.quantized_bytes * beside for b in blocks), reverse=True)
    gathered += sum(quantized[:2] if dp.zero == 3 and dp.reshard and dp.shard > 1 else quantized)
    gathered -= _eight_bit_bytes(dp, blocks)
    experts = any(b.expert_params for b in blocks)
    workspaces = max((b.workspace_bytes for b in blocks), default=0.0) + _workspaces(plan, stages, experts)
    return gathered + workspaces + _bucket_buffers(dp, n)


def _cast_elements(plan: Plan, dp: DataParallel, blocks: Sequence[Block]) -> float:
    """Elements of 16-bit copies of fp32 parameters that are there at once without autocast (`CastCopies`): a block's
    under FSDP, which, where it does not reshard (zero 2), keeps all for the backward. 4-bit matrices are converted one
    at a time (`Block.workspace_bytes`)."""
    wide = dims(plan.scenario).experts_in_fp32
    # Only a tied head casts the embedding's matrix.
    cast = [
        b.held_params - b.few_bit_params + (0 if wide else b.expert_params)
        for b in blocks
        if dp.zero == 3 or b.kind is not BlockKind.EMBEDDING
    ]
    if dp.zero == 3:
        return max(cast, default=0)
    ends = {BlockKind.EMBEDDING, BlockKind.HEAD} <= {b.kind for b in blocks}  # else the output has a matrix of its own
    return sum(cast) + (source_of(plan.scenario).tied_elements() if ends else 0)


def _bucket_buffers(dp: DataParallel, n: _Elements) -> float:
    """Buckets of gradients that stay (see `ZeroEngine.buffers`), and what one is joined to before it is sent."""
    if not dp.engine.buffers or dp.shard * dp.replica == 1:
        return 0.0
    double = dp.zero in (1, 2) and dp.sync == "bucketed"
    joined = min(dp.bucket_bytes, n.whole * dp.gradient_bytes)
    # Buckets have the dtype of the parameters, whatever that of the messages (`_gradient_reduction_buffer_dtype`).
    stays = dp.bucket_bytes * dp.parameter_bytes / dp.gradient_bytes
    return (dp.engine.buffers + double) * stays * (dp.zero > 0) + joined


def _gathered_bytes(blocks: Sequence[Block], dp: DataParallel) -> float:
    """ZeRO-3's whole parameters (`gathered_elements`)."""
    gathered = gathered_elements(blocks, dp) * dp.parameter_bytes
    if dp.gathered_bytes > dp.parameter_bytes or dp.dequantized_copies:  # arrives in a buffer of its own
        made = dp.parameter_bytes * bool(dp.dequantized_copies)  # fp16 numbers, of which parameters are copies
        gathered += max(dp.gathered_params(b) + b.expert_params for b in blocks) * (dp.gathered_bytes + made)
    if dp.host.parameters and dp.shard > 1:  # a unit's shard, as it is copied from the host
        gathered += max(map(dp.host.shard_bytes, blocks), default=0.0)
    return gathered


def _own_states(plan: Plan, stages: Sequence[Stage]) -> States:
    """The states of captured blocks, each with its own bytes."""
    dp, blocks = stages[0].dp, [b for s in stages for b in s.blocks]
    own = [b.own for b in blocks if b.own is not None]
    parameters, frozen, optimizer = (
        sum(x) for x in zip(*[(o.parameters, o.frozen, o.optimizer) for o in own], strict=True)
    )
    trained = sum(b.params for b in blocks)
    copy = _tied_copy(plan, stages)
    copied = copy / (trained - copy) if trained > copy else 0.0  # it has states as all others have
    parameters, optimizer = parameters * (1 + copied), optimizer * (1 + copied)
    captured = captured_of(plan.scenario.model)
    at_end = 0.0 if captured is None else captured.optimizer_peak_bytes * trained / max(1, captured.trained)
    gathered = _gathered_bytes(blocks, dp) if dp.zero == 3 and dp.shard > 1 else 0.0
    return States(
        (parameters + frozen) / dp.shard if dp.zero == 3 else parameters + frozen,
        0.0,
        optimizer / dp.shard if dp.zero >= 1 else optimizer,
        gathered + _workspaces(plan, stages, False),
        at_end / dp.shard if dp.zero >= 1 else at_end,
    )


# Transformer Engine's streams of matmuls beside messages, each with a workspace (common/include/transformer_engine/
# comm_gemm_overlap.h: NVTE_COMM_OVERLAP_MAX_STREAMS; module/base.py: `initialize_ub`).
OVERLAP_STREAMS = 3


class Workspace(Struct, frozen=True):
    """Bytes of one cuBLAS workspace: torch's for a thread and stream, Transformer Engine's for a stream."""

    torch: float
    transformer_engine: float


def matmul_workspace(gpu: GpuSpec) -> Workspace:
    """Both take them from torch's allocator with the first matmul and keep them.

    torch: ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`; Transformer Engine: module/base.py,
    `get_cublas_workspace_size_bytes`. Both are larger from Hopper on (compute capability 9.0); a GPU of no known
    architecture is taken for older if it has no 8-bit floating point.
    """
    if gpu.chip.is_host:
        return Workspace(0.0, 0.0)
    large, stated = 32.0 * 2**20, gpu.chip.large_workspaces
    if "fp8" in gpu.peak_flops_per_s if stated is None else stated:
        return Workspace(large, large)
    return Workspace(8_519_680.0, 4.0 * 2**20)


def _workspaces(plan: Plan, stages: Sequence[Stage], experts: bool) -> float:
    """torch's for the threads of forward and backward; Megatron's layers use Transformer Engine's besides (three where
    matmuls overlap with tensor-parallel messages), and four more on the streams of its grouped matmuls."""
    size, t = matmul_workspace(stages[0].costs.gpu), plan.scenario.training
    if t is None:
        return 2 * size.torch
    framework = framework_of(t)
    if t.cublas_workspace_config is not None and size.torch:
        size = replace(size, torch=chosen_workspace_bytes(t.cublas_workspace_config))
    p = plan.scenario.parallelism
    overlaps = p.tp_overlap == "full" and p.tp > 1 and p.sp and framework.userbuffers is not None
    streams = OVERLAP_STREAMS if overlaps else 1
    grouped = experts and t.moe_grouped_gemm is None
    own = framework.grouped_streams * grouped + framework.engine_workspaces * streams
    return 2 * size.torch + own * size.transformer_engine


def chosen_workspace_bytes(config: str) -> float:
    """torch's workspace by `CUBLAS_WORKSPACE_CONFIG` (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize).

    >>> chosen_workspace_bytes(":4096:2:16:8") / 2**10
    8320.0
    """
    return sum(int(size) * int(count) * 1024.0 for size, count in re.findall(r":(\d+):(\d+)", config))


def _tied_copy(plan: Plan, stages: Sequence[Stage]) -> int:
    """The copy of the embedding matrix on a rank without the first stage: of modules for multi-token prediction, or of
    an output that is tied to it."""
    kinds, source = {b.kind for s in stages for b in s.blocks}, source_of(plan.scenario)
    if BlockKind.EMBEDDING in kinds:
        return 0
    if BlockKind.MTP in kinds:
        return source.copied_elements()
    return source.tied_elements() if BlockKind.HEAD in kinds else 0
