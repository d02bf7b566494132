"""ms-swift's commands of Transformers' Trainer as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import OF_RL, converted, refused

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
    assert "swift gkd: can be converted" in refused(tmp_path, "a.sh", SFT.replace("swift sft", "swift gkd"), *on)
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


PAIRS = """
NPROC_PER_NODE=2 swift rlhf \\
    {kind} --model Qwen/Qwen3-8B --train_type full --max_length 2048 \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --deepspeed zero3
"""


def test_pairs_of_answers(tmp_path: Path) -> None:
    """swift/arguments/rlhf_args.py: DPO is the default; rlhf_trainers/dpo_trainer.py has all logits at once."""
    for kind in ("", "--rlhf_type dpo --rpo_alpha 0.1"):
        data, notes = converted(tmp_path, "a.sh", PAIRS.format(kind=kind), "--cluster", "dgx-h100")
        assert data["training"]["preference"] == {"loss": "dpo"}
        assert (data["training"]["micro_batch_size"], data["training"]["global_batch_size"]) == (2, 32)
        assert "cross_entropy" not in data["training"]
        assert "not expressed" not in notes
    for kind, loss in (("kto", "kto"), ("orpo", "orpo"), ("simpo", "orpo"), ("rm", "reward")):
        text = PAIRS.format(kind=f"--rlhf_type {kind}")
        assert converted(tmp_path, "a.sh", text, "--cluster", "dgx-h100")[0]["training"]["preference"]["loss"] == loss
    said = refused(tmp_path, "a.sh", PAIRS.format(kind="--rlhf_type ppo"), "--cluster", "dgx-h100")
    assert "ppo: generates answers in each step" in said


ANSWERS = """
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 \\
swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --train_type full \\
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.55 --vllm_tensor_parallel_size 4 \\
    --max_length 1024 --max_completion_length 512 --per_device_train_batch_size 2 --num_generations 4 \\
    --reward_funcs accuracy format --deepspeed zero3 --top_k 80 --log_completions true --overlong_filter false \\
    --move_model_batches 16 --offload_optimizer true --offload_model true --sleep_level 1 --num_iterations 1
"""


def test_grpo_beside_its_engine(tmp_path: Path) -> None:
    """swift/rlhf_trainers: args_mixin.py, rollout_mixin.py (`_prepare_vllm_engine`), grpo_trainer.py."""
    data, notes = converted(tmp_path, "a.sh", ANSWERS, *OF_RL)
    rl, t = data["rl"], data["training"]
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"]) == (1536, 2, 8)
    assert "cross_entropy" not in t
    assert (rl["prompts_per_step"], rl["generations_per_prompt"], rl["reference"]) == (2, 4, "host")
    assert (rl["prompt_len"]["max"], rl["output_len"]["max"], rl["sequences"]) == (1024, 512, "padded")
    assert (rl["sleep_level"], rl["offload_training"]) == (1, True)
    engine = rl["generation"]
    assert (engine["tp"], engine["max_running_requests"], engine["kv_cache"]) == (4, 8, {"memory_fraction": 0.55})
    assert "max_batch_tokens" not in engine
    assert engine["sampling"] == {"temperature": 0.9, "top_p": 1.0, "top_k": 80, "logprobs": 0}
    assert "not expressed" not in notes
    data, _ = converted(tmp_path, "a.sh", ANSWERS.rstrip() + " --beta 0 --padding_free true\n", *OF_RL)
    assert (data["rl"]["reference"], data["rl"]["sequences"]) == ("none", "mean")


def test_grpo_with_a_server(tmp_path: Path) -> None:
    start = "swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_data_parallel_size 2 &\n"
    text = start + ANSWERS.replace("--vllm_mode colocate", "--vllm_mode server --async_generate true")
    data, notes = converted(tmp_path, "a.sh", text, *OF_RL)
    rl = data["rl"]
    assert (rl["colocated"], rl["steps_off"], rl["reference"]) == (False, 1, "gpu")
    assert (rl["generation"]["replicas"], rl["generation"]["tp"]) == (2, 1)
    assert "sleep_level" not in rl
    assert "no command of the server" not in notes
    said = refused(tmp_path, "a.sh", ANSWERS.replace("--use_vllm true", ""), *OF_RL)
    assert "use_vllm: is missing, which is false" in said


def test_a_file_of_arguments(tmp_path: Path) -> None:
    """swift/cli/main.py: `parse_yaml_args`. Adapters and recomputation are the default there, too."""
    text = "model: Qwen/Qwen3-8B\ntorch_dtype: bfloat16\nper_device_train_batch_size: 4\nmax_length: 2048\n"
    data, notes = converted(tmp_path, "sft.yaml", text, "--cluster", "dgx-h100", "--gpus", "4")
    t = data["training"]
    assert (t["lora"], t["recompute"], t["seq_len"]) == ({"rank": 8, "dropout": 0.05}, "full", 2048)
    assert (t["micro_batch_size"], t["global_batch_size"]) == (4, 16)
    assert "not expressed" not in notes
    command = "NPROC_PER_NODE=4 swift sft sft.yaml --tuner_type full --max_length 4096\n"
    data, _ = converted(tmp_path, "a.sh", command, "--cluster", "dgx-h100")
    assert (data["training"]["seq_len"], data["model"]) == (4096, "hf://Qwen/Qwen3-8B")
    assert "lora" not in data["training"]
    said = refused(tmp_path, "a.sh", command.replace("sft.yaml", "x.yaml"), "--cluster", "dgx-h100")
    assert "names x.yaml, which is not there" in said
    pairs = converted(tmp_path, "b.yaml", text + "rlhf_type: orpo\n", "--cluster", "dgx-h100", "--gpus", "4")[0]
    assert pairs["training"]["preference"] == {"loss": "orpo"}


def test_the_engines_limit_ends_answers(tmp_path: Path) -> None:
    """Prompts and answers of 1,536 tokens at most, of which the engine has 1,200."""
    data = converted(tmp_path, "a.sh", ANSWERS.rstrip() + " --vllm_max_model_len 1200\n", *OF_RL)[0]
    assert data["training"]["seq_len"] == 1200
