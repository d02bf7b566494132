"""torchtitan's configurations as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.input_source import Source
from sim.inputs.model_input import resolve_model
from sim.inputs.scenario import parse_scenario
from sim.inputs.trainer_names import TITAN_MODELS
from sim.models.parameters import count_parameters
from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import FULL_RECOMPUTE, TITAN


def test_a_torchtitan_file_with_degrees_left_to_the_launcher(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "llama.toml", TITAN, "--cluster", "dgx-h100", "--gpus", "32")
    p, t = data["parallelism"], data["training"]
    assert (p["dp"], p["tp"], p["zero"], p["shard_size"]) == (16, 2, 3, 8)
    assert (t["precision"], t["framework"], t["recompute"]) == ("fp8", "compiled", "selective_op")
    assert t["global_batch_size"] == 2 * 16
    assert data["model"] == "llama3.1-8b"


@pytest.mark.parametrize(("line", "whole"), [("", True), ("early_stop = true", False), ("early_stop = false", True)])
def test_torchtitans_recomputation_by_operator_ends_with_the_block_unless_told(
    tmp_path: Path, line: str, whole: bool
) -> None:
    """torchtitan/config/job_config.py, `ActivationCheckpoint.early_stop`; distributed/activation_checkpoint.py."""
    text = f"""[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
{line}
"""
    machine = ("--cluster", "dgx-h100", "--gpus", "8")
    data, _ = converted(tmp_path, "x.toml", text, *machine)
    by_operator = {"mode": "selective_op", "early_stop": False} if whole else "selective_op"
    assert data["training"]["recompute"] == by_operator
    older, _ = converted(tmp_path, "old.toml", text.replace("local_batch", "batch").replace(line, ""), *machine)
    assert older["training"]["recompute"] == "selective_op"


@pytest.mark.parametrize(("rotates", "method"), [("allgather", "all_gather"), ("alltoall", "ring")])
def test_a_ring_is_named_that_today_s_torchtitan_has_not(tmp_path: Path, rotates: str, method: str) -> None:
    """Issue 3086: context_parallel_rotate_method is read by nothing since pull request 2555."""
    keys = f'context_parallel_degree = 2\ncontext_parallel_rotate_method = "{rotates}"\n'
    text = TITAN.replace("[parallelism]\n", f"[parallelism]\n{keys}")
    data, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "64")
    assert data["parallelism"]["cp_method"] == method
    assert ("reads it no more and gathers keys and values" in said) is (rotates == "alltoall")


INTERLEAVED = """[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
FIRST_STAGES = [[f"layers.{n}" for n in range(*ends)] for ends in ((0, 10), (10, 20), (20, 32))]


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ("", [8, 9, 8, 7]),
        ("pipeline_parallel_last_stage_less_layers = 3", [8, 9, 9, 6]),
        ('pipeline_parallel_split_points = ["layers.10", "layers.20", "norm"]', [10, 10, 12, 0]),
        (f"module_fqns_per_model_part = {[*FIRST_STAGES, ['norm', 'output']]}", [10, 10, 12, 0]),
        ('pipeline_parallel_schedule = "Interleaved1F1B"', [4, 5, 4, 4, 4, 4, 4, 3]),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 3', [2, *[3] * 9, 2, 1]),
    ],
)
def test_torchtitan_counts_embedding_and_output_as_layers_of_a_pipeline(
    tmp_path: Path, keys: str, layers: list[int]
) -> None:
    """distributed/pipeline_parallel.py: _generate_llm_fqn_per_model_part."""
    text = TITAN.replace("[parallelism]\n", f"[parallelism]\npipeline_parallel_degree = 4\n{keys}\n")
    text = text.replace("local_batch_size = 2", "local_batch_size = 4")
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert data["parallelism"]["layers_per_stage"] == layers
    assert data["parallelism"]["virtual_stages"] == len(layers) // 4


@pytest.mark.parametrize(("local", "group"), [(2, 2), (4, None), (6, 6), (8, None), (10, 5)])
def test_how_many_micro_batches_an_interleaved_stage_takes_in_a_row(
    tmp_path: Path, local: int, group: int | None
) -> None:
    """4 stages; torch divides the micro-batches by (micro-batches // 4) rounds."""
    text = TITAN.replace("local_batch_size = 2", f"local_batch_size = {local}").replace("[parallelism]\n", INTERLEAVED)
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert data["parallelism"].get("micro_batch_group") == group


def test_micro_batches_that_torch_refuses_are_refused(tmp_path: Path) -> None:
    text = TITAN.replace("local_batch_size = 2", "local_batch_size = 9").replace("[parallelism]\n", INTERLEAVED)
    said = refused(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert "training.local_batch_size: makes 9 micro-batches; Interleaved1F1B takes a multiple of 9 // 4 = 2" in said


def test_torchtitan_s_settings_without_effect_are_not_listed(tmp_path: Path) -> None:
    keys = 'gc_freq = 50\n[optimizer]\nname = "AdamW"\nlr = 3e-4\nimplementation = "for-loop"\n[parallelism]'
    text = TITAN.replace("[parallelism]", keys)
    said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")[1]
    assert "# not expressed here: optimizer.implementation\n" in said


OF_2024 = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[training]
batch_size = 8
seq_len = 8192
warmup_steps = 200
data_parallel_degree = -1
tensor_parallel_degree = 4
enable_float8_linear = true
compile = false
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = "layers.38"
pipeline_parallel_schedule = "1f1b"
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "full"
"""


def test_a_config_of_2024(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "old.toml", OF_2024, "--cluster", "dgx-h100", "--gpus", "64")
    layout = data["parallelism"]
    assert (layout["dp"], layout["tp"], layout["pp"], layout["layers_per_stage"]) == (8, 4, 2, [38, 42])
    assert (data["training"]["micro_batch_size"], data["training"]["precision"]) == (4, "fp8")
    assert "not expressed" not in said
    for_each = OF_2024.replace(
        "[activation", "pipeline_parallel_microbatches = 8\nenable_compiled_autograd = true\n[activation"
    )
    data, said = converted(tmp_path, "old.toml", for_each, "--cluster", "dgx-h100", "--gpus", "64")
    assert data["training"]["micro_batch_size"] == 1
    assert "not expressed here: experimental.enable_compiled_autograd" in said


def test_degrees_of_early_2025_in_training(tmp_path: Path) -> None:
    text = OF_2024.replace("data_parallel_degree", "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree")
    text = text.replace("pipeline_parallel_degree = 2", "context_parallel_degree = 2")
    data, _ = converted(tmp_path, "old.toml", text, "--cluster", "dgx-h100", "--gpus", "64")
    layout = data["parallelism"]
    assert (layout["dp"], layout["tp"], layout["cp"], layout["pp"], layout["shard_size"]) == (8, 4, 2, 1, 8)


@pytest.mark.parametrize(("reduces", "dtype"), [("bfloat16", "bf16"), ("float32", None)])
def test_fsdp_reduces_gradients_in_the_dtype_that_the_file_names(
    tmp_path: Path, reduces: str, dtype: str | None
) -> None:
    """torchtitan/config/configs.py: `mixed_precision_reduce`, FSDP2's `reduce_dtype`."""
    text = TITAN.replace("[training]\n", f'[training]\nmixed_precision_reduce = "{reduces}"\n')
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert data["training"].get("grad_reduce_dtype") == dtype
    parallel = "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 16"
    text = text.replace("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = -1", parallel)
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert "grad_reduce_dtype" not in data["training"]  # DDP has no such dtype


@pytest.mark.parametrize(("reduces", "dtype"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_parameters_in_bf16_have_no_copy_and_moments_and_gradients_like_them(
    tmp_path: Path, reduces: str, dtype: str
) -> None:
    """torch/optim/adam.py: `exp_avg = zeros_like(p)`; FSDP2's `foreach_reduce` casts a shard's gradient back."""
    text = TITAN.replace("[training]\n", f'[training]\ndtype = "bfloat16"\nmixed_precision_reduce = "{reduces}"\n')
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    found = data["training"]
    assert found["grad_reduce_dtype"] == dtype
    assert {found[key] for key in ("param_dtype", "grad_dtype", "optimizer_dtype")} == {"bf16"}
    assert found["master_weights"] is False


def test_stages_that_are_no_multiple_of_the_ranks_are_refused_in_torchtitans_words(tmp_path: Path) -> None:
    """distributed/pipeline_parallel.py: 32 layers, embedding and output as one each, by 4 make 9 stages."""
    own = "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 4"
    text = TITAN.replace("[parallelism]\n", f"[parallelism]\n{own}\n")
    said = refused(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert "pipeline_parallel_layers_per_stage: found 4; 32 + 1 + 1 layers" in said
    assert "make 9 stages, no multiple of pp 2" in said


TOKENS = """
from torchtitan.models.qwen3 import model_registry

def train() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("1.7B", converters=[NVFP4LinearConverter.Config(fqns=FQNS)]),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(pipeline_parallel_degree=PP, num_pp_microbatches=8),
    )
"""
ON_8 = ("--cluster", "dgx-b200", "--gpus", "8")


@pytest.mark.parametrize(("pp", "whole"), [(1, 4 * 8), (2, 4 * 8 * 4)])
def test_batches_in_tokens(tmp_path: Path, pp: int, whole: int) -> None:
    """config/configs.py since summer 2026: tokens of a micro-batch, and micro-batches of a pipeline."""
    text = TOKENS.replace("PP", str(pp))
    data, _ = converted(tmp_path, "c.py", text, *ON_8)
    t = data["training"]
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"]) == (4096, 4, whole)
    more = text.replace("max_context", "num_tokens_per_train_step=1024 * 4096, max_context")
    assert converted(tmp_path, "c.py", more, *ON_8)[0]["training"]["global_batch_size"] == 1024
    odd = text.replace("=4096", "=3000")
    assert "multiple of training.max_context_length, 3000" in refused(tmp_path, "c.py", odd, *ON_8)


@pytest.mark.parametrize(("fqns", "said"), [('["layers"]', False), ('["layers.0."]', True), ("tail(28, 0.15)", True)])
def test_layers_that_a_converter_leaves_out_are_named(tmp_path: Path, fqns: str, said: bool) -> None:
    text = TOKENS.replace("PP", "1").replace("FQNS", fqns)
    data, notes = converted(tmp_path, "c.py", text, *ON_8)
    assert data["training"]["precision"] == "nvfp4"
    assert ("model.converters.fqns" in notes) == said


@pytest.mark.parametrize(
    ("flavor", "parameters"), [("qwen3 0.6b", 596049920), ("qwen3 1.7b", 1720574976), ("deepseek_v3 16b", 15706484224)]
)
def test_flavors_beside_the_shipped_models(flavor: str, parameters: int) -> None:
    """As many parameters as the checkpoints that they are named after (Qwen3-0.6B, Qwen3-1.7B, DeepSeek-V2-Lite)."""
    model = resolve_model(TITAN_MODELS[flavor], Source("model", {}), ())
    assert count_parameters(model).total == parameters


def test_fsdp_s_offload_keeps_parameters_and_optimizer_on_the_host(tmp_path: Path) -> None:
    """config/job_config.py: `enable_cpu_offload` of parameters, gradients and optimizer states in FSDP."""
    text = TITAN.replace("local_batch_size = 2", "local_batch_size = 2\nenable_cpu_offload = true")
    data, notes = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert (data["training"]["optimizer_offload"], data["training"]["parameter_offload"]) == ("cpu", True)
    assert "on the host" not in notes
    assert parse_scenario(data)


@pytest.mark.parametrize(("key", "found"), [("batch_size", "full"), ("local_batch_size", FULL_RECOMPUTE)])
def test_recomputation_ends_early_before_torchtitan_had_a_switch_for_it(tmp_path: Path, key: str, found: Any) -> None:
    text = f"""
        [model]
        flavor = "8B"
        [training]
        {key} = 1
        [activation_checkpoint]
        mode = "full"
    """
    data, _ = converted(tmp_path, "full.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["recompute"] == found


def test_gpus_that_are_not_the_product_of_all_degrees_are_refused(tmp_path: Path) -> None:
    """torchtitan/distributed/parallel_dims.py: `_validate`."""
    text = TITAN.replace("shard_degree = -1", "shard_degree = 4")
    assert "32 GPUs; must be 16" in refused(tmp_path, "a.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    data, _ = converted(tmp_path, "a.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert data["parallelism"]["dp"] == 8


def test_tables_of_forks_are_named(tmp_path: Path) -> None:
    text = TITAN + "\n[peft]\nenable_peft = true\nlora_rank = 64\n[checkpoint]\ninterval = 500\n"
    _, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert "not expressed here: peft.enable_peft, peft.lora_rank" in said


def test_a_python_config_with_the_tables_of_a_toml(tmp_path: Path) -> None:
    """torchtitan/models/qwen3/train_configs/qwen3_32b.py of early 2026."""
    text = """default_config = JobConfig(
        model=Model(name="qwen3", flavor="32B"),
        optimizer=Optimizer(lr=8e-4),
        training=Training(local_batch_size=2, seq_len=4096),
        activation_checkpoint=ActivationCheckpoint(mode="full", selective_ac_option="op"))"""
    data, said = converted(tmp_path, "qwen3_32b.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    training = data["training"]
    assert data["model"] == "qwen3-32b"
    assert (training["micro_batch_size"], training["seq_len"], training["recompute"]) == (2, 4096, FULL_RECOMPUTE)
    assert "cuda_graphs" not in training
    assert "not expressed here" not in said


@pytest.mark.parametrize(
    ("arguments", "degree", "dispatcher", "named"),
    [
        ('"30B-A3B", moe_comm_backend="deepep", attn_backend="sdpa"', 4, "deepep", ""),
        ('"30B-A3B", moe_comm_backend="standard"', 4, None, ""),
        ('"30B-A3B", moe_comm_backend="hybridep", attn_backend="flex"', 4, "hybridep", "model.attn_backend"),
    ],
)
def test_arguments_of_the_models_registry(
    tmp_path: Path, arguments: str, degree: int, dispatcher: str | None, named: str
) -> None:
    """torchtitan/models/qwen3/config_registry.py: `qwen3_moe_deepep`."""
    (tmp_path / "qwen3").mkdir()
    text = f"""def moe():
    return Trainer.Config(
        model_spec=model_registry({arguments}),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=4096),
        parallelism=ParallelismConfig(expert_parallel_degree={degree}))"""
    data, said = converted(tmp_path / "qwen3", "config_registry.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["model"] == "qwen3-30b-a3b"
    assert data["parallelism"].get("ep_dispatcher") == dispatcher
    assert (f"not expressed here: {named}\n" in said) is bool(named)


@pytest.mark.parametrize("on", [True, False])
def test_replica_groups_of_torchft_are_named(tmp_path: Path, on: bool) -> None:
    text = f"{TITAN}\n[fault_tolerance]\nenable = {str(on).lower()}\n"
    output = converted(tmp_path, "a.toml", text, "--cluster", "dgx-h100", "--gpus", "64")[1]
    assert ("fault_tolerance.enable: the file's GPUs are one of several replica groups" in output) is on


@pytest.mark.parametrize(
    ("lines", "batch", "note", "named"),
    [
        (
            "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1",
            32,
            "all-reduces gradients in every",
            True,
        ),
        (
            "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1",
            16,
            "all-reduces gradients in every",
            False,
        ),
        ("data_parallel_shard_degree = 8", 32, "all-reduces gradients in every", False),
        ('fsdp_reshard_after_forward = "always"', 16, "always frees the last norm and the output matrix, too", True),
        ('fsdp_reshard_after_forward = "default"', 16, "frees the last norm", False),
    ],
)
def test_messages_that_torchtitan_sends_more_often_are_named(
    tmp_path: Path, lines: str, batch: int, note: str, named: bool
) -> None:
    """train.py of 0.2.2, train_step: no `no_sync`; models/llama3/infra/parallelize.py, apply_fsdp: [norm, output]."""
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nglobal_batch_size = {batch}\n'
    text += f"[parallelism]\n{lines}\n"
    _, said = converted(tmp_path, "x.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert (note in said) is named
