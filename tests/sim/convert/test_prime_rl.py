"""prime-rl's TOML as scenarios."""

from __future__ import annotations

from pathlib import Path

from sim.inputs.scenario import parse_scenario
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
    assert of(data, "training", "framework", "recompute", "activation_offload") == ["compiled_real_rope", "full", True]
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


def test_a_base_of_several_files_has_the_defaults_of_its_data(tmp_path: Path) -> None:
    """configs/sft.py; a table of the deployment tells such a file from torchtitan's."""
    base = """
[model]
name = "Qwen/Qwen3-8B"
[model.ac]
freq = 1
[deployment]
type = "multi_node"
num_train_nodes = 4
"""
    data, said = converted(tmp_path, "base.toml", base, "--cluster", "dgx-h200")
    assert of(data, "parallelism", "dp", "zero") == [32, 3]
    assert of(data, "training", "seq_len", "global_batch_size") == [128, 128]
    assert "data.seq_len: 128, prime-rl's default" in said
    older = converted(tmp_path, "base.toml", base.replace("num_train_nodes", "num_nodes"), "--cluster", "dgx-h200")[0]
    assert data == older


def test_fsdps_offload_keeps_parameters_on_the_host(tmp_path: Path) -> None:
    text = TUNING.replace("optim_cpu_offload", "fsdp_cpu_offload")
    data, said = converted(tmp_path, "sft.toml", text, "--cluster", "dgx-h200", "--model", "qwen3-30b-a3b")
    assert of(data, "training", "optimizer_offload", "parameter_offload") == ["cpu", True]
    assert "on the host" not in said
    assert parse_scenario(data)


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


def test_no_key_is_dropped_in_silence(tmp_path: Path) -> None:
    """Of the orchestrator, at the top, and with a value that turns something off."""
    more = """
[orchestrator.concurrency]
max_inflight = 0
[experimental]
quick = false
[weight_broadcast]
type = "nccl"
quantize_in_weight_transfer = true
"""
    text = MATH.replace('[weight_broadcast]\ntype = "nccl"\n', "").replace(
        "ep = 8", "ep = 8\nmoe_use_grouped_mm = false"
    )
    _, said = converted(tmp_path, "rl.toml", text + more, *OF_RL)
    (told,) = [line for line in said.splitlines() if "not expressed here" in line]
    for name in (
        *("orchestrator.concurrency.max_inflight", "experimental.quick", "trainer.model.moe_use_grouped_mm"),
        "weight_broadcast.quantize_in_weight_transfer",
    ):
        assert name in said.replace("\n# ", " "), (name, told)
    assert "trainer.model.fused_lm_head_token_chunk_size not given: simulated as off" in said.replace("\n# ", " ")


def test_names_of_newer_releases(tmp_path: Path) -> None:
    text = MATH.replace(
        "[inference.parallel]\ntp = 8", "[inference.vllm]\ntensor_parallel_size = 4\nenforce_eager = true"
    )
    text = text.replace("ep = 8", 'ep = "auto"\nmoe.dispatch.type = "deepep"')
    text = text.replace("group_size = 16\n", "seq_len = 8192\n")
    data, said = converted(tmp_path, "rl.toml", text, *OF_RL)
    assert (data["rl"]["generation"]["tp"], data["rl"]["generation"]["replicas"]) == (4, 4)
    assert of(data, "parallelism", "ep", "ep_dispatcher") == [8, "deepep"]
    assert of(data, "training", "gradient_clipping") == [False]
    assert of(data, "rl", "generations_per_prompt") == [1]
    assert data["rl"]["output_len"]["max"] == 8192
    assert "inference.vllm.enforce_eager: the engine is simulated with CUDA graphs" in said.replace("\n# ", " ")
    assert "not expressed" not in said
    said = refused(tmp_path, "rl.toml", text + '[trainer.model.quantization]\ntype = "fp8"\n', *OF_RL)
    assert "trainer.model.quantization.type: found 'fp8'; its fp8 is not simulated" in said
    said = refused(tmp_path, "rl.toml", MATH.replace("ep = 8", "ep = 8\nfp8 = true"), *OF_RL)
    assert "trainer.model.fp8: found true; its fp8 is not simulated" in said


def test_environments_have_groups_of_their_own(tmp_path: Path) -> None:
    text = MATH.replace('name = "math"', 'name = "math"\ngroup_size = 8')
    data, _ = converted(tmp_path, "rl.toml", text, *OF_RL)
    assert of(data, "rl", "prompts_per_step", "generations_per_prompt") == [64, 8]
    more = '\n[[orchestrator.train.env]]\nname = "code"\n'
    said = refused(tmp_path, "rl.toml", text.replace("[inference.parallel]", f"{more}[inference.parallel]"), *OF_RL)
    assert "orchestrator.train.env: found group_size 16 and 8; must be the same whole number in all" in said


def test_groups_of_nodes_hold_the_model(tmp_path: Path) -> None:
    text = MATH.replace("num_train_nodes = 2", "num_train_nodes = 4\nnodes_per_fsdp_group = 2")
    data, _ = converted(tmp_path, "rl.toml", text, *OF_RL)
    assert of(data, "parallelism", "dp", "shard_size") == [32, 16]
    said = refused(tmp_path, "rl.toml", text.replace("group = 2", "group = 3"), *OF_RL)
    assert "nodes_per_fsdp_group: found 3; groups of so many nodes must divide 32 GPUs" in said
    said = refused(tmp_path, "rl.toml", MATH, *OF_RL, "--gpus", "64")
    assert "--gpus 64: the file has 16 GPUs that train and 16 of engines" in said


def test_fine_tunings_loss_length_and_parts_that_are_off(tmp_path: Path) -> None:
    on = ("--cluster", "dgx-h200", "--gpus", "8")
    text = ONE_GPU.replace("seq_len = 4096\n", "").replace("[model]", 'loss_impl = "liger_fused"\n[model]\nac = "None"')
    data, said = converted(tmp_path, "sft.toml", text + '[optim]\nmax_norm = "None"\n', *on)
    assert of(data, "training", "seq_len", "cross_entropy", "gradient_clipping") == [128, "chunked", False]
    assert "recompute" not in data["training"]
    assert "model.ac," not in said
    text = MATH.replace("max_completion_tokens = 16384", "max_tokens = 4096\ntemperature = 0.6")
    data, _ = converted(tmp_path, "rl.toml", text, *OF_RL)
    assert data["rl"]["output_len"]["max"] == 4096
    assert data["rl"]["generation"]["sampling"]["temperature"] == 0.6
