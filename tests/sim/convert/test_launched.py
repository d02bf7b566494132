"""Transformers' arguments on the command lines of torchrun, deepspeed and accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused

ARGUMENTS = (
    "sft.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --learning_rate 2e-5 "
    "--gradient_accumulation_steps $((ACC / 2)) --max_length 4096 --bf16 True --gradient_checkpointing"
)
FSDP = """
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_version: 1}
mixed_precision: bf16
num_processes: 16
"""
ZERO = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none, gradient_clipping: 1.0}
mixed_precision: bf16
num_processes: 8
"""


def script(launcher: str) -> str:
    return f"#!/bin/bash\nexport ACC=8\n{launcher} \\\n  {ARGUMENTS}\n"


@pytest.mark.parametrize(
    ("launcher", "config", "gpus", "layout"),
    [
        ("torchrun --nproc_per_node 4 --nnodes 2", "", 8, {"zero": 0}),
        ("deepspeed --num_gpus=8", "", 8, {"zero": 0}),
        ("accelerate launch --config_file c.yaml", FSDP, 16, {"zero": 3, "reshard_after_forward": False}),
        ("accelerate launch --config_file c.yaml --num_processes 4", FSDP, 4, {"zero": 3}),
        ("accelerate launch --config_file c.yaml", ZERO, 8, {"zero": 3}),
    ],
)
def test_launchers_say_processes_and_sharding(
    tmp_path: Path, launcher: str, config: str, gpus: int, layout: dict[str, Any]
) -> None:
    (tmp_path / "c.yaml").write_text(config)
    data, said = converted(tmp_path, "train.sh", script(launcher), "--cluster", "dgx-h100")
    assert data["model"] == "hf://meta-llama/Llama-3.1-8B"
    assert data["training"]["global_batch_size"] == 2 * 4 * gpus
    assert (data["training"]["recompute"], data["training"]["precision"]) == ("full", "bf16")
    assert data["parallelism"].items() >= ({"dp": gpus} | layout).items()
    assert data["training"].get("optimizer_offload") == ("cpu" if config == ZERO else None)
    assert "at full length" in said
    assert "not expressed" not in said


@pytest.mark.parametrize("launcher", ["accelerate launch --config_file c.yaml", "deepspeed --num_gpus 8"])
def test_files_that_the_script_writes(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "c.yaml").write_text(FSDP)  # of an earlier run
    engine = '{"zero_optimization": {"stage": ${STAGE}}, "bf16": {"enabled": true}}'
    writes = f"STAGE=3\ncat > c.yaml <<EOF\n{ZERO}EOF\ntee conf/z.json <<END\n{engine}\nEND\n"
    text = script(launcher).replace("#!/bin/bash\n", writes)
    text = text if "c.yaml" in launcher else text.replace("sft.py", "sft.py --deepspeed conf/z.json")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["dp"], data["parallelism"]["zero"]) == (8, 3)
    assert data["training"]["framework"] == "deepspeed"
    assert "not expressed" not in said


def test_a_deepspeed_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text(
        '{"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": "auto"}}'
    )
    text = script("deepspeed --num_gpus=8").rstrip() + " --deepspeed z.json --packing true\n"
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["zero"], data["training"]["framework"]) == (2, "deepspeed")
    assert "training.packing describes" in said


@pytest.mark.parametrize(
    ("launcher", "problem"),
    [
        ("accelerate launch --config_file none.yaml", "no such file, here or beside train.sh"),
        ("python", "give --gpus N"),
        ("torchrun --nproc_per_node $GPUS", "give --gpus N"),
    ],
)
def test_what_is_missing_is_one_message(tmp_path: Path, launcher: str, problem: str) -> None:
    assert problem in refused(tmp_path, "train.sh", script(launcher), "--cluster", "dgx-h100")


def test_a_cluster_of_one_s_own(tmp_path: Path) -> None:
    text = script("torchrun --nproc_per_node 4")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "{gpu: rtx4090, gpus_per_node: 4}")
    assert data["cluster"] == {"gpu": "rtx4090", "gpus_per_node": 4}
    said = refused(tmp_path, "train.sh", text, "--cluster", "rtx4090")
    assert "is a GPU, not a cluster; write {gpu: rtx4090" in said


TRAIN = "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --model_max_length 2048"


def test_two_stages_in_one_script_are_not_mixed(tmp_path: Path) -> None:
    stages = f"""{TRAIN} --bf16 True --per_device_train_batch_size 32 --gradient_checkpointing True
{TRAIN} --bf16 True --per_device_train_batch_size 16
"""
    said = refused(tmp_path, "train.sh", stages, "--cluster", "dgx-h100")
    assert "2 commands have --per-device-train-batch-size (32, 16): keep the one that runs in the file" in said
    shown = f"CMD='{TRAIN} --bf16 True --per_device_train_batch_size 4'\necho $CMD\neval $CMD --seed 1"
    data, _ = converted(tmp_path, "train.sh", shown, "--cluster", "dgx-h100")
    assert data["training"]["micro_batch_size"] == 4


def test_deepspeeds_examples(tmp_path: Path) -> None:
    script = """OUTPUT=$1
ZERO_STAGE=$2
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
deepspeed --num_gpus 8 main.py --data_path Dahoas/rm-static Dahoas/full-hh-rlhf --data_split 2,4,4 \\
    --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_len 512 --dtype bf16 \\
    --gradient_checkpointing --zero_stage $ZERO_STAGE --offload --output_dir $OUTPUT --deepspeed &> $OUTPUT/training.log
"""
    data, said = converted(tmp_path, "train.sh", script, "--cluster", "dgx-h100")
    assert (data["parallelism"]["zero"], data["parallelism"]["dp"]) == (3, 8)
    training = data["training"]
    assert (training["precision"], training["recompute"], training["optimizer_offload"]) == ("bf16", "full", "cpu")
    assert training["seq_len"] == 512
    assert "not expressed" not in said
    assert data["parallelism"]["gather_bucket_bytes"] == 2 * 30_000_000
    assert training["parameter_offload"] is True
    assert "offload" not in said.split("training:")[0]
    assert "lora" not in training
    text = script.replace("--offload ", "--lora_dim 128 --only_optimize_lora ")
    data, said = converted(tmp_path, "lora.sh", text, "--cluster", "dgx-h100")
    assert data["training"]["lora"] == {"rank": 128}
    assert "not expressed" not in said


@pytest.mark.parametrize("switch", ["--lora_enable", "--use_lora"])
def test_adapters_of_llava_and_qwen(tmp_path: Path, switch: str) -> None:
    flags = f"--per_device_train_batch_size 16 --bf16 True {switch} True --lora_r 128 --lora_alpha 256"
    data, _ = converted(tmp_path, "train.sh", f"{TRAIN} {flags}", "--cluster", "dgx-h100")
    assert data["training"]["lora"] == {"rank": 128, "dropout": 0.05}


def launched(tmp_path: Path, launcher: str, more: str = "", config: str = "") -> tuple[dict[str, Any], str]:
    (tmp_path / "c.yaml").write_text(config)
    text = f"{launcher} train.py --per_device_train_batch_size 1 {more}\n"
    options = ("--cluster", "dgx-h100", "--model", "llama3-8b", "--seq-len", "4096")
    return converted(tmp_path, "train.sh", text, *options)


@pytest.mark.parametrize(
    ("flags", "layout", "training"),
    [
        ("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu", {"zero": 3}, {"optimizer_offload": "cpu"}),
        ("--use_fsdp --fsdp_sharding_strategy 2", {"zero": 3, "reshard_after_forward": False}, {}),
        ("--use_fsdp", {"zero": 3, "fsdp_version": 1, "backward_prefetch": False}, {}),
        ("--use_fsdp --fsdp_backward_prefetch BACKWARD_PRE", {"zero": 3, "fsdp_version": 1}, {}),
        ("--use_fsdp --fsdp_sharding_strategy NO_SHARD", {"zero": 0}, {}),
        ("--zero_stage 3 --fsdp_version 2", {"zero": 0}, {}),  # without the switch that goes before
        (
            "--mixed_precision bf16 --dynamo_backend inductor",
            {},
            {"precision": "bf16", "framework": "transformers_compiled"},
        ),
        (
            "--use_fsdp --use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4",
            {"dp": 4, "tp": 2},
            {"global_batch_size": 4},
        ),
        (
            "--use_fsdp --use_parallelism_config --parallelism_config_sp_size 2 "
            "--parallelism_config_sp_backend deepspeed",
            {"dp": 4, "cp": 2, "cp_method": "all_to_all"},
            {"global_batch_size": 4},
        ),
        (
            "--use_fsdp --use_parallelism_config --parallelism_config_cp_size 2 --parallelism_config_cp_backend torch",
            {"dp": 4, "cp": 2, "cp_method": "all_gather", "cp_split": None},
            {"global_batch_size": 4},
        ),
        (
            "--use_deepspeed --zero_stage 3 --use_parallelism_config --parallelism_config_cp_size 2 "
            "--parallelism_config_cp_backend deepspeed",
            {"dp": 4, "cp": 2, "cp_method": "all_to_all"},
            {},
        ),
    ],
)
def test_accelerates_own_flags(tmp_path: Path, flags: str, layout: dict[str, Any], training: dict[str, Any]) -> None:
    """accelerate/commands/launch.py."""
    data, _ = launched(tmp_path, f"accelerate launch --num_processes 8 {flags}")
    assert {key: data["parallelism"].get(key) for key in layout} == layout
    assert {key: data["training"].get(key) for key in training} == training


def test_more_of_accelerates_config(tmp_path: Path) -> None:
    config = """distributed_type: FSDP
num_processes: 16
mixed_precision: fp8
fp8_config: {backend: TE}
dynamo_config: {dynamo_backend: INDUCTOR}
fsdp_config: {fsdp_version: 2}
parallelism_config: {parallelism_config_cp_size: 4, parallelism_config_cp_comm_strategy: alltoall}
"""
    launcher = "accelerate launch --config_file c.yaml"
    data, said = launched(tmp_path, launcher, config=config)
    p, t = data["parallelism"], data["training"]
    assert (p["dp"], p["cp"], p["cp_method"], t["framework"], t["precision"]) == (
        4,
        4,
        "ring",
        "transformers_compiled",
        "bf16",
    )
    assert "not expressed here: fp8_config, mixed_precision\n" in said
    (tmp_path / "c.yaml").write_text("distributed_type: MEGATRON_LM\nnum_processes: 8\n")
    text = f"{launcher} train.py --per_device_train_batch_size 1\n"
    assert "found MEGATRON_LM; can be converted: FSDP" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


@pytest.mark.parametrize("given", ["""'{"activation_checkpointing": true}'""", "own.json"])
def test_fsdp_config_of_a_command_line(tmp_path: Path, given: str) -> None:
    """Its JSON, or a file with it (transformers/training_args.py: _VALID_DICT_FIELDS)."""
    (tmp_path / "own.json").write_text('{"activation_checkpointing": true}')
    data, _ = launched(tmp_path, "torchrun --nproc_per_node 8", f"--fsdp full_shard --fsdp_config {given}")
    assert data["training"]["recompute"] == "full"


RECIPE = """
model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 4096
bf16: true
packing: true
"""


@pytest.mark.parametrize(
    ("command", "packs"),
    [
        ("scripts/sft.py --config recipe.yaml", True),
        ("src/train.py recipe.yaml", True),
        ("scripts/sft.py --config recipe.yaml --packing false", False),
    ],
)
def test_a_recipe_beside_accelerates_config(tmp_path: Path, command: str, packs: bool) -> None:
    (tmp_path / "c.yaml").write_text(ZERO)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    text = f"ACCELERATE_LOG_LEVEL=info accelerate launch --config_file c.yaml --num_processes=4 {command}\n"
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert (data["parallelism"]["dp"], data["parallelism"]["zero"]) == (4, 3)
    assert data["training"]["micro_batch_size"] == 2
    assert data["training"]["global_batch_size"] == 2 * 4 * 4
    assert ("packing: a sequence" in said) is packs
    assert "not expressed" not in said


def test_which_file_to_convert_of_those_that_a_command_names(tmp_path: Path) -> None:
    text = "accelerate launch --config_file c.yaml scripts/sft.py --config recipe.yaml\n"
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "names recipe.yaml: convert that file, or put it beside the script, where c.yaml" in said


def test_two_recipes_in_one_script(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(ZERO)
    commands = ""
    for name in ("first.yaml", "second.yaml"):
        (tmp_path / name).write_text(RECIPE)
        commands += f"accelerate launch --config_file c.yaml scripts/sft.py {name}\n"
    said = refused(tmp_path, "train.sh", commands, "--cluster", "dgx-h100")
    assert "names 2 recipes (first.yaml, second.yaml): keep the one that runs" in said


@pytest.mark.parametrize(
    ("given", "gpus"), [("--include localhost:2,3", 2), ('--include="a:0,1@b:0,1,2,3"', 6), ("-i localhost:0,1", 2)]
)
def test_gpus_that_deepspeeds_launcher_is_told_by_number(tmp_path: Path, given: str, gpus: int) -> None:
    data, _ = converted(tmp_path, "train.sh", script(f"deepspeed {given}"), "--cluster", "dgx-h100")
    assert data["parallelism"]["dp"] == gpus


def test_deepspeeds_file_by_its_own_flag(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    text = script("deepspeed --num_gpus 8").rstrip() + " --deepspeed_config ds.json\n"
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["zero"] == 3
    assert "not expressed" not in said


def test_deepspeeds_section_of_recomputation_is_not_transformers(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "activation_checkpointing": {"partition_activations": true}}'
    )
    text = script("deepspeed --num_gpus 8").replace("--gradient_checkpointing", "--deepspeed ds.json")
    text = text.replace("--max_length", "--block_size")  # the former is TRL's, which recomputes by default
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"]["recompute"] == "none"
    assert "activation_checkpointing: of no effect on Transformers' models" in said


FACTORY = """
model_name_or_path: llama3-8b
stage: sft
do_train: true
finetuning_type: full
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
"""


@pytest.mark.parametrize(
    ("command", "gpus", "micro", "zero"),
    [
        ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train a.yaml --deepspeed ds.json", 8, 2, 3),
        ("NPROC_PER_NODE=4 llamafactory-cli train a.yaml per_device_train_batch_size=8 learning_rate=1e-5", 4, 8, 0),
    ],
)
def test_a_recipe_of_llama_factorys_command(tmp_path: Path, command: str, gpus: int, micro: int, zero: int) -> None:
    """llamafactory/hparams/parser.py: `read_args`; launcher.py: NNODES, NPROC_PER_NODE."""
    (tmp_path / "a.yaml").write_text(FACTORY)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    data, _ = converted(tmp_path, "train.sh", command + "\n", "--cluster", "dgx-h100")
    p, t = data["parallelism"], data["training"]
    assert (p["dp"], p["zero"]) == (gpus, zero)
    assert (t["micro_batch_size"], t["global_batch_size"]) == (micro, micro * 4 * gpus)


@pytest.mark.parametrize(
    "command",
    ["axolotl train a.yaml --micro-batch-size 4", "accelerate launch -m axolotl.cli.train a.yaml --micro-batch-size 4"],
)
def test_a_recipe_of_axolotls_command(tmp_path: Path, command: str) -> None:
    (tmp_path / "a.yaml").write_text("base_model: llama3-8b\nsequence_len: 2048\nmicro_batch_size: 1\n")
    data, _ = converted(tmp_path, "train.sh", command + "\n", "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"]["micro_batch_size"] == 4


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, "t.sh", "axolotl train b.yaml --micro-batch-size 4\n", "--cluster", "dgx-h100")
    assert "names b.yaml: convert that file" in said


@pytest.mark.parametrize(
    ("flags", "layout", "length"),
    [
        ("--accelerate_config zero3", {"dp": 8, "zero": 3}, 1024),
        ("--accelerate_config fsdp2 --num_processes 4 --max_length 512", {"dp": 4, "zero": 3}, 512),
        ("--accelerate_config multi_gpu", {"dp": 8, "zero": 0}, 1024),
    ],
)
def test_trls_own_command(tmp_path: Path, flags: str, layout: dict[str, Any], length: int) -> None:
    """trl/cli, trl/accelerate_configs and trl/trainer/sft_config.py of release 1.16; batches are Transformers' 8."""
    command = f"trl sft --model_name_or_path llama3-8b --dataset_name a/b {flags}\n"
    data, _ = converted(tmp_path, "train.sh", command, "--cluster", "dgx-h100")
    assert layout.items() <= data["parallelism"].items()
    assert (data["training"]["seq_len"], data["training"]["micro_batch_size"]) == (length, 8)
    assert data["training"]["precision"] == "bf16"


def test_a_recipe_of_trls_command(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    data, _ = converted(
        tmp_path, "t.sh", "trl sft --config r.yaml --accelerate_config zero2\n", "--cluster", "dgx-h100"
    )
    assert (data["parallelism"]["zero"], data["training"]["micro_batch_size"]) == (2, 2)


def test_a_rank_without_the_switch_of_adapters(tmp_path: Path) -> None:
    text = script("torchrun --nproc_per_node 8").rstrip() + " --lora_r 16\n"
    _, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "lora_r without use_peft: all parameters are trained" in said


@pytest.mark.parametrize(("recomputes", "offloads"), [("true", True), ("false", None)])
def test_accelerates_offload_of_checkpoints(recomputes: str, offloads: bool | None, tmp_path: Path) -> None:
    """accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin; the offload is of what checkpoints keep."""
    fsdp = f"fsdp_activation_checkpointing: {recomputes}, fsdp_activation_checkpointing_offload: true"
    config = (
        f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {{fsdp_version: 2, {fsdp}}}\n"
    )
    (tmp_path / "c.yaml").write_text(config)
    data, said = converted(
        tmp_path, "train.sh", script("accelerate launch --config_file c.yaml"), "--cluster", "dgx-h100"
    )
    assert data["training"].get("activation_offload") is offloads
    assert "offload" not in said.partition("not expressed here")[2].partition("\n")[0]
