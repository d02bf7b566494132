"""NeMo RL's configs, with what they inherit, as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import OF_RL, converted, of, refused

# Keys and values of examples/configs/grpo_math_1B.yaml that a step depends on, and some that it does not.
BASE = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_steps: 1000000
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {reference_policy_kl_penalty: 0.01, force_on_policy_ratio: false}
policy:
  model_name: Qwen/Qwen3-8B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: ${policy.train_micro_batch_size}
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {_v2: true, enabled: true, cpu_offload: False, sequence_parallel: false, activation_checkpointing: false,
    tensor_parallel_size: 1, context_parallel_size: 1, custom_parallel_plan: null}
  megatron_cfg:
    enabled: false
    empty_unused_memory_level: 0
    activation_checkpointing: false
    tensor_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    num_layers_in_first_pipeline_stage: null
    context_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    freeze_moe_router: true
    moe_router_dtype: fp64
    moe_router_load_balancing_type: none
    moe_permute_fusion: false
    apply_rope_fusion: True
    bias_activation_fusion: True
    optimizer: {optimizer: adam, lr: 5.0e-6, bf16: true, fp16: false, params_dtype: float32,
      use_distributed_optimizer: true, use_precision_aware_optimizer: true, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true,
      overlap_param_gather: true, average_in_collective: true, use_custom_fsdp: false,
      data_parallel_sharding_strategy: optim_grads_params}
    fp8_cfg: null
  dynamic_batching: {enabled: False,
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  sequence_packing: {enabled: True,
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
    algorithm: modified_first_fit_decreasing, sequence_length_round: 64}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, foreach: False, fused: False}}
  scheduler: [{name: torch.optim.lr_scheduler.LinearLR}]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    vllm_cfg: {async_engine: false, precision: "${policy.precision}", kv_cache_dtype: auto, tensor_parallel_size: 1,
      pipeline_parallel_size: 1, expert_parallel_size: 1, gpu_memory_utilization: 0.6, enforce_eager: False,
      max_model_len: "${policy.max_total_sequence_length}"}
    vllm_kwargs: {}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data: {max_input_seq_length: "${policy.max_total_sequence_length}", shuffle: true, env: "${oc.env:HOME}"}
logger: {log_dir: logs}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
EXPERTS = """
defaults: base.yaml
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: false}
  optimizer: null
  scheduler: null
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, expert_model_parallel_size: 8, optimizer: {lr: 3.0e-07}}
  generation: {vllm_cfg: {tensor_parallel_size: 2}}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""
APART = """
defaults: [experts.yaml]
grpo: {async_grpo: {enabled: true}}
policy:
  train_global_batch_size: 2048
  megatron_cfg: {pipeline_model_parallel_size: 2,
    moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: hybridep}
  generation: {colocated: {enabled: false, resources: {num_nodes: 2, gpus_per_node: 8}},
    vllm_cfg: {gpu_memory_utilization: 0.8}}
"""
TUNING = """
sft: {max_num_steps: 60, seed: 42}
policy:
  model_name: meta-llama/Llama-3.2-1B
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  dtensor_cfg: {enabled: true, activation_checkpointing: true, tensor_parallel_size: 2, sequence_parallel: true,
    lora_cfg: {enabled: true, match_all_linear: true, dim: 8, alpha: 32}}
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: false}
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, foreach: False, fused: False}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def _with_parents(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "experts.yaml").write_text(EXPERTS)


def _changed(text: str, **changes: Any) -> str:
    """The YAML with values at dotted keys (`policy__precision`)."""
    data = yaml.safe_load(text)
    for path, value in changes.items():
        *above, last = path.split("__")
        at = data
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    return yaml.safe_dump(data)


def test_dtensor_and_its_engine_take_turns(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "grpo.yaml", BASE, *OF_RL)
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert of(data, "parallelism", "dp", "tp", "zero", "fsdp_version") == [8, None, 3, 2]
    assert of(data, "training", "seq_len", "global_batch_size", "micro_batch_size") == [512, 512, 4]
    assert of(data, "training", "param_dtype", "grad_reduce_dtype", "adamw_kernels") == ["fp32", "fp32", "foreach"]
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt", "reference") == [32, 16, "host"]
    assert of(data, "rl", "sequences", "prompt_len") == ["packed", {"max": 511, "mean": 100}]
    engine = data["rl"]["generation"]
    assert (engine["engine"], engine["tp"], engine["kv_cache"]) == ("vllm-v1", 1, {"memory_fraction": 0.6})
    assert "not expressed" not in said


def test_parameters_may_lie_on_the_host(tmp_path: Path) -> None:
    text = BASE.replace("cpu_offload: False", "cpu_offload: True").replace("fused: False", "fused: True")
    data, said = converted(tmp_path, "grpo.yaml", text, *OF_RL)
    assert of(data, "training", "optimizer_offload", "parameter_offload") == ["cpu", True]
    assert "FSDP's offload" not in said
    assert parse_scenario(data)


def test_megatron_splits_experts_with_what_the_file_inherits(tmp_path: Path) -> None:
    _with_parents(tmp_path)
    data, said = converted(tmp_path, "mine.yaml", EXPERTS, *OF_RL)
    assert of(data, "parallelism", "dp", "tp", "pp", "ep", "zero", "dp_sync") == [32, 1, 1, 8, 1, "bucketed"]
    assert of(data, "training", "framework", "seq_len", "micro_batch_size") == ["megatron", 4096, 1]
    assert of(data, "training", "grad_dtype", "global_batch_size") == ["bf16", 512]
    engine = data["rl"]["generation"]
    assert (engine["tp"], engine["expert_tp"]) == (2, 2)
    assert "freeze_moe_router" in said  # the frozen router is not simulated


def test_engines_on_gpus_of_their_own_run_a_step_ahead(tmp_path: Path) -> None:
    _with_parents(tmp_path)
    data, said = converted(tmp_path, "mine.yaml", APART, *OF_RL)
    assert of(data, "parallelism", "dp", "pp", "ep", "ep_dispatcher") == [8, 2, 8, "hybridep"]
    assert of(data, "rl", "colocated", "steps_off") == [False, 1]
    assert data["rl"]["generation"]["replicas"] == 16 // 2
    assert "engines never wait" in said
    assert "log_probs" not in data["rl"]
    on_policy = APART + "loss_fn: {force_on_policy_ratio: true}\n"
    assert converted(tmp_path, "mine.yaml", on_policy, *OF_RL)[0]["rl"]["log_probs"] == "engine"


def test_fine_tuning_with_adapters(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "sft.yaml", TUNING, "--cluster", "dgx-h100")
    assert "rl" not in data
    assert of(data, "parallelism", "dp", "tp", "sp") == [4, 2, True]
    assert of(data, "training", "micro_batch_size", "recompute", "lora") == [2, "full", {"rank": 8}]
    assert "not expressed" not in said


def test_what_is_not_simulated_is_refused_or_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "x.yaml", EXPERTS, *OF_RL)
    assert "x.yaml: defaults: found 'base.yaml', which is not there" in said
    (tmp_path / "a.yaml").write_text("defaults: a.yaml\npolicy: {model_name: x}\n")
    assert "inherits in a circle" in refused(tmp_path, "a.yaml", "defaults: a.yaml\npolicy: {model_name: x}\n", *OF_RL)
    said = refused(tmp_path, "x.yaml", _changed(BASE, policy__generation__backend="sglang"), *OF_RL)
    assert "policy.generation.backend: found 'sglang'; can be converted: vllm" in said
    said = refused(tmp_path, "x.yaml", _changed(BASE, policy__dtensor_cfg__expert_parallel_size=8), *OF_RL)
    assert "expert_parallel_size: found 8; must be 1" in said
    said = refused(tmp_path, "x.yaml", _changed(BASE, dpo={"seed": 1}), *OF_RL)
    assert "x.yaml: dpo: is not simulated" in said
    said = refused(tmp_path, "x.yaml", _changed(BASE, policy__dtensor_cfg__enabled=False), *OF_RL)
    assert "neither megatron_cfg.enabled nor dtensor_cfg.enabled is true" in said
    _, said = converted(tmp_path, "x.yaml", _changed(BASE, policy__draft__enabled=True), *OF_RL)
    assert "not expressed here: policy.draft.enabled" in said
    for value in (False, 0, ""):
        _, said = converted(tmp_path, "x.yaml", _changed(BASE, policy__other__part=value), *OF_RL)
        assert "not expressed here: policy.other.part" in said
    mistyped = BASE.replace("activation_checkpointing: false,\n", "activation_checkpointin: true,\n", 1)
    _, said = converted(tmp_path, "x.yaml", mistyped, *OF_RL)
    assert "activation_checkpointin is not read: did you mean activation_checkpointing?" in said.replace(
        "policy.dtensor_cfg.", ""
    )


def test_a_section_may_replace_its_parents(tmp_path: Path) -> None:
    _with_parents(tmp_path)
    replaced = "{_override_: true, enabled: false}"
    text = f"defaults: base.yaml\npolicy: {{model_name: Qwen/Qwen3-8B, sequence_packing: {replaced}}}\n"
    data, _ = converted(tmp_path, "mine.yaml", text, *OF_RL)
    assert of(data, "rl", "sequences") == ["padded"]
