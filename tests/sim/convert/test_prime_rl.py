"""prime-rl's TOML as scenarios."""

from __future__ import annotations

from pathlib import Path

from tests.sim.convert.converting import OF_RL, converted, of, refused

MATH = """
seq_len = 32768
[log]
level = "debug"
[model]
name = "Qwen/Qwen3-30B-A3B"
[weight_broadcast]
type = "nccl"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 2
[trainer.model]
impl = "custom"
attn = "flash_attention_3"
ep = 8
[trainer.model.compile]
[trainer.model.ac_offloading]
max_inflight_activations = 5
[trainer.model.ac]
freq = 1
[trainer.optim]
type = "adamw"
lr = 1e-6
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 8
[orchestrator.train.sampling]
max_completion_tokens = 16384
[[orchestrator.train.env]]
name = "math"
[inference.parallel]
tp = 8
"""
TUNING = """
max_steps = 20
[deployment]
type = "multi_node"
num_nodes = 4
[model]
name = "zai-org/GLM-4.5-Air"
cp = 4
cp_style = "ulysses"
fused_lm_head_token_chunk_size = 1024
optim_cpu_offload = true
[model.ac]
freq = 2
[data]
type = "sft"
name = "x"
seq_len = 131072
batch_size = 8
micro_batch_size = 1
[optim]
type = "adamw"
lr = 1e-5
"""
ONE_GPU = """
[model]
name = "Qwen/Qwen3-8B"
[data]
seq_len = 4096
batch_size = 16
[model.lora]
rank = 8
target_modules = ["q_proj", "v_proj"]
"""


def test_engines_run_a_step_ahead_and_give_the_log_probabilities(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "rl.toml", MATH, *OF_RL)
    assert data["model"] == "hf://Qwen/Qwen3-30B-A3B"
    assert of(data, "parallelism", "dp", "ep", "zero", "fsdp_version") == [16, 8, 3, 2]
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [32768, 1, 512]
    assert of(data, "training", "framework", "recompute", "activation_offload") == ["compiled", "full", True]
    assert of(data, "training", "param_dtype", "grad_reduce_dtype") == ["fp32", "fp32"]
    assert of(data, "training", "attention_kernel", "gradient_clipping") == ["flash3", True]
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt", "steps_off") == [32, 16, 1]
    assert of(data, "rl", "colocated", "reference", "log_probs") == [False, "none", "engine"]
    assert of(data, "rl", "output_len") == [{"max": 16384, "mean": 300}]
    engine = data["rl"]["generation"]
    assert (engine["replicas"], engine["tp"], engine["expert_tp"]) == (2, 8, 8)
    assert "not expressed" not in said


def test_fine_tuning_over_contexts(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "sft.toml", TUNING, "--cluster", "dgx-h200", "--model", "qwen3-30b-a3b")
    assert "rl" not in data
    assert of(data, "parallelism", "dp", "cp", "cp_method") == [8, 4, "all_to_all"]
    assert of(data, "training", "seq_len", "global_batch_size", "optimizer") == [131072, 8, "adamw"]
    assert of(data, "training", "cross_entropy", "optimizer_offload") == ["tiled", True]
    assert of(data, "training", "recompute") == [{"mode": "full", "every": 2}]
    assert "model.ep is 1" in said
    muon = TUNING.replace('"adamw"', '"muon"')
    said = refused(tmp_path, "sft.toml", muon, "--cluster", "dgx-h200", "--model", "qwen3-30b-a3b")
    assert "Muon needs a matrix's whole gradient" in said
    data, _ = converted(tmp_path, "sft.toml", ONE_GPU, "--cluster", "dgx-h200", "--gpus", "8")
    assert of(data, "parallelism", "dp") == [8]
    assert of(data, "training", "lora") == [{"rank": 8, "targets": ["qkv"]}]


def test_what_is_not_simulated_is_refused_or_named(tmp_path: Path) -> None:
    parts = MATH.replace("freq = 1", 'mode = "selective"')
    said = refused(tmp_path, "rl.toml", parts, *OF_RL)
    assert "trainer.model.ac.mode: found 'selective'; can be converted: full" in said
    said = refused(tmp_path, "rl.toml", MATH.replace("group_size = 16", "group_size = 7"), *OF_RL)
    assert "orchestrator.batch_size: found 512; must be a multiple of 7 answers a group" in said
    said = refused(tmp_path, "rl.toml", MATH.replace('"adamw"', '"sign_sgd"'), *OF_RL)
    assert "trainer.optim.type: found 'sign_sgd'; can be converted" in said
    _, said = converted(tmp_path, "rl.toml", MATH.replace("ep = 8", "ep = 8\ndeepep_token_chunk_size = 64"), *OF_RL)
    assert "not expressed here: trainer.model.deepep_token_chunk_size" in said
    _, said = converted(tmp_path, "rl.toml", MATH + "\n[inference]\nenable_eplb = true\n", *OF_RL)
    assert "not expressed here: inference.enable_eplb" in said


def test_deepep_turns_clipping_off(tmp_path: Path) -> None:
    text = MATH.replace("ep = 8", 'ep = 8\nep_comm_backend = "deepep"')
    data, _ = converted(tmp_path, "rl.toml", text, *OF_RL)
    assert of(data, "parallelism", "ep_dispatcher") == ["deepep"]
    assert of(data, "training", "gradient_clipping") == [False]
