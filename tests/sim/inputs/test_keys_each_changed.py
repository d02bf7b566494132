"""Every key of `parallelism` and `training`, changed in many layouts: the step changes, or a message says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.training_config import Training
from sim.simulation import simulate
from tests.sim.small_scenario import small

CHANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "parallelism": {
        "sp": (True,),
        "expert_tp": (2,),
        "zero": (1, 2, 3),
        "shard_size": (1, 2),
        "reshard_after_forward": (False,),
        "fsdp_version": (1, 2),
        "backward_prefetch": (False,),
        "accumulate_unsharded": (True,),
        "all_reduce_once": (True,),
        "accumulate_in_a_row": (True, False),
        "fsdp_double_buffer": (True,),
        "outer_dp_sharding_strategy": ("optim",),
        "zero_hpz_partition_size": (2,),
        "zero_quantized_gradients": (True,),
        "schedule": ("gpipe",),
        "schedule_memory": (2.0,),
        "virtual_stages": (2,),
        "micro_batch_group": (4,),
        "layers_per_stage": ([1, 3],),
        "mtp_stage": (0,),
        "dp_sync": ("after_backward", "per_parameter"),
        "bucket_bytes": ("100KiB",),
        "gather_bucket_bytes": ("10KiB",),
        "param_gather_overlap": (True, False),
        "overlap_param_gather_with_optimizer_step": (True,),
        "param_gather_dtype": ("fp32", "int8"),
        "cp_method": ("all_gather",),
        "cp_method_by_layer": (["ring", "all_gather", "ring", "ring"],),
        "hierarchical_context_parallel_sizes": ([2, 2],),
        "cp_split": ("contiguous",),
        "tp_overlap": ("wgrad",),
        "tp_overlap_except": (["qkv"],),
        "ep_overlap": (True,),
        "delay_wgrad_compute": (False,),
        "wgrad_deferral_limit": (2,),
        "ep_dispatch_dtype": ("fp8",),
        "ep_dispatcher": ("deepep", "hybridep"),
        "p2p_overlap": (True, False),
        "p2p_scatter": (True,),
    },
    "training": {
        "micro_batch_size": (2,),
        "precision": ("fp32", "fp8"),
        "fp8_recipe": ("rowwise",),
        "param_dtype": ("fp32",),
        "autocast": (True, False),
        "grad_dtype": ("bf16",),
        "grad_reduce_dtype": ("bf16", "fp32"),
        "optimizer": ("sgd", "sgd_momentum", "lion", "ademamix", "adafactor"),
        "adamw_kernels": ("foreach",),
        "optimizer_dtype": ("int8",),
        "master_weights": (False, "remainders"),
        "gradient_clipping": (False,),
        "recompute": ("full", {"mode": "full", "early_stop": False}, {"mode": "selective", "modules": ["mlp"]}),
        "attention": ("unfused",),
        "attention_kernel": ("flash3",),
        "indexer": ("frozen",),
        "packing": ({"lengths": [28, 100]},),
        "cross_entropy": ("chunked", "native", "tiled"),
        "loss_chunks": (4,),
        "fp8_output_proj": (True,),
        "fused_experts": (True,),
        "moe_expert_rank_capacity_factor": (1.5,),
        "moe_paged_stash_buffer_size_factor_cuda": (1.2,),
        "moe_grouped_gemm": (False,),
        "moe_router_fusion": (True, False),
        "moe_shared_expert_overlap": (True,),
        "apply_rope_fusion": (False,),
        "fused_single_qkv_rope": (True,),
        "calculate_per_token_loss": (True,),
        "bias_activation_fusion": (False,),
        "bias_dropout_fusion": (False,),
        "moe_router_padding_for_quantization": (True,),
        "gradient_accumulation_fusion": (False,),
        "cublas_workspace_config": (":16:8",),
        "fp8_dot_product_attention": (True,),
        "fp8_param_gather": (True,),
        "activation_func_fp8_input_store": (True,),
        "num_layers_at_start_in_bf16": (1,),
        "num_layers_at_end_in_bf16": (1,),
        "cuda_graphs": ("step",),
        "cuda_graph_scope": (["attn"],),
        "activation_offload": (True, {"layers": 1}, {"modules": ["mlp_norm"]}),
        "optimizer_offload": (True, "cpu"),
        "parameter_offload": (True,),
        "optimizer_post_validation": (True,),
        "tokens": ("1B",),
        "lora": ({"rank": 4},),
        "preference": ({"loss": "dpo"}, {"loss": "kto"}, {"loss": "orpo"}, {"loss": "reward"}),
    },
}
NOT_CHANGED = {
    "parallelism": {"dp", "tp", "cp", "pp", "ep", "rank_order"},  # a layout's own; what matters between nodes alone
    # Sizes; names of many facts; what shows only where the first micro-batch's memory is a step's most.
    "training": {"seq_len", "global_batch_size", "framework", "software_date", "zero_grad", "batch_schedule"},
}
LAYOUTS: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}, {}),
    ({"dp": 2, "bucket_bytes": "1MiB"}, {}, {}),
    ({"dp": 2, "zero": 3}, {"framework": "compiled"}, {}),
    ({"dp": 2, "zero": 3}, {"framework": "composer"}, {}),
    ({"dp": 2, "zero": 3}, {"framework": "transformers"}, {}),
    ({"dp": 4, "zero": 2, "shard_size": 2}, {}, {}),
    ({"dp": 2, "zero": 1}, {"framework": "nanotron"}, {}),
    ({"dp": 2, "zero": 2}, {"framework": "deepspeed"}, {}),
    ({"dp": 4, "zero": 3, "shard_size": 2}, {"framework": "megatron"}, {}),
    ({"dp": 2, "bucket_bytes": "1MiB"}, {"framework": "meta_llama3"}, {}),
    ({"dp": 2, "tp": 2, "sp": True, "zero": 1}, {"framework": "megatron"}, {}),
    ({"tp": 2, "zero": 3}, {"framework": "megatron", "precision": "fp8"}, {}),
    ({"cp": 2, "bucket_bytes": "1MiB"}, {}, {}),
    (
        {
            "cp": 4,
            "cp_method": "all_to_all_ring",
            "hierarchical_context_parallel_sizes": [2, 2],
            "bucket_bytes": "1MiB",
        },
        {},
        {},
    ),
    ({}, {"framework": "megatron", "cuda_graphs": "layers"}, {}),
    ({"pp": 2}, {}, {"tied_embeddings": True}),
    ({"pp": 2, "schedule": "interleaved_1f1b"}, {"framework": "megatron"}, {}),
    ({"dp": 4, "ep": 2, "bucket_bytes": "1MiB"}, {}, {"moe": {"experts": 8, "top_k": 2, "ffn": 512}}),
    ({}, {"optimizer_offload": "cpu"}, {}),
    ({"dp": 2, "zero": 3}, {"optimizer_offload": "cpu"}, {}),
    ({"dp": 2, "zero": 3}, {"framework": "transformers", "micro_batch_size": 2, "preference": {"loss": "dpo"}}, {}),
    ({"dp": 2}, {"framework": "transformers", "micro_batch_size": 2, "preference": {"loss": "reward"}}, {}),
)


@pytest.mark.parametrize("section", CHANGES)
def test_each_key_is_changed(section: str) -> None:
    model = Parallelism if section == "parallelism" else Training
    assert {*CHANGES[section], *NOT_CHANGED[section]} == {*model.model_fields}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "training", "model"), LAYOUTS)
def test_a_changed_key_changes_the_step_or_is_named(
    layout: dict[str, Any], training: dict[str, Any], model: dict[str, Any]
) -> None:
    """What changes nothing is refused or named."""
    sizes, batch = {**model, "layers": 4, "norm": "rmsnorm"}, {"global_batch_size": 8, **training}
    base = small(model=sizes, training=batch, parallelism=layout)
    plain = parse_scenario(base)
    step, unnoticed = shown(plain), list[str]()
    for section, keys in CHANGES.items():
        for key, values in keys.items():
            for value in values:
                named = f"{section}.{key}: of no effect"
                try:
                    changed = parse_scenario(merge(base, {section: {key: value}}))
                    same = shown(changed) == step
                except InputError:
                    continue
                told = any(text.startswith(named) for text in changed.warnings)
                if same and not told and described(changed) != described(plain):
                    unnoticed.append(f"{section}.{key}: {value}")
    assert not unnoticed


def described(scenario: Scenario) -> dict[str, Any]:
    return {key: value for key, value in scenario.model_dump("json").items() if key != "name"}


def shown(scenario: Scenario) -> str:
    """Return all that a result shows of the step itself."""
    data = simulate(scenario, engine="static").outcome.to_json()
    unlike = ("scenario", "warnings", "engine", "name")
    return json.dumps({key: value for key, value in data.items() if key not in unlike}, sort_keys=True)
