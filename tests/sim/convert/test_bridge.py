"""Megatron-Bridge's YAML as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, of, refused

OVERRIDES = """
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  seq_length: 4096
  sequence_parallel: true
  expert_model_parallel_size: 4
  expert_tensor_parallel_size: 1
train:
  global_batch_size: 256
  micro_batch_size: 2
optimizer:
  lr: 0.0003
ddp:
  overlap_param_gather: false
  grad_reduce_in_fp32: true
"""
WHOLE = """
_target_: megatron.bridge.training.config.ConfigContainer
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: false, overlap_param_gather: true, bucket_size: null}
mixed_precision:
  {_target_: x.MixedPrecisionConfig, bf16: true, fp8: hybrid, fp8_recipe: blockwise, grad_reduce_in_fp32: false}
optimizer: {optimizer: adam, clip_grad: 1.0, bf16: true, fp8_recipe: tensorwise}
train: {micro_batch_size: 1, global_batch_size: 64}
model:
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  add_bias_linear: false
  share_embeddings_and_output_weights: false
  gated_linear_unit: true
  attention_dropout: 0.0
  hidden_dropout: 0.0
  num_layers: 4
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 16
  num_query_groups: 4
  kv_channels: 128
  normalization: RMSNorm
  position_embedding_type: rope
  vocab_size: 32000
  seq_length: 4096
  num_moe_experts: 8
  moe_router_topk: 2
  moe_ffn_hidden_size: 512
  moe_layer_freq: [0, 1, 1, 1]
  moe_token_dispatcher_type: alltoall
  moe_grouped_gemm: true
  moe_permute_fusion: true
  expert_model_parallel_size: 8
  expert_tensor_parallel_size: 1
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  fp8: null
  fp8_recipe: delayed
  recompute_granularity: selective
  recompute_modules: [moe_act, layernorm]
  cuda_graph_impl: transformer_engine
  cuda_graph_scope: [attn, moe_router]
  delay_wgrad_compute: true
  multi_latent_attention: false
"""


def test_what_overrides_a_recipe_needs_the_model(tmp_path: Path) -> None:
    machine = ("--cluster", "dgx-h100", "--gpus", "64")
    assert "leaves the model to its recipe: give --model" in refused(tmp_path, "o.yaml", OVERRIDES, *machine)
    data, said = converted(tmp_path, "o.yaml", OVERRIDES, *machine, "--model", "qwen3-30b-a3b")
    assert data["model"] == "qwen3-30b-a3b"
    assert of(data, "parallelism", "dp", "tp", "pp", "ep", "expert_tp", "sp", "zero") == [8, 4, 2, 4, 1, True, 1]
    assert of(data, "parallelism", "dp_sync", "schedule") == ["bucketed", None]
    assert of(data, "training", "global_batch_size", "micro_batch_size", "seq_len") == [256, 2, 4096]
    assert of(data, "training", "precision", "grad_dtype") == ["bf16", "fp32"]
    assert data["parallelism"]["param_gather_overlap"] is False
    assert "leaves to its recipe: bf16, the distributed optimizer" in said
    assert "simulated as with --moe" not in said
    data, said = converted(
        tmp_path, "o.yaml", f"{OVERRIDES}mixed_precision: fp16_mixed\n", *machine, "--model", "llama3-8b"
    )
    assert data["training"]["precision"] == "fp16"


def test_a_whole_config_as_a_run_saves_it(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run_config.yaml", WHOLE, "--cluster", "dgx-h100", "--gpus", "16")
    model = data["model"]
    assert [model[key] for key in ("layers", "kv_heads", "head_dim", "mlp", "norm", "bias", "tied_embeddings")] == [
        *(4, 4, 128, "swiglu", "rmsnorm", False, False)
    ]
    assert (model["moe"]["experts"], model["moe"]["ffn"], model["moe"]["dense_layers"]) == (8, 512, 1)
    # mixed_precision overrules the sections that hold the same keys
    assert of(data, "training", "precision", "fp8_recipe", "grad_dtype") == ["fp8", "blockwise", "bf16"]
    assert data["training"]["recompute"] == {"mode": "selective", "modules": ["moe_act", "layernorm"]}
    assert of(data, "parallelism", "dp", "ep", "dp_sync", "param_gather_overlap") == [16, 8, "after_backward", True]
    assert data["training"]["cuda_graphs"] == "layers"
    assert data["training"]["cuda_graph_scope"] == ["attn", "moe_router"]
    assert "not expressed here: model.delay_wgrad_compute\n" in said


def test_a_layout_may_be_a_list_of_stages(tmp_path: Path) -> None:
    """As Megatron-Bridge's recipes write it, for the text `Et|t,t|tm|L`."""
    layout = "[[embedding, decoder], [decoder, decoder], [decoder, mtp], [loss]]"
    size = "  pipeline_model_parallel_size: "
    text = WHOLE.replace(f"{size}1", f"{size}4\n  mtp_num_layers: 1\n  pipeline_model_parallel_layout: {layout}")
    data, said = converted(tmp_path, "run_config.yaml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert of(data, "parallelism", "layers_per_stage", "mtp_stage") == [[1, 2, 1, 0], 2]
    assert "pipeline_model_parallel_layout" not in said
    wrong = text.replace("[loss]", "[losses]")
    said = refused(tmp_path, "run_config.yaml", wrong, "--cluster", "dgx-h100", "--gpus", "32")
    assert "pipeline_model_parallel_layout: found 'Et|tt|tm|losses'; a stage has letters of E, t, m, L" in said


def test_what_the_last_stage_puts_off_and_what_is_gathered_early(tmp_path: Path) -> None:
    """`comm_overlap` of Megatron-Bridge's Llama 3 405B; a saved config has the keys in `model` and `optimizer`."""
    machine = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "llama3-8b")
    stages = "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2, seq_length: 4096}"
    text = f"model: {stages}\ntrain: {{global_batch_size: 256, micro_batch_size: 1}}\n"
    own = "comm_overlap: {defer_embedding_wgrad_compute: true, wgrad_deferral_limit: 22}\n"
    early = "optimizer: {overlap_param_gather_with_optimizer_step: true}\n"
    keys = ("wgrad_deferral_limit", "overlap_param_gather_with_optimizer_step")
    data, said = converted(tmp_path, "o.yaml", text + own + early, *machine)
    assert of(data, "parallelism", *keys) == [22, True]
    assert "defer_embedding" not in said
    assert "optimizer.overlap" not in said
    late = "ddp: {overlap_param_gather: false}\n"
    data, said = converted(tmp_path, "o.yaml", text + late + early, *machine)
    assert of(data, "parallelism", *keys) == [None, None]
    assert "not expressed here: optimizer.overlap_param_gather_with_optimizer_step" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp: {bucket_size: 1000}", [4 * 1000, True]),
        (
            "ddp: {bucket_size: 1000, overlap_param_gather: false}\ncomm_overlap: {tp_comm_overlap: false}",
            [2**29, True],
        ),
        ("comm_overlap: {bucket_size: 1000, overlap_param_gather: false}", [4 * 1000, False]),
        ("ddp: {bucket_size: 1000, use_distributed_optimizer: false}\ncomm_overlap: {}", [4 * 1000, None]),
    ],
)
def test_a_comm_overlap_overrules_the_buckets_of_ddp(tmp_path: Path, text: str, expected: list[Any]) -> None:
    """`CommOverlapConfig.setup` sets 128 Mi elements and both overlaps, unless it has own values."""
    model = "model: {pipeline_model_parallel_size: 1, seq_length: 4096}"
    text = f"{model}\ntrain: {{global_batch_size: 64, micro_batch_size: 1}}\n{text}\n"
    machine = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "llama3-8b")
    data, _ = converted(tmp_path, "o.yaml", text, *machine)
    assert of(data, "parallelism", "bucket_bytes", "param_gather_overlap") == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("micro_batch_size: 2", "micro_batch_size: ${MBS}"), "train.micro_batch_size: found '${MBS}', in which a"),
        (("seq_length: 4096", "seq_length: [1]"), "model.seq_length"),
        (
            ("expert_model_parallel_size: 4", "expert_model_parallel_size: 3"),
            "model.expert_model_parallel_size: found 3; ",
        ),
    ],
)
def test_wrong_values_are_named_as_the_file_has_them(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    options = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "qwen3-30b-a3b")
    said = refused(tmp_path, "o.yaml", OVERRIDES.replace(*change), *options)
    assert problem in said
    assert "Traceback" not in said


WITH_8B = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "qwen3-8b")
DENSE = OVERRIDES.replace("  expert_model_parallel_size: 4\n  expert_tensor_parallel_size: 1\n", "")


@pytest.mark.parametrize(
    ("peft", "lora"),
    [
        ("null", None),
        ("{_target_: megatron.bridge.peft.lora.LoRA, dim: 16}", {"rank": 16}),
        ("{target_modules: [linear_proj, linear_qkv]}", {"rank": 32, "targets": ["qkv", "attention_out"]}),
        ("lora", {"rank": 32}),
    ],
)
def test_lora_of_megatron_bridge(tmp_path: Path, peft: str, lora: dict[str, Any] | None) -> None:
    data, _ = converted(tmp_path, "o.yaml", f"{DENSE}peft: {peft}\n", *WITH_8B)
    assert data["training"].get("lora") == lora


@pytest.mark.parametrize(
    ("peft", "problem"),
    [
        ("{_target_: megatron.bridge.peft.dora.DoRA}", "peft._target_: found 'DoRA'; can be converted: LoRA"),
        ("dora", "peft: found 'dora'; can be converted: LoRA"),
        ("{target_modules: ['*.layers.0.*.linear_qkv']}", "target_modules: found '*.layers.0.*.linear_qkv'; can be"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, peft: str, problem: str) -> None:
    assert problem in refused(tmp_path, "o.yaml", f"{DENSE}peft: {peft}\n", *WITH_8B)


def test_values_of_bridges_keys_that_are_not_simulated_are_named(tmp_path: Path) -> None:
    more = "  recompute_granularity: full\n  recompute_method: uniform\n  recompute_num_layers: 4\n"
    text = DENSE.replace("model:\n", f"model:\n{more}  moe_token_dispatcher_type: allgather\n")
    _, said = converted(tmp_path, "o.yaml", text, *WITH_8B)
    assert "not expressed here: model.recompute_num_layers\n" in said
    _, said = converted(tmp_path, "o.yaml", text.replace("num_layers: 4", "num_layers: 1"), *WITH_8B)
    assert "not expressed" not in said


@pytest.mark.parametrize(
    "key",
    [
        "mla_down_proj_fusion: true",
        "moe_permute_fusion_into_hybridep: true",
        "num_buckets: 48",
        "quant_recipe: {configs: {bf16: {}}}",
    ],
)
def test_keys_of_new_releases_that_are_not_simulated_are_named(tmp_path: Path, key: str) -> None:
    text = DENSE.replace("model:\n", f"model:\n  {key}\n")
    _, said = converted(tmp_path, "o.yaml", text, *WITH_8B)
    assert f"not expressed here: model.{key.partition(':')[0]}\n" in said


@pytest.mark.parametrize(
    ("name", "precision", "recipe", "noted"),
    [
        ("bf16_with_fp8_current_scaling_mixed", "fp8", "tensorwise", []),
        ("nemotron-h-bf16-with-fp8-current-scaling-mixed", "fp8", "tensorwise", []),
        ("bf16_with_mxfp8_mixed", "mxfp8", "mxfp8", []),
        ("fp16_with_fp8_subchannel_scaling_mixed", "fp8", "blockwise", []),
        ("bf16_with_nvfp4_mixed", "nvfp4", None, ["fp4_param_gather"]),
        ("nemotron_3_super_bf16_with_nvfp4_mixed", "nvfp4", None, ["fp4_param_gather"]),
        ("nemotron_3_ultra_bf16_with_nvfp4_mixed", "nvfp4", None, ["fp4_param_gather"]),
        ("bf16_mixed", "bf16", None, []),
        ("my_own_mixed", "bf16", None, ["mixed_precision"]),
    ],
)
def test_recipes_of_mixed_precision_by_name(
    tmp_path: Path, name: str, precision: str, recipe: str | None, noted: list[str]
) -> None:
    """src/megatron/bridge/training/mixed_precision.py, of releases 0.3.1 and 0.6.2."""
    options = ("--cluster", "dgx-b200", "--gpus", "64", "--model", "qwen3-8b")
    text = OVERRIDES.replace("  expert_model_parallel_size: 4\n  expert_tensor_parallel_size: 1\n", "")
    data, said = converted(tmp_path, "o.yaml", f"{text}mixed_precision: {name}\n", *options)
    assert of(data, "training", "precision", "fp8_recipe") == [precision, recipe]
    ends = {
        "bf16_with_fp8_current_scaling_mixed": [1, 1],
        "nemotron-h-bf16-with-fp8-current-scaling-mixed": [2, 2],
        "nemotron_3_super_bf16_with_nvfp4_mixed": [0, 14],
        "nemotron_3_ultra_bf16_with_nvfp4_mixed": [0, 16],
    }.get(name, [None, None])
    keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    assert of(data, "training", *keys) == ends
    in_8_bits = "current_scaling" in name.replace("-", "_") or "mxfp8" in name
    assert data["training"].get("fp8_param_gather", False) == in_8_bits
    listed = said.partition("not expressed here: ")[2].partition("\n")[0]
    assert all(word in listed for word in noted)
    assert bool(listed) == bool(noted)


@pytest.mark.parametrize(("tp", "waits"), [(4, ["qkv"]), (1, None)])
def test_a_layer_that_does_not_overlap(tmp_path: Path, tp: int, waits: list[str] | None) -> None:
    """`tp_comm_overlap_disable_qkv` of ModelParallelConfig."""
    keys = "  tp_comm_overlap: true\n  tp_comm_overlap_disable_qkv: true\n"
    text = DENSE.replace("model:\n", f"model:\n{keys}")
    text = text.replace("tensor_model_parallel_size: 4", f"tensor_model_parallel_size: {tp}")
    data, said = converted(tmp_path, "o.yaml", text, *WITH_8B)
    assert data["parallelism"].get("tp_overlap_except") == waits
    assert "tp_comm_overlap_disable_qkv" not in said


@pytest.mark.parametrize(
    ("keys", "offload", "noted"),
    [
        (
            "cpu_offloading: true\n  cpu_offloading_num_layers: 16\n  cpu_offloading_weights: false",
            {"layers": 16},
            False,
        ),
        ("cpu_offloading: true\n  cpu_offloading_num_layers: 16\n  cpu_offloading_weights: true", {"layers": 16}, True),
        ("cpu_offloading: false\n  cpu_offloading_num_layers: 31", None, False),  # as NeMo's files have it
        ("cpu_offloading_num_layers: 16", None, False),
        ("cpu_offloading: false\n  cpu_offloading_num_layers: 0", None, False),
        (
            "fine_grained_activation_offloading: true\n  offload_modules: [core_attn, attn_proj]",
            {"modules": ["core_attn", "attn_proj"]},
            False,
        ),
    ],
)
def test_activations_in_host_memory(tmp_path: Path, keys: str, offload: object, noted: bool) -> None:
    """Weights stay on the GPU: Transformer Engine ignores their switch since it began anew (cpu_offload.py)."""
    options = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "qwen3-8b")
    text = OVERRIDES.replace("  expert_model_parallel_size: 4\n  expert_tensor_parallel_size: 1\n", "")
    text = text.replace("  seq_length: 4096\n", f"  seq_length: 4096\n  {keys}\n")
    data, said = converted(tmp_path, "o.yaml", text, *options)
    assert data["training"].get("activation_offload") == offload
    assert ("cpu_offloading_weights" in said) == noted
    assert "offload_modules" not in said


def test_sizes_of_overrides_go_before_those_of_the_named_model(tmp_path: Path) -> None:
    more = "  num_layers: 8\n  num_moe_experts: 48\n  hidden_size: 7168\n"
    text = OVERRIDES.replace("  seq_length", f"{more}  seq_length", 1)
    found, _ = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "64", "--model", "kimi-k2")
    assert found["model"] == {"preset": "kimi-k2", "layers": 8, "moe": {"experts": 48}}


def test_the_users_values_of_variables(tmp_path: Path) -> None:
    text = OVERRIDES.replace("tensor_model_parallel_size: 4", "tensor_model_parallel_size: ${TP}", 1)
    here = ("--cluster", "dgx-h100", "--gpus", "64", "--model", "qwen3-30b-a3b")
    found, _ = converted(tmp_path, "a.yaml", text, *here, "--var", "TP=2")
    assert found["parallelism"]["tp"] == 2
    assert "--var TP=VALUE gives one" in refused(tmp_path, "a.yaml", text, *here)
    assert "--var: the file has no variable PP" in refused(tmp_path, "a.yaml", text, *here, "--var", "PP=2")
    assert "--args: can be given for a script only" in refused(tmp_path, "a.yaml", text, *here, "--args", "2")


def test_overrides_that_say_no_degree_are_told_by_their_batch(tmp_path: Path) -> None:
    """Megatron-Bridge's llama3_8b_pretrain_override_example_megatron_fsdp.yaml."""
    text = """
model: {seq_length: 4096}
train: {global_batch_size: 8, micro_batch_size: 1}
optimizer: {lr: 0.00025}
dist: {use_megatron_fsdp: true}
ddp: {data_parallel_sharding_strategy: optim_grads_params}
"""
    found, _ = converted(tmp_path, "a.yaml", text, "--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3-8b")
    assert (found["parallelism"]["zero"], found["training"]["seq_len"]) == (3, 4096)
