"""torchtune's configs as scenarios."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.convert.torchtune import BUILDERS
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from sim.simulation import simulate
from tests.sim.convert.converting import converted, refused

FULL = """
output_dir: out/full
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: tokenizer.model, max_seq_len: 4096}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: True}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, model_type: LLAMA3}
batch_size: 2
gradient_accumulation_steps: 4
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5, fused: True}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: null
compile: False
enable_activation_checkpointing: True
device: cuda
dtype: bf16
"""
ON_8 = ("--cluster", "dgx-h100", "--gpus", "8")


def test_a_full_fine_tuning_is_all_in_16_bits(tmp_path: Path) -> None:
    """recipes/full_finetune_distributed.py: "all activations, gradients and optimizer states are in bfloat16"."""
    data, notes = converted(tmp_path, "8B_full.yaml", FULL, *ON_8)
    t, p = data["training"], data["parallelism"]
    assert data["model"] == "llama3.1-8b"
    assert (t["seq_len"], t["micro_batch_size"], t["global_batch_size"]) == (4096, 2, 64)
    assert (t["param_dtype"], t["master_weights"], t["optimizer_dtype"], t["grad_dtype"]) == (
        *("bf16", False, "bf16"),
        "bf16",
    )
    assert (t["recompute"], t["framework"], t["gradient_clipping"]) == ("full", "eager", False)
    assert (p["dp"], p["zero"]) == (8, 3)
    assert "autograd keeps all chunks" in notes
    assert "not expressed" not in notes
    assert parse_scenario(data).for_training.cross_entropy == "unfused"


def test_one_gpu_shards_nothing(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "8B.yaml", FULL, "--cluster", "dgx-h100", "--gpus", "1")
    assert (data["parallelism"]["dp"], data["parallelism"]["zero"]) == (1, 0)


@pytest.mark.parametrize(
    ("builder", "weights", "model"),
    [
        ("llama3_1.lora_llama3_1_70b", None, "llama3.1-70b"),
        ("llama3_3.qlora_llama3_3_70b", "nf4", "llama3.1-70b"),
        ("qwen2_5.lora_qwen2_5_7b_instruct", None, "qwen2.5-7b"),
    ],
)
def test_adapters(tmp_path: Path, builder: str, weights: str | None, model: str) -> None:
    own = "lora_attn_modules: [q_proj, v_proj, output_proj], apply_lora_to_mlp: True, lora_rank: 16, lora_alpha: 32"
    text = FULL.replace("llama3_1.llama3_1_8b}", f"{builder}, {own}}}")
    data, _ = converted(tmp_path, "lora.yaml", text, *ON_8)
    assert data["model"] == model
    expected = {"rank": 16, "targets": ["qkv", "attention_out", "mlp_up", "mlp_down"]}
    assert data["training"]["lora"] == expected | ({"weights": weights} if weights else {})
    assert parse_scenario(data)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("compile: False", "compile: True", {"framework": "compiled_real_rope", "cross_entropy": "fused"}),
        ("compile: False", "compile: {model: False}", {"framework": "eager", "cross_entropy": "fused"}),
        ("dtype: bf16", "dtype: fp32", {"precision": "fp32", "optimizer_dtype": "fp32"}),
        ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", {"optimizer_dtype": "int8"}),
        (", fused: True", "", {"adamw_kernels": "foreach"}),
        ("device: cuda", "ac_mode: selective\nac_option: 2", {"recompute": {"mode": "full", "every": 2}}),
        ("clip_grad_norm: null", "clip_grad_norm: 1.0", {"gradient_clipping": True}),
        ("device: cuda", "enable_activation_offloading: True", {"activation_offload": True}),
        ("device: cuda", "fsdp_cpu_offload: True", {"optimizer_offload": "cpu", "parameter_offload": True}),
    ],
)
def test_switches(tmp_path: Path, old: str, new: str, found: dict[str, object]) -> None:
    data, _ = converted(tmp_path, "x.yaml", FULL.replace(old, new), *ON_8)
    assert found.items() <= data["training"].items()


def test_what_is_not_simulated_is_said(tmp_path: Path) -> None:
    text = FULL.replace("device: cuda", "optimizer_in_bwd: True\ncustom_sharded_layers: [output]")
    _, notes = converted(tmp_path, "x.yaml", text, *ON_8)
    assert "optimizer_in_bwd" in notes
    assert "not expressed here" not in notes


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("", "tok_embeddings and output not named"),
        ("custom_sharded_layers: [output]", "custom_sharded_layers: tok_embeddings not named"),
        ("custom_sharded_layers: [tok_embeddings, output]", ""),
    ],
)
def test_what_the_root_of_fsdp_has(tmp_path: Path, layers: str, said: str) -> None:
    """torchtune/training/_distributed.py: shard_model; on one GPU there is no FSDP."""
    for gpus in ("8", "1"):
        _, notes = converted(tmp_path, "x.yaml", f"{FULL}{layers}\n", "--cluster", "dgx-h100", "--gpus", gpus)
        assert ("as a step begins" in notes) == (gpus == "8" and said != "")
        assert said in notes or gpus == "1"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "batch_size: 2",
            "batch_size: 2\nteacher_model: {_component_: torchtune.models.x}",
            "teacher_model._component_: found 'x'; is no shipped model: give --model",
        ),
        ("loss.LinearCrossEntropyLoss", "loss.ForwardKLLoss", "can be converted: training on next tokens, on pairs"),
        ("\nmodel:", "\npolicy_model:", "policy_model: generates answers in each step"),  # recipes/ppo_full_finetune_*
        ("llama3_1.llama3_1_8b", "llama3_2_vision.llama3_2_vision_11b", "is no shipped model: give --model"),
        ("max_seq_len: 4096", "max_seq_len: null", "give --seq-len N"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, "x.yaml", FULL.replace(old, new), *ON_8)


TAUGHT = """
teacher_model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
teacher_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, model_type: LLAMA3}
kd_loss: {_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}
kd_ratio: 0.5
"""


def test_a_teacher_reads_what_its_student_learns(tmp_path: Path) -> None:
    """recipes/knowledge_distillation_distributed.py."""
    text = FULL.replace("llama3_1.llama3_1_8b", "llama3_2.llama3_2_1b")
    alone, _ = converted(tmp_path, "x.yaml", text, *ON_8)
    data, said = converted(tmp_path, "x.yaml", text + TAUGHT, *ON_8)
    assert data == alone | {"distillation": {"teacher": "llama3.1-8b", "teacher_parallelism": {"tp": 8}}}
    assert "the trainer shards it over 8 ranks" in said
    assert "not expressed" not in said
    taught, student = (simulate(parse_scenario(each)).outcome for each in (data, alone))
    assert taught.step_time_s > 1.5 * student.step_time_s
    one, said = converted(tmp_path, "x.yaml", text + TAUGHT, "--cluster", "dgx-h100", "--gpus", "1")
    assert (one["distillation"], "shards" in said) == ({"teacher": "llama3.1-8b"}, False)


def test_a_model_with_experts_by_its_builders_name(tmp_path: Path) -> None:
    text = FULL.replace("llama3_1.llama3_1_8b", "qwen3.qwen3_moe_30b_a3b_instruct")
    assert converted(tmp_path, "moe.yaml", text, *ON_8)[0]["model"] == "qwen3-30b-a3b"


def test_a_recipe_without_an_optimizer_trains_nothing(tmp_path: Path) -> None:
    """recipes/eleuther_eval.py and generate.py have none, and those that train read `cfg.optimizer`."""
    text = FULL.replace(
        "optimizer: {_component_: torch.optim.AdamW, lr: 2e-5, fused: True}\n", "tasks: [truthfulqa_mc2]\n"
    )
    assert "optimizer: is missing, as in configs of torchtune's recipes that evaluate" in refused(
        tmp_path, "evaluation.yaml", text, *ON_8
    )


@pytest.mark.parametrize("loss", ["DPOLoss", "RSOLoss"])
def test_pairs_of_answers(tmp_path: Path, loss: str) -> None:
    """recipes/full_dpo_distributed.py: both answers of a pair in one batch, a reference model of its own, and
    log-probabilities of all logits outside the loss that may be compiled."""
    text = FULL.replace("modules.loss.LinearCrossEntropyLoss", f"rlhf.loss.{loss}, beta: 0.05, label_smoothing: 0")
    data, notes = converted(tmp_path, "dpo.yaml", text.replace("compile: False", "compile: True"), *ON_8)
    t = data["training"]
    assert (t["micro_batch_size"], t["global_batch_size"]) == (4, 128)
    assert (t["preference"], t["cross_entropy"]) == ({"loss": "dpo"}, "unfused")
    assert "loss.beta" not in notes
    parse_scenario(data, "test")


def test_a_length_of_the_users_own(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "x.yaml", FULL, *ON_8, "--seq-len", "512")
    assert data["training"]["seq_len"] == 512
    assert "max_seq_len" not in notes


def test_builders_without_a_shipped_model_have_their_sizes(tmp_path: Path) -> None:
    """The numbers of parameters stand behind the builders in sim/presets/torchtune.yaml; Transformers' models of the
    same checkpoints have as many."""
    counts = dict(re.findall(r"(?m)^([\w-]+):(?: &\w+)?(?: \{.*\})?  # ([\d,]+)$", BUILDERS.read_text()))
    assert {"gemma-2b", "gemma2-27b", "qwen2-5-32b", "phi4-14b", "code-llama2-7b"} <= {*counts}
    for builder, count in counts.items():
        name = builder.replace("-", "_")
        text = FULL.replace("llama3_1.llama3_1_8b", f"models.{name}")
        data, _ = converted(tmp_path, "full.yaml", text, *ON_8)
        assert count_parameters(parse_scenario(data).model).total == int(count.replace(",", "")), builder
