"""A whole config that Megatron-Bridge saves with a run, as a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted

SAVED = """
_target_: megatron.bridge.training.config.ConfigContainer
ddp:
  average_in_collective: true
  check_for_nan_in_grad: false
  overlap_grad_reduce: true
  overlap_param_gather: true
  use_distributed_optimizer: true
mixed_precision: {bf16: true, grad_reduce_in_fp32: false}
model:
  hf_model_id: Qwen/Qwen3-8B
  num_layers: 36
  mtp_num_layers: null
  apply_rope_fusion: true
  tensor_model_parallel_size: 2
  seq_length: 4096
optimizer:
  optimizer: adam
  use_precision_aware_optimizer: true
  exp_avg_dtype: {_target_: torch.bfloat16, _call_: false}
  exp_avg_sq_dtype: {_target_: torch.bfloat16, _call_: false}
rerun_state_machine: {check_for_nan_in_loss: false}
train: {global_batch_size: 64, micro_batch_size: 1}
"""
ON = ("--cluster", "dgx-h100", "--gpus", "16")


def of(tmp_path: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    text = SAVED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return converted(tmp_path, "run.yaml", text, *ON)[0]


def test_a_dtype_stands_there_as_an_object(tmp_path: Path) -> None:
    assert of(tmp_path)["training"]["optimizer_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("written", "kernel"),
    [
        ("{_args_: [1], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}", "flash2"),
        ("{_args_: [2], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}", "cudnn"),
        ("{_args_: [5], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}", None),
        ("AttnBackend.flash", "flash2"),
    ],
)
def test_an_enumeration_stands_there_as_a_call(tmp_path: Path, written: str, kernel: str | None) -> None:
    found = of(tmp_path, ("  seq_length", f"  attention_backend: {written}\n  seq_length"))
    assert found["training"].get("attention_kernel") == kernel


def test_the_files_number_of_layers_goes_before_that_of_the_model_which_it_names(tmp_path: Path) -> None:
    assert of(tmp_path)["model"] == "hf://Qwen/Qwen3-8B"
    fewer = of(tmp_path, ("num_layers: 36", "num_layers: 8"))
    assert fewer["model"] == {"preset": "hf://Qwen/Qwen3-8B", "layers": 8}
    without = of(tmp_path, ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"), ("num_layers: 36", "num_layers: 61"))
    assert without["model"] == {"preset": "hf://deepseek-ai/DeepSeek-V3", "mtp_layers": 0}


@pytest.mark.parametrize(
    ("loss", "fusion", "framework", "kept"),
    [
        ("false", "true", "megatron_bridge", None),
        ("false", "false", "megatron_bridge", False),
        ("true", "true", "megatron", True),
        ("true", "false", "megatron", None),
    ],
)
def test_a_router_that_is_not_as_the_frameworks(
    tmp_path: Path, loss: str, fusion: str, framework: str, kept: bool | None
) -> None:
    """`moe_router_fusion`, which recipes of Nemotron have false beside all else that NVIDIA's scripts set."""
    experts = "num_moe_experts: 8\n  moe_router_topk: 2\n  moe_ffn_hidden_size: 512\n  moe_permute_fusion: true"
    experts += f"\n  expert_tensor_parallel_size: 1\n  sequence_parallel: true\n  moe_router_fusion: {fusion}"
    found = of(
        tmp_path,
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
        ("num_layers: 36", f"num_layers: 48\n  {experts}"),
        ("check_for_nan_in_loss: false", f"check_for_nan_in_loss: {loss}"),
    )["training"]
    assert (found["framework"], found.get("moe_router_fusion")) == (framework, kept)


@pytest.mark.parametrize(
    ("old", "new", "framework"),
    [
        ("train:", "train:", "megatron_bridge"),
        ("check_for_nan_in_grad: false", "check_for_nan_in_grad: true", "megatron"),
        ("average_in_collective: true", "average_in_collective: false", "megatron"),
        ("check_for_nan_in_loss: false", "check_for_nan_in_loss: true", "megatron"),
    ],
)
def test_the_framework_is_that_of_nvidias_recipes_where_the_file_has_what_they_set(
    tmp_path: Path, old: str, new: str, framework: str
) -> None:
    """`MEGATRON_BRIDGE` in sim/models/frameworks/megatron.py."""
    assert of(tmp_path, (old, new))["training"]["framework"] == framework


@pytest.mark.parametrize(
    ("function", "gated", "mlp"),
    [
        ("torch.nn.functional.silu", True, "swiglu"),
        ("torch.nn.functional.gelu", True, "geglu"),
        ("torch.nn.functional.gelu", False, "gelu"),
        ("megatron.core.activations.squared_relu", False, "relu2"),
    ],
)
def test_an_activation_is_named_by_its_function(tmp_path: Path, function: str, gated: bool, mlp: str) -> None:
    own = f"activation_func: {{_target_: {function}, _call_: false}}\n  gated_linear_unit: {str(gated).lower()}\n"
    sizes = "  hidden_size: 1024\n  num_attention_heads: 16\n  vocab_size: 32000\n"
    found = of(tmp_path, ("hf_model_id: Qwen/Qwen3-8B\n", own + sizes))
    assert found["model"]["mlp"] == mlp


@pytest.mark.parametrize(
    ("section", "line", "noted"),
    [
        ("ddp", "fsdp_double_buffer: true", True),
        ("ddp", "fsdp_double_buffer: false", False),
        ("ddp", "overlap_param_gather_with_optimizer_step: true", True),
        ("model", "calculate_per_token_loss: true", True),
        ("model", "bias_activation_fusion: false", True),
        ("model", "bias_activation_fusion: true", False),
        ("model", "tp_comm_bulk_dgrad: false", False),  # of an overlap that is off
        ("model", "tp_comm_overlap: true, tp_comm_bulk_dgrad: false", True),
    ],
)
def test_what_changes_a_step_and_is_not_simulated_is_named(
    tmp_path: Path, section: str, line: str, noted: bool
) -> None:
    parts = {"model": "tensor_model_parallel_size: 2, seq_length: 4096", "ddp": "use_distributed_optimizer: true"}
    parts[section] += f", {line}"
    parts["train"] = "micro_batch_size: 1, global_batch_size: 64"
    text = "".join(f"{name}: {{{keys}}}\n" for name, keys in parts.items())
    said = converted(tmp_path, "run.yaml", text, "--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b")[1]
    key = line.rpartition(", ")[2].partition(":")[0]
    assert (f"{section}.{key}" in said) is noted


def test_dropped_tokens_former_graphs_and_packed_sequences_of_an_override(tmp_path: Path) -> None:
    text = (
        "model: {tensor_model_parallel_size: 1, seq_length: 4096, moe_expert_capacity_factor: 1.0, "
        "moe_pad_expert_input_to_capacity: true, external_cuda_graph: true}\n"
        "dataset: {packed_sequence_specs: {packed_sequence_size: 4096}}\n"
        "train: {micro_batch_size: 1, global_batch_size: 64}\n"
    )
    here = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "mixtral-8x7b")
    data, said = converted(tmp_path, "run.yaml", text, *here)
    assert data["model"] == {"preset": "mixtral-8x7b", "moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}
    assert data["training"]["cuda_graphs"] == "layers"
    assert "dataset.packed_sequence_specs: a sequence is simulated as one text" in said


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("window_size: [1023, 0]", {"window": 1024}),
        (
            "window_size: [127, 0]\n  window_attn_skip_freq: 2",
            {"window": 128, "attention_pattern": ["sliding", "full"]},
        ),
        ("softmax_type: learnable", {"sinks": True}),
        ("softmax_type: vanilla", {}),
        ("qk_layernorm: true", {"qk_norm": True}),
        ("add_qkv_bias: true", {"qkv_bias": True}),
        ("add_qkv_bias: false\n  qk_layernorm: false", {}),
    ],
)
def test_attention_that_an_override_changes(tmp_path: Path, keys: str, expected: dict[str, Any]) -> None:
    text = f"model:\n  tensor_model_parallel_size: 2\n  seq_length: 4096\n  {keys}\ntrain: {{global_batch_size: 128}}\n"
    text = text.replace("global_batch_size: 128", "global_batch_size: 128, micro_batch_size: 1")
    options = ("--cluster", "dgx-b200", "--gpus", "64", "--model", "llama3-8b")
    model = converted(tmp_path, "a.yaml", text, *options)[0]["model"]
    own = {} if model == "llama3-8b" else {key: value for key, value in model.items() if key != "preset"}
    if "attention_pattern" in own:
        own["attention_pattern"] = own["attention_pattern"][:2]
    assert own == expected


def test_keys_of_later_releases_that_change_a_step_are_named(tmp_path: Path) -> None:
    keys = ("moe_paged_stash", "optimizer_cuda_graph", "hybrid_context_parallel", "fused_single_qkv_rope")
    on = "".join(f"\n  {key}: true" for key in keys)
    text = f"model:\n  tensor_model_parallel_size: 2\n  seq_length: 4096{on}\ntrain: {{micro_batch_size: 1}}\n"
    said = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-b200", "--gpus", "64", "--model", "llama3-8b")[1]
    assert all(f"model.{key}" in said for key in keys)
