"""Megatron-LM's hybrid models: which layer is what, and Mamba's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.convert.converting import converted, refused

SIZES = """torchrun --nproc_per_node 8 {script} --num-layers 56 --hidden-size 4096 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 256000 \\
    --position-embedding-type none --normalization RMSNorm --disable-bias-linear --bf16 --micro-batch-size 1 \\
    --untie-embeddings-and-output-weights --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 {flags}"""
# Waleffe et al. 2024, "An Empirical Study of Mamba-based Language Models", arXiv 2406.07887: the 8B hybrid's layers, as
# NVIDIA's checkpoint nvidia/mamba2-hybrid-8b-3t-128k has them.
HYBRID_8B = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
HERE = ("--cluster", "dgx-h100")


def of(tmp_path: Path, flags: str, script: str = "pretrain_mamba.py") -> tuple[dict[str, Any], str]:
    found, said = converted(tmp_path, "train.sh", SIZES.format(script=script, flags=flags), *HERE)
    parse_scenario(found, "found")
    return found, said


def letters(model: dict[str, Any]) -> str:
    signs = {("state_space", "none"): "M", ("full", "none"): "*", ("none", "dense"): "-", ("none", "experts"): "E"}
    return "".join(signs[kinds] for kinds in zip(model["attention_pattern"], model["mlp_pattern"], strict=True))


def test_layers_by_their_shares(tmp_path: Path) -> None:
    spec = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    found, said = of(tmp_path, f"--hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 {spec}")
    assert letters(found["model"]) == HYBRID_8B
    assert found["model"]["state_space"]["heads"] == 2 * 4096 // 64
    assert "not expressed" not in said
    alone, _ = of(tmp_path, spec)
    assert letters(alone["model"]) == 56 * "M"


def test_nemotron_h(tmp_path: Path) -> None:
    """8.1 billion parameters (NVIDIA 2025, arXiv 2504.03624)."""
    flags = f"""--hybrid-override-pattern "{NEMOTRON_H_8B}" --num-layers 52 --ffn-hidden-size 21504 --kv-channels 128
        --mamba-num-heads 128 --squared-relu --vocab-size 131072""".replace("\n", " ")
    found, said = of(tmp_path, flags)
    assert letters(found["model"]) == NEMOTRON_H_8B
    assert count_parameters(load_model(found["model"])).total / 1e9 == pytest.approx(8.1, abs=0.05)
    assert "not expressed" not in said


def test_nemotron_3_super(tmp_path: Path) -> None:
    """The flags of Megatron-Bridge's `Nemotron3SuperProvider` give the shipped model, its prediction module too."""
    shipped = load_model("nemotron3-super-120b-a12b")
    pattern = letters({"attention_pattern": shipped.attention_pattern, "mlp_pattern": shipped.mlp_pattern})
    flags = f"""--hybrid-layer-pattern {pattern}/*E --num-query-groups 2 --ffn-hidden-size 2688 --kv-channels 128
        --mamba-num-heads 128 --squared-relu --vocab-size 131072 --num-experts 512 --moe-router-topk 22
        --moe-latent-size 1024 --moe-shared-expert-intermediate-size 5376 --moe-router-dtype fp32
        --moe-grouped-gemm""".replace("\n", " ")
    text = SIZES.format(script="pretrain_hybrid.py", flags=flags)
    found, said = converted(tmp_path, "train.sh", text.replace("--num-layers 56 ", ""), *HERE)
    model = load_model(found["model"])
    assert model.moe is not None
    assert (model.moe.latent, model.mtp_layers) == (1024, 1)
    assert count_parameters(model) == count_parameters(shipped)
    assert "not expressed" not in said


def test_stages_of_a_pattern_and_experts(tmp_path: Path) -> None:
    flags = "--hybrid-layer-pattern 'ME*E|ME*EM|MEM|E' --num-experts 16 --moe-ffn-hidden-size 512 --moe-grouped-gemm"
    text = SIZES.format(script="pretrain_hybrid.py", flags=f"{flags} --pipeline-model-parallel-size 2")
    found, _ = converted(tmp_path, "train.sh", text.replace("--num-layers 56 ", ""), *HERE)
    parse_scenario(found, "found")
    assert letters(found["model"]) == "ME*EME*EMMEME"
    assert (found["parallelism"]["layers_per_stage"], found["parallelism"]["virtual_stages"]) == ([4, 5, 3, 1], 2)
    assert found["model"]["moe"]["experts"] == 16
    dense, _ = of(tmp_path, f"--hybrid-layer-pattern {28 * '*-'}", "pretrain_hybrid.py")
    assert "state_space" not in dense["model"]


def test_a_hybrid_of_megatron_bridge(tmp_path: Path) -> None:
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
train: {micro_batch_size: 1, global_batch_size: 8}
model: {num_layers: 4, hidden_size: 1024, num_attention_heads: 16, seq_length: 2048, vocab_size: 32000,
  tensor_model_parallel_size: 1, position_embedding_type: none, hybrid_override_pattern: "M-*-", mamba_num_heads: 32}
"""
    found, _ = converted(tmp_path, "run_config.yaml", text, *HERE, "--gpus", "8")
    assert letters(found["model"]) == "M-*-"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--hybrid-override-pattern M-M",
            "--hybrid-override-pattern: found 3 layers; must be as many as --num-layers, 56",
        ),
        ("--hybrid-layer-pattern M-MG", "--hybrid-layer-pattern: found 'M-MG'; can be simulated: M (Mamba 2), "),
        ("--hybrid-layer-pattern M*E/ME", "--hybrid-layer-pattern: found 'ME'; prediction modules of layers *E can"),
        (
            "--hybrid-override-pattern M*- --mtp-hybrid-override-pattern *E",
            "--mtp-hybrid-override-pattern: found '*E'; prediction modules of layers *- can",
        ),
        ("--window-size 128,0 --hybrid-attention-ratio 0.1", "--window-size: windows beside layers of Mamba"),
    ],
)
def test_what_is_not_simulated_is_refused(tmp_path: Path, flags: str, problem: str) -> None:
    assert problem in refused(tmp_path, "train.sh", SIZES.format(script="pretrain_mamba.py", flags=flags), *HERE)


@pytest.mark.parametrize(("share", "hybrid"), [("0", False), ("0.0", False), ("0.08", True)])
def test_a_share_of_no_layers_makes_no_hybrid(tmp_path: Path, share: str, hybrid: bool) -> None:
    found, said = of(tmp_path, f"--hybrid-attention-ratio {share}", "pretrain_gpt.py")
    assert ("attention_pattern" in found["model"]) is hybrid
    assert "not expressed" not in said
