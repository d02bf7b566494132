"""ms-swift's commands of Transformers' Trainer as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused

SFT = """
nproc_per_node=8
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen3-8B \\
    --dataset 'swift/self-cognition#1000' other \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --target_modules all-linear \\
    --max_length 2048 \\
    --attn_impl flash_attn
"""


def of(tmp_path: Path, *more: str, text: str = SFT) -> tuple[dict[str, Any], str]:
    return converted(tmp_path, "sft.sh", text.rstrip() + " " + " ".join(more) + "\n", "--cluster", "dgx-h100")


def test_adapters_and_recomputation_are_the_default(tmp_path: Path) -> None:
    """swift/arguments/tuner_args.py: `tuner_type`."""
    data, notes = of(tmp_path)
    t, p = data["training"], data["parallelism"]
    assert data["model"] == "hf://Qwen/Qwen3-8B"
    assert (t["lora"], t["recompute"], t["precision"]) == ({"rank": 8, "dropout": 0.05}, "full", "bf16")
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"], p["dp"]) == (2048, 1, 16, 8)
    assert "not expressed" not in notes
    assert "max_length" not in notes  # which would be TRL's, with its defaults


@pytest.mark.parametrize("name", ["tuner_type", "train_type", "sft_type"])
def test_all_parameters(tmp_path: Path, name: str) -> None:
    data, _ = of(tmp_path, f"--{name} full --gradient_checkpointing false")
    assert "lora" not in data["training"]
    assert (data["training"]["param_dtype"], data["training"]["recompute"]) == ("bf16", "none")


def test_parameters_have_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    """swift/arguments/base_args/model_args.py: `_init_torch_dtype`; Accelerate casts what FSDP trains."""
    text = SFT.replace("    --torch_dtype bfloat16 \\\n", "")
    for more, dtype in (("", "bf16"), ("--fsdp fsdp2", "fp32")):
        data, _ = of(tmp_path, f"--tuner_type full {more}", text=text)
        assert (data["training"]["precision"], data["training"]["param_dtype"]) == ("bf16", dtype)


@pytest.mark.parametrize(
    ("more", "early_stop"),
    [
        ("", None),
        ("--fsdp fsdp2", None),
        ("--deepspeed zero2", False),
        ("--deepspeed zero2 --gradient_checkpointing_kwargs '{\"use_reentrant\": false}'", None),
    ],
)
def test_which_checkpoint_swift_takes(tmp_path: Path, more: str, early_stop: bool | None) -> None:
    """swift/trainers/mixin.py: `_fix_gradient_checkpointing`."""
    data, _ = of(tmp_path, more)
    whole = "full" if early_stop is None else {"mode": "full", "early_stop": early_stop}
    assert data["training"]["recompute"] == whole


@pytest.mark.parametrize(
    ("preset", "zero", "offload", "bucket"),
    [("zero2", 2, None, 4e8), ("zero3", 3, None, 2 * 4096**2), ("zero3_offload", 3, "cpu", 2 * 4096**2)],
)
def test_presets_of_deepspeed(tmp_path: Path, preset: str, zero: int, offload: str | None, bucket: float) -> None:
    """swift/config/zero*.json."""
    data, _ = of(tmp_path, f"--tuner_type full --deepspeed {preset}")
    t, p = data["training"], data["parallelism"]
    assert (p["zero"], p["dp_sync"], p["bucket_bytes"]) == (zero, "after_backward", bucket)
    assert (t.get("optimizer_offload"), t["framework"]) == (offload, "deepspeed")
    assert t.get("parameter_offload") == (True if offload else None)  # the zero3_offload preset alone has both


def test_the_preset_of_fsdp_and_the_ring_of_ulysses(tmp_path: Path) -> None:
    data, _ = of(tmp_path, "--tuner_type full --fsdp fsdp2 --sequence_parallel_size 2")
    p = data["parallelism"]
    assert (p["zero"], p["dp"], p["cp"], p["cp_method"]) == (3, 4, 2, "all_to_all")
    assert data["training"]["recompute"] == "full"


def test_accumulation_up_to_16_sequences(tmp_path: Path) -> None:
    """swift/trainers/arguments.py: where no number of steps is given."""
    text = SFT.replace("    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\\n", "")
    assert of(tmp_path, text=text)[0]["training"]["global_batch_size"] == 16
    text = text.replace("batch_size 1", "batch_size 3")
    assert of(tmp_path, text=text)[0]["training"]["global_batch_size"] == 24


def test_other_objectives_and_tuners_are_refused(tmp_path: Path) -> None:
    on = ("--cluster", "dgx-h100")
    assert "swift rlhf: can be converted" in refused(tmp_path, "a.sh", SFT.replace("swift sft", "swift rlhf"), *on)
    said = refused(tmp_path, "a.sh", SFT.rstrip() + " --tuner_type adalora\n", *on)
    assert "tuner_type: found 'adalora'; can be converted: full training, and LoRA" in said


def test_accelerates_config_is_read(tmp_path: Path) -> None:
    """swift/cli/sft.py under `accelerate launch`: the file says how states are sharded."""
    launcher = "accelerate launch --config_file fsdp.json swift/cli/sft.py"
    text = SFT.replace("NPROC_PER_NODE=$nproc_per_node \\\nswift sft", launcher)
    assert "--config_file: found 'fsdp.json'; no such file" in refused(tmp_path, "a.sh", text, "--cluster", "dgx-h100")
    config = '{"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}'
    (tmp_path / "fsdp.json").write_text(config)
    data, said = of(tmp_path, text=text)
    assert (data["parallelism"]["dp"], data["parallelism"]["zero"]) == (8, 3)
    assert "config_file" not in said


def test_one_visible_gpu_is_one_process(tmp_path: Path) -> None:
    """swift/cli/main.py: `use_torchrun`."""
    text = SFT.replace("nproc_per_node=8\nNPROC_PER_NODE=$nproc_per_node", "CUDA_VISIBLE_DEVICES=0")
    text = text.replace("$(expr 16 / $nproc_per_node)", "16")
    assert of(tmp_path, text=text)[0]["parallelism"]["dp"] == 1
    for several in ("0,1", "0 \\\nNPROC_PER_NODE=$N"):
        more = text.replace("CUDA_VISIBLE_DEVICES=0", f"CUDA_VISIBLE_DEVICES={several}")
        assert "give --gpus N" in refused(tmp_path, "a.sh", more, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("preset", "zero", "offload"), [("default-zero2", 2, None), ("zero2-offload", 2, "cpu"), ("default-zero3", 3, None)]
)
def test_presets_of_earlier_releases(tmp_path: Path, preset: str, zero: int, offload: str | None) -> None:
    """swift/llm/utils/argument.py and ds_config of release 2.6, which send gradients during the backward."""
    data, _ = of(tmp_path, f"--tuner_type full --deepspeed {preset}")
    assert (data["parallelism"]["zero"], data["parallelism"]["dp_sync"]) == (zero, "bucketed")
    assert data["training"].get("optimizer_offload") == offload
