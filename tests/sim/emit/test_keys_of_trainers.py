"""A new key of a scenario is thought of where other trainers' flags and real runs are made, or left out knowingly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.emit import emit
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.training_config import Recompute, Training

ROOT = Path(__file__).parents[3]
# Said of every reader: what a scenario is, where its prices come from, and what decides no step.
ALWAYS = "version calibration calibrations engine warnings source software_date batch_schedule schedule_memory"
AS_FUSIONS = "apply_rope_fusion bias_activation_fusion bias_dropout_fusion "  # read by the names that `FUSIONS` has
# Not read by these files, and why that changes nothing.
LEFT_OUT = {
    "megatron": "inference rl indexer parameter_offload layers_per_stage "  # refused before; read as `stage_layers`
    "outer_dp_sharding_strategy zero_hpz_partition_size zero_quantized_gradients "  # `shard_size` is; of DeepSpeed
    "all_reduce_once autocast "  # `shard_size` and fp32 parameters are refused before
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "  # read as `IN_SIXTEEN_BITS`
    "moe_expert_rank_capacity_factor moe_paged_stash_buffer_size_factor_cuda "  # fused experts are refused
    "cuda_graph_scope "  # graphs are refused
    "loss_chunks " + AS_FUSIONS,  # a loss in chunks is refused
    "torchtitan": "inference rl indexer modules virtual_stages p2p_scatter "
    "parameter_offload "  # an optimizer on the host is refused before
    "hierarchical_context_parallel_sizes "  # of heads exchanged, which is refused
    "outer_dp_sharding_strategy zero_hpz_partition_size zero_quantized_gradients "  # of other frameworks
    "fused_single_qkv_rope calculate_per_token_loss "
    "loss_chunks "  # a loss in chunks is refused
    "cuda_graph_scope moe_router_padding_for_quantization "  # of other frameworks
    "moe_expert_rank_capacity_factor moe_paged_stash_buffer_size_factor_cuda "
    "fsdp_double_buffer "  # Megatron's FSDP alone has it
    # it takes no experts and no two of ZeRO's stages, and prefetches always
    "ep expert_tp ep_overlap delay_wgrad_compute ep_dispatcher ep_dispatch_dtype param_gather_overlap "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "  # read by `in_sixteen_bits`
    "mtp_stage " + AS_FUSIONS,  # no model of it has prediction modules
    "runnable": "loss_chunks autocast processes global_batch_size fp8_recipe indexer cuda_graphs cuda_graph_scope "
    "parameter_offload "  # an optimizer on the host is refused before
    # run as they are; other dtypes of parameters than precision's are refused
    "zero shard_size reshard_after_forward accumulate_unsharded virtual_stages micro_batch_group dp_sync bucket_bytes "
    "all_reduce_once param_gather_overlap param_gather_dtype p2p_overlap rank_order "
    "fused_experts fp8_output_proj "  # precision mxfp8 is refused
    "moe_expert_rank_capacity_factor moe_paged_stash_buffer_size_factor_cuda "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "  # refused as `IN_SIXTEEN_BITS`
    "mtp_stage " + AS_FUSIONS,  # prediction modules are refused
}
FILES = {
    "megatron": tuple(f"sim/emit/{n}.py" for n in ("common", "megatron", "megatron_experts", "megatron_layers")),
    "torchtitan": ("sim/emit/common.py", "sim/emit/torchtitan.py"),
    "runnable": ("calibrate/real_steps/runnable.py",),
}


@pytest.mark.parametrize("reader", FILES)
def test_each_key_is_read_or_left_out_knowingly(reader: str) -> None:
    words = set(re.findall(r"\w+", "".join((ROOT / file).read_text(encoding="utf-8") for file in FILES[reader])))
    sections = (Training, Recompute, Parallelism)
    keys = {*Scenario.__struct_fields__, *(key for section in sections for key in section.model_fields)}
    left_out = {*ALWAYS.split(), *LEFT_OUT[reader].split()}
    assert keys - words - left_out == set()
    assert left_out <= keys
    assert not {*LEFT_OUT[reader].split()} & words


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_layers_without_attention_are_refused(trainer: str) -> None:
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "attention_pattern": ["none", "full"]}
    training = {"seq_len": 1024, "global_batch_size": 8}
    scenario = parse_scenario({"model": model, "cluster": "dgx-h100", "training": training})
    with pytest.raises(InputError, match=r"model\.attention_pattern: found .'none', 'full'"):
        emit(scenario, trainer)


def test_a_kernel_that_flags_do_not_choose_is_named_in_a_note() -> None:
    training = {"seq_len": 1024, "global_batch_size": 8, "framework": "megatron", "attention_kernel": "flash3"}
    scenario = parse_scenario({"model": "gpt3-6.7b", "cluster": "dgx-h100", "training": training})
    assert "attention_kernel" in emit(scenario, "megatron")
