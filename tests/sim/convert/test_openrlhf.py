"""OpenRLHF's commands of supervised fine-tuning as scenarios."""

from __future__ import annotations

from pathlib import Path

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, of, refused

FORMER = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 2048 --dataset a/b --input_key question \\
   --train_batch_size 256 \\
   --micro_train_batch_size 2 \\
   --pretrain meta-llama/Meta-Llama-3-8B \\
   --save_steps -1 \\
   --zero_stage 2 \\
   --param_dtype bf16 \\
   --learning_rate 5e-6 \\
   --packing_samples \\
   --gradient_checkpointing
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
TODAY = """
deepspeed --module openrlhf.cli.train_sft --data.max_len 4096 --train.batch_size 128 --train.micro_batch_size 4 \\
  --model.model_name_or_path Qwen/Qwen3-8B --ds.zero_stage 3 --ds.adam_offload --ds.lora.rank 16 --ds.lora.alpha 32 \\
  --ds.tensor_parallel_size 2 --ds.ring_attn_size 2 --ds.ring_attn_head_stride 2 --ds.packing_samples \\
  --model.gradient_checkpointing_enable --model.gradient_checkpointing_reentrant --adam.lr 1e-5 --data.dataset x
"""
ON = ("--cluster", "dgx-h100", "--gpus", "16")


def test_names_of_earlier_releases(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "sft.sh", FORMER, *ON)
    assert data["model"] == "hf://meta-llama/Meta-Llama-3-8B"
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [2048, 2, 256]
    assert of(data, "training", "precision", "recompute", "framework") == ["bf16", "full", "deepspeed"]
    assert of(data, "parallelism", "dp", "zero") == [16, 2]
    assert parse_scenario(data).parallelism.dp_sync == "after_backward"  # DeepSpeed's default of overlap_comm
    assert "packing: a sequence is simulated as one text" in said
    assert "not expressed" not in said


def test_names_of_today(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "sft.sh", TODAY, *ON)
    assert of(data, "training", "micro_batch_size", "global_batch_size", "optimizer_offload") == [4, 128, "cpu"]
    assert data["training"]["lora"] == {"rank": 16}
    assert data["training"]["recompute"] == {"mode": "full", "early_stop": False}
    assert of(data, "parallelism", "dp", "tp", "cp", "cp_method") == [4, 2, 2, "all_gather"]
    assert parse_scenario(data).parallelism.dp_sync == "bucketed"  # the default with ZeRO-3
    assert "not expressed here: --ds.ring-attn-head-stride" in said


def test_defaults(tmp_path: Path) -> None:
    text = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path llama3-8b\n"
    data, _ = converted(tmp_path, "sft.sh", text, *ON)
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [2048, 8, 128]
    assert of(data, "training", "gradient_clipping", "recompute", "attention") == [True, "none", "fused"]
    data, _ = converted(tmp_path, "sft.sh", text.replace("train_sft", "train_sft --bf16"), *ON)
    assert data["training"]["attention"] == "unfused"  # of releases whose switch is --flash_attn


def test_other_commands_are_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, "rm.sh", "deepspeed --module openrlhf.cli.train_rm --pretrain a/b\n", *ON)
    assert "is not read (openrlhf.cli.train_sft and train_ppo_ray are)" in said
