"""verl's fine-tuning as scenarios: its command with FSDP and with Megatron, its YAML, and releases before 0.7."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.sim.convert.converting import converted, of, refused

HERE = ("--cluster", "dgx-h100")
MEGATRON = """
ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
MODEL_ID=${MODEL_ID:-Qwen/Qwen3-8B}
MODEL_PATH=${MODEL_PATH:-${HOME}/models/${MODEL_ID}}
VPP_SIZE=${VPP_SIZE:-null}
ENGINE_CONFIG="\\
    engine=megatron \\
    optim=megatron \\
    optim.lr=1e-5 \\
    optim.betas="[0.9,0.95]" \\
    engine.tensor_model_parallel_size=2 \\
    engine.pipeline_model_parallel_size=2 \\
    engine.virtual_pipeline_model_parallel_size=${VPP_SIZE} \\
    engine.context_parallel_size=1"
torchrun --standalone --nnodes=1 --nproc_per_node=8 ${ENTRYPOINT} \\
    data.train_files=a.parquet data.train_batch_size=64 data.max_length=2048 \\
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192 \\
    model.path=$MODEL_PATH ${ENGINE_CONFIG} trainer.logger=['console']
"""
FSDP = """
torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    data.train_batch_size=128 data.max_length=4096 model.path=Qwen/Qwen3-8B \\
    engine=fsdp engine.strategy=fsdp2 engine.ulysses_sequence_parallel_size=2
"""
CONFIG = """
defaults: [{model@model: hf_model}, {engine@engine: fsdp}, _self_]
data: {train_batch_size: 128, max_length: 4096, max_token_len_per_gpu: 8192, use_dynamic_bsz: true}
model: {path: Qwen/Qwen3-8B, enable_gradient_checkpointing: true, lora_rank: 0}
engine: {strategy: fsdp2, ulysses_sequence_parallel_size: 2, model_dtype: fp32, fsdp_size: -1}
optim: {lr: 1.0e-5, clip_grad: 1.0}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""
BEFORE = """
torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \\
    data.max_length=2048 data.train_batch_size=128 data.micro_batch_size_per_gpu=4 \\
    model.partial_pretrain=$HOME/models/Qwen/Qwen3-8B optim.lr=1e-6
"""


def test_megatron_trains_with_the_layout_of_its_engine(tmp_path: Path) -> None:
    """The module stands in a variable's default, in quotes, and the model behind a home folder."""
    data, said = converted(tmp_path, "run.sh", MEGATRON, *HERE)
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert of(data, "parallelism", "dp", "tp", "pp", "sp", "zero") == [2, 2, 2, True, 1]
    assert of(data, "training", "seq_len", "global_batch_size", "micro_batch_size") == [2048, 64, 4]
    assert "max_token_len_per_gpu" in said
    assert "not expressed" not in said
    assert simulate(parse_scenario(data)).outcome.fits_in_memory


def test_fsdp_splits_sequences_over_ulysses(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run.sh", FSDP, *HERE)
    layout = of(data, "parallelism", "dp", "cp", "cp_method", "zero", "fsdp_version")
    assert layout == [8, 2, "all_to_all", 3, 2]
    assert of(data, "training", "micro_batch_size", "recompute", "param_dtype") == [4, "full", "fp32"]
    assert data["training"]["cross_entropy"] == "fused"
    assert "every sequence is simulated at full length" in said
    assert "not expressed" not in said
    assert simulate(parse_scenario(data)).outcome.step_time_s > 0


def test_a_whole_config_is_what_its_command_is(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run.yaml", CONFIG, *HERE)
    assert data == converted(tmp_path, "run.sh", FSDP, *HERE)[0]
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("added", "section", "key", "value"),
    [
        ("model.enable_gradient_checkpointing=False", "training", "recompute", "none"),
        ("model.use_fused_kernels=True", "training", "cross_entropy", "tiled"),
        ("model.lora_rank=32", "training", "lora", {"rank": 32}),
        ("model.enable_activation_offload=True", "training", "activation_offload", True),
        ("engine.model_dtype=bf16", "training", "param_dtype", None),
        ("engine.offload_policy=True", "training", "parameter_offload", True),
        ("optim.optimizer=AdamW8bit optim.optimizer_impl=bitsandbytes.optim", "training", "optimizer_dtype", "int8"),
        ("data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", "training", "micro_batch_size", 2),
        ("engine.use_no_sync_for_gradient_accumulation=True", "parallelism", "accumulate_unsharded", True),
        ("engine.fsdp_size=4", "parallelism", "shard_size", 4),
        ("engine.reshard_after_forward=False", "parallelism", "reshard_after_forward", False),
    ],
)
def test_keys_of_fsdp(tmp_path: Path, added: str, section: str, key: str, value: object) -> None:
    data, said = converted(tmp_path, "run.sh", FSDP.rstrip() + f" {added}\n", *HERE)
    assert data[section].get(key) == value
    assert "not expressed" not in said
    parse_scenario(data)


def test_releases_before_0_7_pad_and_compute_all_logits(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run.sh", BEFORE, *HERE)
    assert of(data, "parallelism", "dp", "zero", "fsdp_version") == [8, 3, 2]
    assert of(data, "training", "micro_batch_size", "cross_entropy", "recompute") == [4, "unfused", "full"]
    assert "without use_remove_padding texts are padded to data.max_length" in said
    offload = " model.fsdp_config.cpu_offload=true model.fsdp_config.offload_params=true use_remove_padding=true"
    added = f"{BEFORE.rstrip()}{offload} ulysses_sequence_parallel_size=4 model.strategy=fsdp\n"
    data, said = converted(tmp_path, "run.sh", added, *HERE)
    assert of(data, "parallelism", "dp", "cp", "fsdp_version") == [2, 4, 1]
    assert of(data, "training", "parameter_offload", "optimizer_offload") == [True, "cpu"]
    assert "padded" not in said
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FSDP.replace("engine=fsdp", "engine=veomni"), "engine: found 'veomni'; can be converted: dp, fsdp, fsdp2"),
        (FSDP.replace("engine.strategy=fsdp2", "engine.strategy=torchtitan"), "engine.strategy: found 'torchtitan'"),
        (FSDP.replace("--nproc_per_node=8", ""), "does not say how many GPUs it runs on: give --gpus N"),
        (FSDP.replace("model.path=Qwen/Qwen3-8B", ""), "model.path: is required and missing; or give --model"),
        (FSDP.replace("parallel_size=2", "parallel_size=3"), "found 3; must divide 16 GPUs"),
        (BEFORE.replace("per_gpu=4", "per_gpu=3"), "data.train_batch_size, 128, must be a multiple of it times 8"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, "run.sh", text, *HERE)
