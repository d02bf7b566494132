"""ms-swift's `megatron sft` as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, refused

DENSE = r"""
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen3-32B \
    --save_safetensors true \
    --dataset 'a/b' \
    --tensor_model_parallel_size 8 \
    --global_batch_size 16 \
    --packing true \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr 1e-5 \
    --max_length 8192 \
    --no_save_optim true \
    --overlap_grad_reduce false \
    --sequence_parallel true
"""
EXPERTS = r"""
export NNODES=2
export NPROC_PER_NODE=8
megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --train_type lora \
    --lora_rank 16 \
    --target_modules linear_qkv linear_proj \
    --pipeline_model_parallel_size 2 \
    --expert_model_parallel_size 8 \
    --moe_permute_fusion true \
    --recompute_granularity none \
    --max_length 4096
"""
ON = ("--cluster", "dgx-h100")


def test_switches_have_values_and_the_model_is_the_hub_s(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "sft.sh", DENSE, *ON)
    t, p = data["training"], data["parallelism"]
    assert data["model"] == "hf://Qwen/Qwen3-32B"
    assert (p["dp"], p["tp"], p["sp"], p["zero"], p["dp_sync"]) == (1, 8, True, 1, "after_backward")
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"]) == (8192, 1, 16)
    assert (t["precision"], t["grad_dtype"], t["recompute"], t["cross_entropy"]) == ("bf16", "fp32", "full", "native")
    assert "packing" in notes
    assert "not expressed" not in notes
    assert parse_scenario(data)


def test_masks_are_made_of_padded_texts_alone(tmp_path: Path) -> None:
    """`padding_free` is on unless a command says otherwise, and with packing in any case (template/base.py)."""
    long = DENSE.replace("8192", "32768")
    assert "attention masks" not in converted(tmp_path, "sft.sh", long, *ON)[1]
    padded = long.replace("--packing true", "--padding_free false")
    assert "attention masks from the data loader, 1 GiB" in converted(tmp_path, "sft.sh", padded, *ON)[1]


def test_experts_with_adapters_on_attention(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "sft.sh", EXPERTS, *ON)
    t, p = data["training"], data["parallelism"]
    assert (p["dp"], p["pp"], p["ep"], p["expert_tp"]) == (8, 2, 8, 1)
    assert t["lora"] == {"rank": 16, "dropout": 0.05, "targets": ["qkv", "attention_out"]}
    assert "recompute" not in t
    assert parse_scenario(data)


def test_experts_are_whole_by_default(tmp_path: Path) -> None:
    """`expert_tensor_parallel_size` is 1 there; Megatron-LM's own default is the tensor parallelism."""
    text = EXPERTS.replace("--pipeline_model_parallel_size", "--tensor_model_parallel_size")
    p = converted(tmp_path, "sft.sh", text, *ON)[0]["parallelism"]
    assert (p["tp"], p["dp"], p["ep"], p["expert_tp"]) == (2, 8, 8, 1)


def test_selective_recomputation_is_the_default(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "sft.sh", EXPERTS.replace("    --recompute_granularity none \\\n", ""), *ON)
    assert parse_scenario(data).for_training.recompute.mode == "selective"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("megatron sft", "megatron rlhf", "can be converted: sft, pt, and rlhf --rlhf_type dpo"),
        ("Qwen/Qwen3-32B", "nobody/no-model", "model: found 'nobody/no-model'"),
        ("--max_length 8192", "--lr 1", "--max_length: is required and missing"),
        ("--lr 1e-5", "--train_type lora --lora_rank q", "--lora-rank: found 'q'; must be a whole number"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, "sft.sh", DENSE.replace(old, new), *ON)


def test_names_of_megatron_core_are_read_as_megatron_lms_flags(tmp_path: Path) -> None:
    """swift/megatron/arguments/megatron_args.py, MegatronArguments: values of fields, not switches that turn off."""
    more = (
        "    --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 --tensor_model_parallel_size 4 "
        "--gradient_accumulation_fusion false --overlap_p2p_comm false --masked_softmax_fusion true\n"
    )
    text = DENSE.rstrip().replace("    --tensor_model_parallel_size 8 \\\n", "") + " \\\n" + more
    data, said = converted(tmp_path, "a.sh", text, "--cluster", "dgx-h100", "--model", "qwen3-8b")
    layout = data["parallelism"]
    assert (layout["pp"], layout["virtual_stages"], layout["p2p_overlap"]) == (2, 2, False)
    assert data["training"]["gradient_accumulation_fusion"] is False
    assert "not expressed here" not in said


def test_its_defaults_of_fsdp_and_of_the_loss(tmp_path: Path) -> None:
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --use_megatron_fsdp true --max_length 2048\n"
    data, _ = converted(tmp_path, "a.sh", text, "--cluster", "dgx-h100", "--model", "qwen3-8b")
    assert data["parallelism"]["zero"] == 3
    assert data["training"]["cross_entropy"] == "native"


def test_modules_of_prediction_are_those_that_the_command_asks_for(tmp_path: Path) -> None:
    text = EXPERTS.replace("Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.5-Air")
    data, _ = converted(tmp_path, "sft.sh", text, *ON)
    assert data["model"] == {"preset": "hf://zai-org/GLM-4.5-Air", "mtp_layers": 0}
    text = text.replace("train_type lora", "train_type full").rstrip()
    data, _ = converted(tmp_path, "sft.sh", text.rstrip() + " --mtp_num_layers 1\n", *ON)
    assert data["model"] == "hf://zai-org/GLM-4.5-Air"


def test_rope_is_fused_only_if_asked(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "sft.sh", DENSE, *ON)
    assert data["training"]["apply_rope_fusion"] is False
    data, _ = converted(tmp_path, "sft.sh", DENSE.rstrip() + " --apply_rope_fusion true\n", *ON)
    assert "apply_rope_fusion" not in data["training"]


def test_a_folder_of_converted_weights_names_the_model(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "sft.sh", DENSE.replace("--model Qwen/Qwen3-32B", "--load Qwen3-32B-mcore"), *ON)
    assert data["model"] == "qwen3-32b"
    assert "--load Qwen3-32B-mcore is read as qwen3-32b, by its name" in said
    said = refused(tmp_path, "sft.sh", DENSE.replace("--model Qwen/Qwen3-32B", "--load ours-mcore"), *ON)
    assert "does not name the model: give --model NAME" in said


def test_pairs_of_answers_are_two_sequences_each(tmp_path: Path) -> None:
    staged = EXPERTS.replace("megatron sft", "megatron rlhf --rlhf_type dpo --beta 0.1 --loss_type sigmoid")
    assert "is simulated without pipeline stages" in refused(tmp_path, "dpo.sh", staged, *ON)
    pairs, texts = (
        each.replace("pipeline_model_parallel_size 2", "tensor_model_parallel_size 2") for each in (staged, EXPERTS)
    )
    data, said = converted(tmp_path, "dpo.sh", pairs, *ON)
    before, _ = converted(tmp_path, "sft.sh", texts, *ON)
    assert data["training"]["preference"] == {"loss": "dpo"}
    for key in ("micro_batch_size", "global_batch_size"):
        assert data["training"][key] == 2 * before["training"][key]
    assert "each pair of answers counts as two sequences" in said
    assert "not expressed" not in said
    parse_scenario(data)
    whole = DENSE.replace("megatron sft", "megatron rlhf --rlhf_type dpo")
    data, _ = converted(tmp_path, "dpo.sh", whole.replace("--cross_entropy_loss_fusion true", ""), *ON)
    assert "lora" not in data["training"]
    parse_scenario(data)


def test_other_objectives_of_reinforcement_learning_are_refused(tmp_path: Path) -> None:
    for kind in ("grpo", "gkd", "kto"):
        said = refused(tmp_path, "x.sh", DENSE.replace("megatron sft", f"megatron rlhf --rlhf_type {kind}"), *ON)
        assert f"megatron rlhf --rlhf_type {kind}: can be converted: sft, pt, and rlhf --rlhf_type dpo" in said
    own = EXPERTS.replace("megatron sft", "megatron rlhf --rlhf_type dpo --ref_adapters /a")
    assert "--ref-adapters: a reference by adapters of its own" in refused(tmp_path, "x.sh", own, *ON)
