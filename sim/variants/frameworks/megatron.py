"""Records of Megatron-Core and of the trainers that run it (see `sim.variants.frameworks.records`)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from sim.core.program import Phase
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.parts import (
    GROUP_BYTES,
    GROUP_KERNELS,
    TRANSFORMER_ENGINE,
    AttentionCopies,
    ContextKernels,
    Former,
    RouterKernels,
    UnfusedLoss,
)
from sim.variants.frameworks.userbuffers import RECIPES, UserBuffers
from sim.variants.frameworks.zero import ZeroEngine
from sim.variants.optimizers import UpdateOperators

EVERY_STAGE = (0, 1, 2, 3)  # of ZeRO
# megatron/core/tensor_parallel/cross_entropy.py. On one number a token, forward: targets' mask (3), their place in this
# shard (4), their logits (4), logarithm and difference (2), mean over the text's mask and over replicas (6); backward:
# the target's one subtracted (6), the mean's gradient (3) (`loss_func` in pretrain_gpt.py).
MEGATRON_LOSS = UnfusedLoss(6, 2, 32.0, 8.0, overwrites="logits", forward_token_kernels=19, backward_token_kernels=9)
# megatron/core/fusions/fused_cross_entropy.py: the same functions, each compiled by itself (`jit_fuser`). What torch's
# compiler makes of them: logits to fp32 with their maximum; exponentials in place with their sum (8 bytes a logit); the
# division in place (8); backward a copy of the softmax (8), and the gradient made of it (4), written in 16 bits and
# into the softmax (4). On one number a token, forward: mask and target's logit (2), loss, mean (6); backward: the
# target's one subtracted, the mean's gradient (3). Target's logit and sum are one message.
NATIVE_LOSS = MEGATRON_LOSS._replace(
    forward_kernels=3,
    forward_bytes=16.0,
    backward_bytes=12.0,
    overwrites="copy",
    forward_token_kernels=9,
    backward_token_kernels=4,
    reductions=2,
)
# megatron/core/transformer/moe/moe_utils.py and router.py. Forward: softmax, top-k and its sort, cast, probabilities
# (3) and map (5) written to [tokens, experts]; the auxiliary loss's own scores (8: softmax, top-k, sort, map), tokens
# of each expert, four kernels of the loss, three of its record. Backward: gather, cast, top-k (2), softmax, cast; of
# the auxiliary loss scale (2), product (3), softmax, cast, and the sum of both gradients. With a capacity: top-k of
# probabilities over tokens, its mask (4), product. 9 accesses of the layer's dtype and 55 bytes; 5 and 40.
MEGATRON_ROUTER = RouterKernels(
    28, 14, 9, 55.0, 5, 40.0, capacity_kernels=6, group_kernels=GROUP_KERNELS, group_bytes=GROUP_BYTES
)
# `moe_router_fusion`, Transformer Engine from 2.6 on: choice, scores of the loss, tokens of each expert, the loss and
# its record (3); random logits (2) where the balance is forced. Backward: both kernels, the loss's, its scale, the sum.
FUSED_ROUTER = RouterKernels(9, 6, 2, 16.0, 2, 16.0, capacity_kernels=6, torch_top_k=False)

ROUTERS = {False: MEGATRON_ROUTER, True: FUSED_ROUTER}  # by `training.moe_router_fusion`

# Fusions of core/transformer/transformer_config.py that are keys of `training`, and the facts that each turns off.
FUSIONS: Mapping[str, tuple[str, ...]] = {
    "apply_rope_fusion": ("fuses_rope", "fuses_latent_rope", "assembles_in_latent_rope"),
    "bias_activation_fusion": ("fuses_activation", "compiles_activation"),
    "bias_dropout_fusion": ("fuses_residual",),
}


def facts_off(training: object) -> frozenset[str]:
    """Return the facts of a record that a scenario's `training` turns off by the keys of `FUSIONS`. The kernel of
    `fused_single_qkv_rope` is asked for by that key alone (transformer/attention.py: `split_qkv`)."""
    off = {key: facts for key, facts in FUSIONS.items() if getattr(training, key) is False}
    if getattr(training, "fused_single_qkv_rope", False):
        off.pop("apply_rope_fusion", None)
    return frozenset(fact for facts in off.values() for fact in facts)


def has_fusions(framework: Framework) -> bool:
    """Tell whether a record is of Megatron-Core, whose fusions (`FUSIONS`) and router (`ROUTERS`) have switches."""
    return framework.router in ROUTERS.values()


# megatron/core/distributed: distributed_data_parallel.py, `bucket_size`, and no buckets where `pp_rank > 0` or
# `disable_bucketing` (megatron/training/training.py: `model_chunk_idx > 0`); param_and_grad_buffer.py of Megatron-FSDP,
# `fetch_bucket`: parameters are views of a bucket. `align_grad_reduce`, true by default: `grad_sync_func`, which
# core/pipeline_parallel/schedules.py calls behind a stage's last backward (`backward_step_helper_postprocess`). That it
# is called on rank r of a pipeline r passes later is left out. Gathers: `align_param_gather`, which starts them with
# the step, is of interleaved stages alone (megatron/training/arguments.py); else the hook before a module's forward
# starts the gather of its bucket unless the bucket before has done so (`finish_param_sync`). Megatron-FSDP
# (core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py): layers alone are units (`fsdp_unit_modules`), what lies
# beside them has no hook that frees it, and units alone have a hook before their backward; `_grad_acc` copies each
# gradient into its bucket, of which the shard is added to zeros (param_and_grad_buffer.py: `local_grad +=
# reduced_grad`); `suggested_communication_unit_size` is at least a billion, half of it for gathers ahead
# (`suggested_AG_prefetch_size`; all_gather_params issues them in the model's order), all of it for reductions
# (`wait_for_previous_grad_reduce` frees their buckets); `outer_fsdp_group_grad_reduce`: the last micro-batch's. Each
# gather waits for what was computed when it was sent (`all_gather_stream.wait_stream`). With layers of more than half a
# billion parameters both are twice a layer's, which is left out, as one layer is ahead either way.
MEGATRON_ZERO = ZeroEngine(
    fsdp_version=0,
    flat_at=(1,),  # optimizer/distrib_optimizer.py: `_build_model_and_main_param_groups`
    or_torch=True,
    bucket_elements=(40_000_000, 1_000_000),
    first_stage_alone=True,
    gathers_when_used=True,
    aligns_stages=True,
    sums_shared_once=True,
    ends_stay=True,
    fills_buckets=True,
    ahead_elements=500_000_000,
    queued_elements=1_000_000_000,
    replicas_once=True,
    input_first=(Phase.FORWARD, Phase.INPUT_GRAD),
    copies_gathered=False,
    gathers_apart=False,
    shards_apart=False,
    adds_up_as_sent=False,
)
_TE2 = Former("2025-02", {"skips_transposes": False}, "Transformer Engine 2.0")
# Megatron-Bridge before 0.4.0, training/config.py: "Gradient accumulation fusion is not supported with Megatron FSDP,
# setting to False"; Megatron-Core asks for Transformer Engine 2.10 since 0.17.0. Both are of April 2026.
_NO_FUSED_SHARDS = Former("2026-04", {"accumulates_sharded": False}, "Megatron-Core 0.17, Megatron-Bridge 0.4")
# In Megatron-Core 0.14.0 of October 2025, not yet in 0.13.1 of August.
_NO_ORIGINALS = Former("2025-10", {"saves_originals": False}, "before Megatron-Core 0.14")
# transformer/moe of 0.17: no 256 in `get_align_size_for_quantization` (moe_utils.py), fused experts are not padded;
# transformer_config.py: "moe_shared_expert_overlap only works with alltoall token dispatcher".
_EXPERTS_OF_017 = Former(
    "2026-06", {"fused_experts_tile": 0, "shares_beside_libraries": False}, "before Megatron-Core 0.18"
)
# optimizer/layer_wise_optimizer.py of 0.17: "Megatron DDP handle allreduce grad"; 0.18.0 has buckets of whole matrices.
_ALL_REDUCED = MEGATRON_ZERO._replace(all_reduces_for_matrices=True)
_MATRICES = Former("2026-06", {"zero": _ALL_REDUCED}, "before Megatron-Core 0.18")
# Before 0.9.0 `zero_grad` in optimizer/distrib_optimizer.py starts the first gather, on every rank.
_GATHERS_FIRST = Former("2024-10", {"zero": _ALL_REDUCED._replace(gathers_when_used=False)}, "before Megatron-Core 0.9")
_EXPERIMENTAL_LATENT_ROPE = Former(
    "2026-02",
    {"fuses_latent_rope": False, "assembles_in_latent_rope": False},
    "before Megatron-Core 0.16 core/fusions/fused_mla_yarn_rope_apply.py needs --enable-experimental",
)
# pytorch/attention/dot_product_attention/context_parallel.py: `AttnFuncWithCPAndKVP2P`, `AttnFuncWithCPAndQKVOA2A`.
_CONTEXT = ContextKernels(copies=True, own_last=True)
# In 2.8.0 of October 2025; 2.7.0 of September has `combine_tensors([dk_, dv_])` and exchanges [out, dout].
_JOINED_CONTEXT = Former(
    "2025-10", {"context": _CONTEXT._replace(joins_gradients=True, exchanges_output=True)}, "Transformer Engine 2.8"
)
MEGATRON = Framework(
    "megatron",  # Megatron-Core with Transformer Engine's layers
    nccl_from="nvidia",  # docker/.ngc_version.dev: nvcr.io/nvidia/pytorch
    fuses_rmsnorm=True,
    fuses_rope=True,
    scales_rope_apart=True,
    fuses_activation=True,
    compiles_activation=True,
    clamps_apart=True,
    copies_around_scans=True,
    fuses_residual=True,
    passes_biases_on=True,
    fuses_hyper_connections=True,  # use_fused_mhc
    fuses_adapter_sum=True,
    fuses_latent_rope=True,
    assembles_in_latent_rope=True,
    joins_norms=True,
    norm_kernel=TRANSFORMER_ENGINE,
    rope_clocks=(0.5, 0.57),  # queries and keys of Llama 3 8B on an H100 (scenarios/measured/gpu_megatron)
    norm_backward_accesses=3,
    casts_routers=False,
    skips_masked_scores=True,
    attention_kernel="megatron",
    copies_split_projection=True,
    tokens_first=True,
    joins_split_gradients=True,  # torch.split in get_query_key_value_tensors
    overlaps_weight_gradients=True,
    userbuffers=UserBuffers(),
    context=_CONTEXT,
    loss=MEGATRON_LOSS,
    native_loss=NATIVE_LOSS,
    vocabulary_multiple=128,  # megatron/training/arguments.py: make_vocab_size_divisible_by
    merges_projections=True,
    accumulates_in_matmul=True,
    accumulates_sharded=True,
    keeps_empty_gradients=True,
    quantizer="te",
    fp8_recipe="delayed",
    saves_originals=True,
    skips_transposes=True,
    weights_experts_after_activation=True,
    sends_probabilities=True,
    shares_beside_libraries=True,
    counts_copies="gathered",
    routes_by_chance=True,
    maps_copies=True,  # moe_permute_fusion
    router=MEGATRON_ROUTER,
    loops_over_experts=True,
    pads_experts=True,
    fused_experts_tile=256,
    biases_experts_one_by_one=True,
    splits_experts_over_tp=True,
    needs_sp_for_experts=True,
    runs_experts_apart=True,
    engine_workspaces=1,
    grouped_streams=4,
    checkpoint_stops_early=None,
    autocasts=False,  # core/transformer/module.py: Float16Module
    # Whether it is infinite (2); the mask's sum, copied and cast (3); a copy of the loss, and both as one record (3);
    # the loss by tokens and micro-batches, tokens in all (4); its scale, the first gradient (2). Backward: scale,
    # tokens, micro-batches, mask, and the mean's gradient for the loss's kernel (6). As traced with Megatron-Core 0.16
    # on an H100 (scenarios/measured/gpu_megatron).
    kernels_after_loss_check=20,
    checks_gradients=True,
    averages_gradients=True,
    zeroes_gradients=True,
    zero=MEGATRON_ZERO,
    keeps_gradients_at=EVERY_STAGE,
    widens_gradients=True,
    copies_updated=True,
    lion_operators=UpdateOperators(4, 1, 2, 2, kernels=3),  # core/optimizer: Lion of emerging_optimizers 0.3
    adamw_kernels=(),  # core/optimizer: Apex's or Transformer Engine's FusedAdam
    plain_host=False,
    captures_layers=True,
    fills_stages=True,
    emitted_for=("megatron",),
    former=(
        _MATRICES,
        _EXPERTS_OF_017,
        _NO_FUSED_SHARDS,
        _EXPERIMENTAL_LATENT_ROPE,
        _NO_ORIGINALS,
        _JOINED_CONTEXT,
        _TE2,
        Former("2025-01", {"kernels_after_loss_check": 8}, "core/rerun_state_machine.py looks for infinity, too"),
        _GATHERS_FIRST,
        Former(
            "2024-01",
            {
                "compiles_activation": False,  # torch.jit.script before torch 2.2
                "joins_norms": False,
                "norm_kernel": "",
                "copies_split_projection": False,
                # `check_for_nan_in_loss_and_grad` is of the autumn of 2023.
                "kernels_after_loss_check": 0,
                "checks_gradients": False,
                # Megatron-LM of 2023 has both passes, too. vtrain_single_node, whose Megatron runs under DeepSpeed, is
                # met better without them (docs/accuracy.md, "What was fitted").
                "widens_gradients": False,
                "unscales_gradients": False,
                # Tokens copied to the device and joined (2), labels and tokens cut out (2), the mask's ones, triangle
                # and comparison (3), the loss's mask, positions (2).
                "kernels_after_batch_sizes": 9,
                "adds_projection_bias_apart": True,
                "keeps_empty_gradients": False,
                "engine_workspaces": 0,
                "grouped_streams": 0,
            },
            "megatron/arguments.py of 2023: `--transformer-impl` is local, which is without Transformer Engine",
        ),
        Former("2023-06", {"sends_pieces": True}, "removed when pipelines moved to megatron/core: pull request 334"),
    ),
)
_BRIDGE_ZERO = MEGATRON_ZERO._replace(bucket_elements=(128 * 2**20, 0))  # training/comm_overlap.py: bucket_size
# NVIDIA's recipes for it: scripts/performance of NeMo-Megatron-Bridge set `apply_rope_fusion`.
MEGATRON_BRIDGE = replace(
    MEGATRON,
    name="megatron_bridge",
    kin="megatron",
    userbuffers=RECIPES,
    hybridep_sms=32,  # scripts/performance/utils/overrides.py
    fuses_weighted_relu2=True,  # recipes/nemotronh: use_fused_weighted_squared_relu
    router=FUSED_ROUTER,  # configs: moe_router_fusion
    kernels_after_loss_check=0,  # utils/helpers.py: check_for_nan_in_loss
    checks_gradients=False,  # utils/helpers.py: check_for_nan_in_grad
    averages_gradients=False,  # recipes: average_in_collective
    fp8_recipe="tensorwise",  # configs: `fp8_recipe`, "cs" where nothing is said: current scaling
    sums_in_fp32=False,  # set_*_common_configs: grad_reduce_in_fp32 False
    cross_entropy="fused",  # utils/helpers.py: cross_entropy_fusion_impl te
    zero=_BRIDGE_ZERO,
    # Its recipes for DeepSeek V3 set `enable_experimental` beside `apply_rope_fusion`. It began in 2025.
    former=(
        Former(_MATRICES.until, {"zero": _BRIDGE_ZERO._replace(all_reduces_for_matrices=True)}, _MATRICES.source),
        *(f for f in MEGATRON.former if f not in (_MATRICES, _EXPERIMENTAL_LATENT_ROPE, _GATHERS_FIRST)),
    ),
)
# NeMo, as its launcher (NeMo-Framework-Launcher) runs it.
NEMO = replace(
    MEGATRON,
    name="nemo",
    kin="megatron",
    userbuffers=RECIPES,
    accumulates_sharded=False,  # its releases end before Megatron-Core 0.17
    # No number of the loss is read: nlp/models/language_modeling/megatron_gpt_model.py,
    # get_forward_output_and_loss_func.
    kernels_after_loss_check=0,
    # conf/training: bucket_cap_mb 125, of fp32, in Apex's optimizer on every stage.
    zero=MEGATRON.zero._replace(bucket_elements=(125 * 2**18, 0), first_stage_alone=False, gathers_when_used=False),
    emitted_for=(),
    former=(
        # FlashAttention-2 in place of cuDNN's kernel. Transformer Engine gives it [sequences, tokens, ...] of
        # [tokens, sequences, ...], and copies back (pytorch/attention.py: FlashAttention.forward).
        Former(
            "2024-09",
            {
                "attention_kernel": "flash2",
                "attention_copies": AttentionCopies(4, (2, 2), of_one_sequence=False),
            },
            "launcher_scripts/conf/config.yaml: NVTE_FUSED_ATTN 0, until pull request 422 of the launcher",
        ),
        Former(
            "2024-01",
            {"attention_kernel": "megatron", "attention_copies": AttentionCopies()},
            "launcher_scripts/conf/config.yaml of 23.11, without NVTE_FUSED_ATTN",
        ),
        _JOINED_CONTEXT,
        _TE2,
    ),
)
