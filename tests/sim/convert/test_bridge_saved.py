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
    """`MEGATRON_BRIDGE` in sim/variants/frameworks/megatron.py."""
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
        ("model", "hybrid_context_parallel: true", True),
        ("model", "bias_activation_fusion: false", False),
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
    keys = ("moe_paged_stash", "optimizer_cuda_graph", "hybrid_context_parallel")
    on = "".join(f"\n  {key}: true" for key in keys)
    text = f"model:\n  tensor_model_parallel_size: 2\n  seq_length: 4096{on}\ntrain: {{micro_batch_size: 1}}\n"
    said = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-b200", "--gpus", "64", "--model", "llama3-8b")[1]
    assert all(f"model.{key}" in said for key in keys)


OF_TOKENIZER = """
tokenizer:
  tokenizer_type: NullTokenizer
  vocab_size: 32000
  tensor_model_parallel_size: 1
  make_vocab_size_divisible_by: 1
  pad_vocab_size: false
  use_tokenizer_vocab_size: false
dataset: {seq_length: 2048}
train:"""


def test_a_tokenizers_own_sizes_are_not_the_models(tmp_path: Path) -> None:
    """`TokenizerConfig` of Megatron-Bridge 0.5 and 0.6 has tensor_model_parallel_size 1 whatever the model has."""
    text = SAVED.replace("\ntrain:", OF_TOKENIZER).replace("mtp_num_layers: null", "vocab_size: 151936")
    data, said = converted(tmp_path, "run.yaml", text, *ON)
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"], data["training"]["seq_len"]) == (2, 8, 4096)
    assert "pad_vocab_size" not in said
    own = text.replace("use_tokenizer_vocab_size: false", "use_tokenizer_vocab_size: true")
    assert converted(tmp_path, "run.yaml", own, *ON)[0]["model"] == {"preset": "hf://Qwen/Qwen3-8B", "vocab": 32000}


@pytest.mark.parametrize(
    ("replicas", "overlap", "expected"),
    [
        ("null", "null", [True, 2 * 128 * 2**20]),
        ("null", "false", [False, 2 * 128 * 2**20]),
        ("4", "null", [False, None]),
    ],
)
def test_a_config_that_no_run_has_set_up_gets_what_a_run_would_set(
    tmp_path: Path, replicas: str, overlap: str, expected: list[Any]
) -> None:
    """`CommOverlapConfig.setup`: overlapped messages between virtual stages, buckets of 128 Mi elements."""
    stages = "pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: 2\n  overlap_p2p_comm: false\n  "
    own = (
        f"comm_overlap: {{tp_comm_overlap: true, overlap_p2p_comm: {overlap}, data_parallel_size: {replicas}}}\ntrain:"
    )
    text = SAVED.replace("mtp_num_layers", f"{stages}mtp_num_layers").replace("\ntrain:", f"\n{own}")
    text = text.replace("  overlap_grad_reduce: true\n", "  overlap_grad_reduce: true\n  bucket_size: null\n")
    found = converted(tmp_path, "run.yaml", text, *ON)[0]["parallelism"]
    assert found["tp_overlap"] == "wgrad"  # without sequence parallelism nothing else overlaps
    assert [found["p2p_overlap"], found["bucket_bytes"] if expected[1] else None] == expected


def test_stages_in_groups_of_as_many_micro_batches_as_pp_are_the_usual_ones(tmp_path: Path) -> None:
    """Megatron-Core sets `microbatch_group_size_per_vp_stage` in each saved config (core/model_parallel_config.py)."""
    stages = "pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: 2\n"
    grouped = stages + "  microbatch_group_size_per_vp_stage: {}\n  mtp_num_layers"
    for group, expected in (("2", None), ("4", 4)):
        found = of(tmp_path, ("mtp_num_layers", grouped.format(group)))["parallelism"]
        assert found.get("micro_batch_group") == expected


@pytest.mark.parametrize(("kind", "first"), [("CudaGraphModule", 1), ("CudaGraphScope", 2)])
def test_parts_of_graphs_stand_there_as_calls(tmp_path: Path, kind: str, first: int) -> None:
    """The numbers of the two enumerations differ by one (core/transformer/enums.py)."""
    call = "{{_args_: [{}], _call_: true, _target_: megatron.core.transformer.enums.{}}}"
    parts = ", ".join(call.format(number, kind) for number in (first, first + 1))
    keys = f"  cuda_graph_impl: transformer_engine\n  cuda_graph_scope: [{parts}]\n  seq_length"
    found = of(tmp_path, ("  seq_length", keys))["training"]
    assert (found["cuda_graphs"], found["cuda_graph_scope"]) == ("layers", ["attn", "mlp"])


def test_a_set_that_python_wrote_is_read(tmp_path: Path) -> None:
    flat = "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 16\n  params_to_save: !!set {}\n"
    flat += "  target_modules: [linear_qkv]\n"
    for own in (flat, flat.replace("!!set {}", "!!set\n    weight: null")):
        found = of(tmp_path, ("train:", f"{own}train:"), ("aware_optimizer: true", "aware_optimizer: false"))
        assert found["training"]["lora"] == {"rank": 16, "targets": ["qkv"]}


STASH = "paged_stash_buffer_size_factor_cuda"


@pytest.mark.parametrize("low", ["fp8: e4m3, fp8_recipe: mxfp8", "fp4: e2m1, fp4_recipe: nvfp4"])
@pytest.mark.parametrize(
    ("function", "weighs", "fused"),
    [("torch.nn.functional.silu", False, True), ("x.squared_relu", True, True), ("x.squared_relu", False, None)],
)
def test_fused_experts_have_a_gate_or_a_squared_relu_that_weighs(
    tmp_path: Path, function: str, weighs: bool, fused: bool | None, low: str
) -> None:
    """Megatron-Bridge's recipes of Nemotron 3 on GB200 and GB300 (perf_recipes/nemotronh of 0.6.2), and
    `_is_fused_impl_supported` of Megatron-Core's experts."""
    sizes = f"""num_layers: 4
  hidden_size: 1024
  num_attention_heads: 16
  vocab_size: 32000
  activation_func: {{_target_: {function}, _call_: false}}
  gated_linear_unit: {str("silu" in function).lower()}
  use_fused_weighted_squared_relu: {str(weighs).lower()}
  num_moe_experts: 8
  moe_router_topk: 2
  moe_ffn_hidden_size: 512
  moe_permute_fusion: true
  moe_grouped_gemm: true
  moe_mlp_glu_interleave_size: 32
  use_transformer_engine_op_fuser: true
  moe_token_dispatcher_type: flex
  moe_flex_dispatcher_backend: hybridep
  moe_expert_rank_capacity_factor: 1.5
  moe_paged_stash: true
  moe_paged_stash_buffer_size_factor_cuda: 1.2
  moe_paged_stash_buffer_size_factor_cpu: 1.0
  expert_model_parallel_size: 2
  expert_tensor_parallel_size: 1
  sequence_parallel: true"""
    text = SAVED.replace("  hf_model_id: Qwen/Qwen3-8B\n", "").replace("num_layers: 36", sizes)
    text = text.replace("{bf16: true,", f"{{bf16: true, {low},")
    data, said = converted(tmp_path, "run.yaml", text, "--cluster", "gb200-nvl72", "--gpus", "8")
    training = data["training"]
    assert training.get("fused_experts") is fused
    buffers = [training.get(f"moe_{key}") for key in ("expert_rank_capacity_factor", STASH)]
    assert buffers == ([1.5, 1.2] if fused else [None, None])
    assert ("not expressed here: model.moe_expert_rank_capacity_factor, model.moe_paged_stash" in said) is not bool(
        fused
    )
