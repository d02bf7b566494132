"""LitGPT's configs and commands as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, of, refused

FULL = """
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
devices: 4
num_nodes: 1
resume: false
data: {class_path: litgpt.data.Alpaca2k, init_args: {mask_prompt: false}}
train: {global_batch_size: 64, micro_batch_size: 4, lr_warmup_steps: 25, epochs: 1, max_tokens: null,
  max_seq_length: 512}
eval: {interval: 25}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002}}
"""
SIZES = """
model_name: gpt2-124M
model_config: {name: gpt2-124M, block_size: 1024, vocab_size: 50257, padded_vocab_size: 50304, n_layer: 12, n_head: 12,
  n_embd: 768, norm_class_name: LayerNorm, mlp_class_name: GptNeoxMLP, bias: false, norm_eps: 1e-5}
precision: bf16-mixed
train: {global_batch_size: 480, micro_batch_size: 12, max_tokens: 300_000_000_000, tie_embeddings: true, max_norm: 1.0}
devices: 8
num_nodes: 2
"""
COMMAND = """
litgpt finetune_lora meta-llama/Llama-3.1-8B --quantize bnb.nf4 --precision bf16-true \\
  --train.micro_batch_size=2 --train.max_seq_length 512 --data JSON --lora_r 16 --lora_mlp true
"""
ON = ("--cluster", "dgx-h100")


def test_full_fine_tuning_is_fsdp_with_every_block_computed_again(tmp_path: Path) -> None:
    """finetune/full.py: `FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})`."""
    data, said = converted(tmp_path, "full.yaml", FULL, *ON)
    assert data["model"] == "hf://meta-llama/Meta-Llama-3-8B"
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [512, 4, 64]
    assert of(data, "training", "recompute", "framework", "param_dtype") == ["full", "eager", "bf16"]
    assert of(data, "training", "gradient_clipping", "adamw_kernels") == [False, "foreach"]
    assert of(data, "parallelism", "dp", "zero", "fsdp_version", "accumulate_unsharded") == [4, 3, 1, True]
    assert "not expressed" not in said
    assert parse_scenario(data)


def test_one_gpu_has_neither_shards_nor_recomputation(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "full.yaml", FULL.replace("devices: 4", "devices: 1"), *ON)
    assert (data["training"]["recompute"], data["parallelism"]) == ("none", {"dp": 1, "zero": 0})


def test_pretraining_of_a_model_that_the_file_describes(tmp_path: Path) -> None:
    """pretrain.py: HYBRID_SHARD, torch.compile, fused AdamW; a sequence of `block_size` where no length is given."""
    data, said = converted(tmp_path, "nano.yaml", SIZES, *ON)
    model = data["model"]
    assert (model["ffn"], model["vocab"], model["parallel_block"], model["rope_share"]) == (
        3072,
        50304,
        "two_norms",
        0.25,
    )
    assert (model["bias"], model["norm_bias"], model["tied_embeddings"]) == (False, True, True)
    assert of(data, "training", "seq_len", "framework", "adamw_kernels") == [1024, "compiled_real_rope", "fused"]
    assert of(data, "training", "param_dtype", "grad_reduce_dtype", "recompute") == ["fp32", "bf16", "none"]
    assert of(data, "parallelism", "dp", "shard_size", "fsdp_version") == [16, 8, 1]
    assert data["training"]["global_batch_size"] == 12 * 2 * 16  # 480 // 16 // 12 whole micro-batches a GPU
    assert "found 480; litgpt takes 384" in said
    assert "not expressed" not in said


def test_a_command_of_adapters_on_4_bits(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "run.sh", COMMAND + "\n", *ON)
    expected = {"rank": 16, "targets": ["qkv", "mlp_up", "mlp_down"], "dropout": 0.05, "weights": "nf4"}
    assert data["training"]["lora"] == expected
    assert of(data, "training", "micro_batch_size", "global_batch_size", "recompute") == [2, 16, "none"]
    assert "not expressed" not in said
    text = COMMAND.replace("--quantize bnb.nf4", "--devices 4")
    data, _ = converted(tmp_path, "run.sh", text, *ON)
    assert of(data, "parallelism", "dp", "fsdp_version") == [4, 2]
    assert data["training"]["recompute"] == "full"  # finetune/lora.py: `parallelize_fn`
    _, said = converted(tmp_path, "run.sh", text.replace("bf16-true", "bf16-mixed"), *ON)
    assert "gathers parameters in fp32" in said


def test_a_command_that_sky_pilot_starts(tmp_path: Path) -> None:
    command = "litgpt \\\n    finetune_lora meta-llama/Llama-3.1-8B --train.max_seq_length 512"
    text = f"resources: {{accelerators: 'H100:1'}}\nrun: |\n  # litgpt pretrain pythia-14m\n  {command}\n"
    data, _ = converted(tmp_path, "task.yaml", text, *ON)
    assert data["training"]["lora"] == {"rank": 8, "targets": ["qkv"], "dropout": 0.05}


def test_a_command_with_a_config_beside_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FULL)
    text = "litgpt finetune_full --config c.yaml --devices 8 --train.micro_batch_size 2\n"
    data, _ = converted(tmp_path, "run.sh", text, *ON)
    assert of(data, "training", "micro_batch_size", "global_batch_size") == [2, 64]
    assert data["parallelism"]["dp"] == 8


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "litgpt finetune_adapter_v2 meta-llama/Llama-3.1-8B", "trains prompts in front of each layer"),
        ("a.sh", "litgpt finetune_full --config none.yaml", "--config: found 'none.yaml'; no such file"),
        ("a.sh", COMMAND + COMMAND.replace("16", "8"), "several commands of litgpt train: keep the one that runs"),
        ("a.sh", COMMAND + " --devices 8", "litgpt refuses it on several GPUs"),
        ("a.yaml", FULL.replace("512", "null"), "train.max_seq_length: is required and missing"),
        ("a.yaml", FULL.replace("bf16-true", "int3"), "precision: found 'int3'; can be converted: bf16-true"),
        ("a.yaml", SIZES.replace("n_layer: 12", "n_expert: 8"), "model_config.n_expert: is not read"),
        ("a.yaml", SIZES.replace("devices: 8", "devices: auto"), "give --gpus N"),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in refused(tmp_path, name, text.replace("\\\n", " ").replace("\n --devices", " --devices"), *ON)
