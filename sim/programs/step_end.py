"""The program of a rank's step behind its last action: gradients, clipping, optimizer, parameter gathers."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Comm, Compute, Item, Phase, Program, Wait
from sim.core.timeline import HOST
from sim.inputs.training_config import Training
from sim.models.optimizers.muon import Dealt, dealt_out
from sim.models.optimizers.step import (
    NOTHING_DEALT,
    gradient_buffer_items,
    host_update_items,
    shard_items,
    state_bytes,
    unscales,
)
from sim.models.source import source_of
from sim.programs.around_messages import after_backward
from sim.programs.data_parallel import DataParallel
from sim.programs.held_tensors import loops_at_the_end
from sim.programs.shared_gradients import sum_shared_once
from sim.programs.stages import Stage
from sim.programs.step_metrics import metric_items
from sim.programs.updated_parameters import early_gather, gather_after_optimizer
from sim.ranks.plan import Plan
from sim.variants.optimizers import OPTIMIZERS

NORM_BYTES = 4.0
# Handles of what other programs bring about: `graph.assemble` says what they wait for.
NORM_BEFORE = "gradient norm of the pipeline ranks before"
LAST_INPUT_GRADIENT = "last input gradient"


def epilogue(stages: tuple[Stage, ...], plan: Plan, tied: bool) -> Program:
    """The end of a rank's step: what is left of gradient synchronization, clipping, optimizer, parameter gathers.

    `tied`: this rank is one of several that hold the embedding matrix (`embedding_ranks`).
    """
    scenario = plan.scenario
    source = source_of(scenario)
    blocks = tuple(b for s in stages for b in s.blocks)
    dp, t = stages[0].dp, scenario.for_training
    dense, experts = sum(b.params for b in blocks), sum(b.expert_params for b in blocks)
    sharded = (-(-dense // dp.shard), -(-experts // dp.expert_shard)) if dp.zero >= 1 else (dense, experts)
    updated = (-(-sharded[0] // dp.outer), -(-sharded[1] // dp.expert_outer))
    buffered = sum(sharded) if dp.keeps_shards else dense + experts
    replicas = scenario.parallelism.dp * scenario.parallelism.cp
    out: list[Item] = [*gradient_buffer_items(buffered, t, replicas), *after_backward(blocks, dp)]
    out += sum_shared_once(blocks, dp, dtype_bytes(t.grad_dtype))
    if tied:
        out = _with_tied_gradients(out, source.copied_elements(), dp, t)
    dense, experts = updated
    if plan.group_size("copies") > 1:
        size = (dense + experts) * dp.gradient_bytes
        out.append(Comm("DualPipe copies' gradients", "all_reduce", "copies", size, Phase.OPTIMIZER))
    whole = OPTIMIZERS[t.optimizer].whole_matrices
    dealt = dealt_out(blocks, dp.shard, dp.expert_shard, dp.zero) if whole else NOTHING_DEALT
    end = source.step_items(dense + experts, dealt, loops_at_the_end(blocks, dp))  # nothing without parameters
    if dp.zero:
        out += shard_items(dense + experts, t)
    out += [*end.prepared, *_overflow_flags(plan, dp)]
    if t.gradient_clipping:
        scaling = end.scaling if t.optimizer_offload != "cpu" else ()  # there the host scales them
        norm = () if _norm_on_host(dp) else end.norm
        out += [*norm, *_norm_reductions(plan, dp), *scaling]
    if dp.gathered_early:
        return (*out, *_first_stage_first(stages, plan))
    visits = end.update and t.optimizer_offload
    out += _with_host(end.update, dense + experts, dealt, t, dp) if visits else end.update
    out += dp.eight_bit.casts(blocks, dp.shard, dp.expert_shard)
    out += gather_after_optimizer(blocks, dp)
    return (*out, *metric_items(plan, t))


def _first_stage_first(stages: tuple[Stage, ...], plan: Plan) -> Program:
    """The update of a rank's first stage, then that of its others beside the gather of the first one's parameters
    (Megatron-Core, optimizer/optimizer.py: `ChainedOptimizer._step`)."""
    source, dp, updates = source_of(plan.scenario), stages[0].dp, list[Program]()
    all_blocks = tuple(b for s in stages for b in s.blocks)
    for blocks in (stages[0].blocks, all_blocks[len(stages[0].blocks) :]):
        dense, experts = sum(b.params for b in blocks), sum(b.expert_params for b in blocks)
        own = -(-dense // dp.shard) + -(-experts // dp.expert_shard)
        # Each loops over its own parameters on the host.
        share = sum(len(b.tensors) for b in blocks) / max(1, sum(len(b.tensors) for b in all_blocks))
        items = source.step_items(own, NOTHING_DEALT, loops_at_the_end(blocks, dp)).update
        update = (_of_host(i, share) for i in items)
        updates.append((*update, *dp.eight_bit.casts(blocks, dp.shard, dp.expert_shard)))
    gathered, end = early_gather(stages[0].blocks, dp)
    return (*updates[0], *gathered, *updates[1], *end)


def _of_host(item: Item, share: float) -> Item:
    return replace(item, host_share=share) if isinstance(item, Compute) else item


def _with_tied_gradients(out: list[Item], elements: int, dp: DataParallel, t: Training) -> list[Item]:
    """Sum the gradients of the embedding matrix (of `elements`) over the pipeline ranks that hold a copy of it."""
    held = dp.shard if dp.zero == 3 or dp.keeps_shards else 1  # else whole gradients are kept, and summed
    size = elements * dp.gradient_bytes / held
    summed = Comm("tied embedding gradients", "all_reduce", "embedding", size, Phase.OPTIMIZER)
    if not t.optimizer_post_validation:
        return [*out, summed]
    # It runs beside the weight gradients that are left, so that rank 0 need not wait for the last rank's. The
    # output layer's weight gradient comes before it (`clear` in weight_grad_store.py of Qi et al.'s fork).
    started = replace(summed, blocking=False, handle="tied")
    return [Wait(LAST_INPUT_GRADIENT, Phase.OPTIMIZER), started, *out, Wait("tied", Phase.OPTIMIZER)]


def _norm_on_host(dp: DataParallel) -> bool:
    """Tell whether gradients lie on the host when torch's FSDP takes their norm."""
    return dp.host.parameters and dp.engine.fsdp_version > 0


def _with_host(update: Program, n_params: int, dealt: Dealt, t: Training, dp: DataParallel) -> Program:
    """The update of a rank's parameters, whose optimizer states lie in host memory between steps.

    They come to the GPU for it and go back (Megatron-Core's --offload-optimizer-states), or stay: then fp32 gradients
    go to the host, if backwards have not copied them, and its CPUs' parameters come back, if they do not stay there,
    too (DeepSpeed's offload_optimizer and offload_param).
    """
    if t.optimizer_offload == "cpu":
        sent = Comm("gradients to the host", "offload", HOST, n_params * FP32_BYTES, Phase.OPTIMIZER)
        size = n_params * dtype_bytes(t.param_dtype)
        back = Comm("updated parameters", "reload", HOST, size, Phase.OPTIMIZER)
        return (
            *([] if dp.host.gradient_bytes else [sent]),
            *host_update_items(n_params, t, _norm_on_host(dp)),
            *([] if dp.host.parameters else [back]),
        )
    size = state_bytes(n_params, dealt, t)
    return (
        Comm("optimizer states", "reload", HOST, size, Phase.OPTIMIZER),
        *update,
        Comm("optimizer states", "offload", HOST, size, Phase.OPTIMIZER),
    )


def _overflow_flags(plan: Plan, dp: DataParallel) -> list[Item]:
    """The all-reduces of four bytes that tell all holders of gradients whether one of them has overflowed.

    Only a scaled loss (fp16) has them.

    With post-validation it goes along the pipeline with the norm (`get_reduced_global_states` of Qi et al.'s fork).
    """
    t = plan.scenario.for_training
    groups = _groups_of_norm(plan, dp) if unscales(t) and not t.optimizer_post_validation else []
    return [Comm("gradient overflow", "all_reduce", g, FP32_BYTES, Phase.OPTIMIZER) for g in groups]


def _norm_reductions(plan: Plan, dp: DataParallel) -> list[Item]:
    """The all-reduces of four bytes that sum the squared norm over all ranks that hold different gradients.

    With post-validation a rank adds its part to the sum that the pipeline rank before it sends, and goes on with that
    (Qi et al. 2024, section 4; `do_partially_reduce_local_total_norm` of their fork of Megatron-LM).
    """
    sums = [Comm("gradient norm", "all_reduce", g, NORM_BYTES, Phase.OPTIMIZER) for g in _groups_of_norm(plan, dp)]
    along_pipeline = plan.scenario.for_training.optimizer_post_validation
    return [*sums, Wait(NORM_BEFORE, Phase.OPTIMIZER)] if along_pipeline else [*sums]


def _groups_of_norm(plan: Plan, dp: DataParallel) -> list[str]:
    """The groups over which a number that each rank has of its own gradients (norm, overflow) is reduced."""
    model = "tp" if plan.scenario.for_training.optimizer_post_validation else "model"
    own = dp.zero not in dp.engine.clips_whole_at
    shards = ["shard"] if dp.zero >= 1 and dp.shard > 1 and own else []
    shards += ["replica"] if dp.outer > 1 else []
    return [*([model] if plan.group_size(model) > 1 else []), *shards]
