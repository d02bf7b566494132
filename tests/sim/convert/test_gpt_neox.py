"""GPT-NeoX's YAML: its own names, defaults and widths, and DeepSpeed's keys beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.convert.converting import converted, refused

# As configs/20B.yml, which mixes both ways to write a name.
TEXT = """{
  "pipe-parallel-size": 4, "model-parallel-size": 2,
  "num-layers": 44, "hidden-size": 6144, "num-attention-heads": 64, "seq-length": 2048,
  "max-position-embeddings": 2048, "norm": "layernorm", "pos-emb": "rotary", "rotary_pct": 0.25,
  "no-weight-tying": true, "gpt_j_residual": true, "bias-gelu-fusion": true, "tokenizer_type": "HFTokenizer",
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4}},
  "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1260000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint-activations": true, "partition-activations": false, "gradient_clipping": 1.0,
  "hidden-dropout": 0, "attention-dropout": 0, "fp16": {"fp16": true, "enabled": true, "loss_scale": 0},
  "train-iters": 150000, "warmup": 0.01,
}"""
HERE = ("--cluster", "dgx-a100", "--gpus", "96", "--set", "model.vocab=50432")


def of(tmp_path: Path, old: str = "", new: str = "", *more: str) -> tuple[dict[str, Any], str]:
    found, said = converted(tmp_path, "20B.yml", TEXT.replace(old, new) if old else TEXT, *HERE, *more)
    parse_scenario(found, "found")
    return found, said


def test_all_keys_of_a_config(tmp_path: Path) -> None:
    found, said = of(tmp_path)
    layout, training, model = found["parallelism"], found["training"], found["model"]
    assert {key: layout[key] for key in ("dp", "tp", "pp", "zero", "dp_sync", "bucket_bytes")} == {
        "dp": 12,
        "tp": 2,
        "pp": 4,
        "zero": 1,
        "dp_sync": "after_backward",
        "bucket_bytes": 2 * 1_260_000_000,
    }
    assert layout["tp_overlap"] == "none"  # mpu/layers.py: `F.linear`, whose backward autograd runs
    assert (training["micro_batch_size"], training["global_batch_size"]) == (4, 4 * 32 * 12)
    assert (training["precision"], training["grad_dtype"], training["recompute"]) == ("fp16", "fp16", "full")
    assert (model["parallel_block"], model["rope_share"], model["tied_embeddings"]) == ("two_norms", 0.25, False)
    assert (model["mlp"], model["ffn"], model["bias"], model["dropout"]) == ("gelu", 4 * 6144, True, 0.0)
    assert "not expressed here: bias_gelu_fusion\n" in said
    assert training["framework"] == "gpt_neox"


@pytest.mark.parametrize(
    ("stages", "stage", "sync"), [(4, 1, "after"), (1, 1, "beside"), (0, 2, "beside"), (0, 0, "after")]
)
def test_reductions_run_beside_no_pipeline_s_backward(tmp_path: Path, stages: int, stage: int, sync: str) -> None:
    """DeepSpeed's runtime/engine.py, `_configure_zero_optimizer`: of a PipelineModule `overlap_comm` is disabled.

    GPT-NeoX has one from two stages on (neox_arguments/arguments.py: `is_pipe_parallel`).
    """
    text = TEXT.replace('"pipe-parallel-size": 4', f'"pipe-parallel-size": {stages}').replace(
        '"stage": 1', f'"stage": {stage}'
    )
    found, _ = converted(tmp_path, "20B.yml", text, *HERE)
    assert found["parallelism"]["dp_sync"] == {"after": "after_backward", "beside": "bucketed"}[sync]


def test_the_parameters_of_gpt_neox_20b(tmp_path: Path) -> None:
    """44 layers of 12h² + 13h, a norm of 2h, and two tables of 50,432 · h; h = 6,144."""
    found, _ = of(tmp_path)
    assert count_parameters(load_model(found["model"])).total == 20_554_567_680


@pytest.mark.parametrize(
    ("more", "mlp", "ffn"),
    [
        ('"activation": "swiglu", "intermediate_size": 49152,', "swiglu", 16384),  # two matrices: two thirds
        ('"activation": "swiglu", "intermediate_size": 3000, "mlp_multiple_of": 256,', "swiglu", 1024),
        ('"activation": "silu", "mlp_type": "llama",', "swiglu", 16384),
        ('"activation": "silu", "mlp_type": "llama", "intermediate_size": 11008,', "swiglu", 11008),
        ('"activation": "relu", "expansion_factor": 2,', "relu", 2 * 6144),
    ],
)
def test_widths_of_the_mlp(tmp_path: Path, more: str, mlp: str, ffn: int) -> None:
    """megatron/model/transformer.py: `ParallelMLP`, and `LLaMAParallelMLP` of releases before it."""
    found, said = of(tmp_path, '"warmup": 0.01,', more)
    assert (found["model"]["mlp"], found["model"]["ffn"]) == (mlp, ffn)
    assert "activation" not in said


def test_llama_has_no_biases(tmp_path: Path) -> None:
    """As configs/llama/7B.yml; `LLaMAParallelMLP` has none in any case."""
    more = '"norm": "rmsnorm", "use_bias_in_norms": false, "use_bias_in_attn_linear": false, "mlp_type": "llama",'
    found, said = of(tmp_path, '"norm": "layernorm",', f'{more} "activation": "silu",')
    assert (found["model"]["norm"], found["model"]["bias"]) == ("rmsnorm", False)
    assert "bias_in" not in said
    assert "biases" not in said
    found, said = of(tmp_path, '"norm": "layernorm",', '"use_bias_in_norms": false, "use_bias_in_mlp": false,')
    assert found["model"]["bias"] is True
    assert "biases are simulated in all layers or in none: here in all" in said
    assert "use_bias_in_norms" in said


def test_precision_attention_and_batch(tmp_path: Path) -> None:
    """arguments.py fills in DeepSpeed's section of a `precision`, and the batch."""
    bf16 = '"precision": "bfloat16", "attention_config": [[["flash"], 44]], "num_kv_heads": 8,'
    found, _ = of(tmp_path, '"fp16": {"fp16": true, "enabled": true, "loss_scale": 0},', bf16)
    assert (found["training"]["precision"], found["training"]["attention"]) == ("bf16", "fused")
    assert found["model"]["kv_heads"] == 8
    found, _ = of(tmp_path, '"gradient_accumulation_steps": 32', '"train_batch_size": 960')
    assert found["training"]["global_batch_size"] == 960
    found, said = of(tmp_path, '"warmup": 0.01,', '"attention_config": [[["global", "local"], 22]],')
    assert found["training"]["attention"] == "unfused"
    assert "attention_config" in said


def test_gpus_and_the_vocabulary_are_asked_for(tmp_path: Path) -> None:
    said = refused(tmp_path, "20B.yml", TEXT, "--cluster", "dgx-a100")
    assert "does not say how many GPUs it runs on: give --gpus N" in said
    said = refused(tmp_path, "20B.yml", TEXT, "--cluster", "dgx-a100", "--gpus", "96")
    assert "does not give vocab_size" in said
    gpt2 = TEXT.replace("HFTokenizer", "GPT2BPETokenizer").replace('"warmup"', '"world_size": 96, "warmup"')
    found, _ = converted(tmp_path, "20B.yml", gpt2, "--cluster", "dgx-a100")
    assert (found["model"]["vocab"], found["parallelism"]["dp"]) == (50257, 12)


@pytest.mark.parametrize(
    ("keys", "attention", "noted"),
    [
        ('"te_mha": true, "te_fp8_mha": false, "te_fp8_format": "hybrid"', "fused", False),
        ('"te_mha": false, "te_fp8_mha": true, "te_fp8_format": "hybrid"', "fused", True),
        ('"te_mha": false, "te_fp8_margin": 0', "unfused", False),
    ],
)
def test_attention_of_transformer_engine(tmp_path: Path, keys: str, attention: str, noted: bool) -> None:
    """model/transformer.py: `TEMultiheadAttention`, in 8 bits by te_fp8_mha alone."""
    found, said = of(tmp_path, '"warmup": 0.01,', keys)
    assert (found["training"]["attention"], found["training"]["precision"]) == (attention, "fp16")
    assert ("te_fp8" in said) is noted
