"""The config.json of a run of OLMo-core as a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.convert.converting import converted, of, refused

ON_16 = ("--cluster", "dgx-h100", "--gpus", "16")
NORM = {"name": "rms", "eps": 1e-06, "bias": False, "dtype": "float32", "_CLASS_": "olmo_core.nn.LayerNormConfig"}
WINDOWS = {"pattern": [4096, 4096, 4096, -1], "force_full_attention_on_first_layer": False}


def config(**changes: Any) -> dict[str, Any]:
    """What `TransformerConfig.olmo3_7B` and a train module write; `changes`: by dotted keys, None takes out."""
    mixer: dict[str, Any] = {
        "name": "default",
        "n_heads": 32,
        "bias": False,
        "rope": {"name": "default", "theta": 500000},
    }
    mixer |= {"qk_norm": NORM, "backend": "flash_2", "use_head_qk_norm": False, "attention_sinks": False}
    mixer |= {"sliding_window": {**WINDOWS}, "type": "attention"}
    mlp = {"hidden_size": 11008, "name": "default", "bias": False, "dtype": "float32", "activation": "silu"}
    block = {"sequence_mixer": mixer, "layer_norm": NORM, "feed_forward": mlp, "name": "reordered_norm"}
    model = {"d_model": 4096, "vocab_size": 100278, "n_layers": 32, "block": block, "name": "default"}
    model |= {"lm_head": {"layer_norm": NORM, "loss_implementation": "default"}, "init_std": 0.02}
    optim = {"lr": 3e-4, "foreach": True, "_CLASS_": "olmo_core.optim.adamw.SkipStepAdamWConfig"}
    dp = {"name": "hsdp", "param_dtype": "bfloat16", "reduce_dtype": "float32", "wrapping_strategy": "full"}
    train: dict[str, Any] = {
        "rank_microbatch_size": 16384,
        "max_sequence_length": 8192,
        "optim": optim,
        "max_grad_norm": 1.0,
    }
    train |= {"compile_model": True, "dp_config": dp, "label_ignore_index": -100}
    loader = {"global_batch_size": 4 * 2**20, "seed": 1}
    found: dict[str, Any] = {
        "run_name": "olmo3",
        "model": model,
        "dataset": {"sequence_length": 8192},
        "data_loader": loader,
    }
    found |= {"train_module": train, "trainer": {"max_duration": {"value": 1}}, "init_seed": 1}
    for name, value in changes.items():
        *sections, key = name.split("__")
        at: dict[str, Any] = found
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    return found


def test_olmo_3(tmp_path: Path) -> None:
    """The model has the sizes of the checkpoint's own config; batches are in tokens."""
    data, said = converted(tmp_path, "config.json", json.dumps(config()), *ON_16)
    assert data["name"] == "olmo3"
    assert of(data, "training", "seq_len", "micro_batch_size", "global_batch_size") == [8192, 2, 512]
    assert of(data, "training", "precision", "param_dtype", "grad_reduce_dtype") == ["bf16", "fp32", "fp32"]
    assert of(data, "training", "framework", "recompute", "adamw_kernels") == ["compiled_real_rope", "none", "foreach"]
    assert of(data, "parallelism", "dp", "zero", "fsdp_version", "shard_size") == [16, 3, 2, 8]
    assert data["parallelism"]["all_reduce_once"] is True
    ours, theirs = parse_scenario(data).model, load_model("hf://allenai/Olmo-3-1025-7B")
    assert count_parameters(ours) == count_parameters(theirs)
    assert (ours.qk_norm_over, ours.norm_position) == (theirs.qk_norm_over, theirs.norm_position)
    assert [ours.attention_kind(i) for i in range(32)] == [theirs.attention_kind(i) for i in range(32)]
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("changes", "framework", "loss"),
    [
        ({}, "compiled_real_rope", "fused"),
        ({"model__block__sequence_mixer__rope__name": "complex"}, "compiled", "fused"),
        ({"model__lm_head__loss_implementation": "fused_linear"}, "compiled_real_rope", "chunked"),
        ({"train_module__compile_model": False}, "eager", None),
    ],
)
def test_what_rope_multiplies_and_where_the_loss_is_compiled(
    tmp_path: Path, changes: dict[str, Any], framework: str, loss: str | None
) -> None:
    """nn/rope.py: RoPEType; nn/transformer/model.py: apply_compile compiles the output layer with its loss."""
    training = converted(tmp_path, "config.json", json.dumps(config(**changes)), *ON_16)[0]["training"]
    assert (training["framework"], training.get("cross_entropy")) == (framework, loss)


def test_layouts_and_recomputation(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "train_module__tp_config": {"degree": 2, "enable_async": True},
        "train_module__cp_config": {"degree": 2, "ring": {"load_balancer": "llama3", "head_stride": 4}},
        "train_module__ac_config": {"mode": "selected_blocks", "block_interval": 2},
        "train_module__dp_config__name": "fsdp",
        "train_module__compile_model": False,
        "model__lm_head__loss_implementation": "fused_linear",
        "model__block__sequence_mixer__sliding_window__force_full_attention_on_first_layer": True,
    }
    data, said = converted(tmp_path, "config.json", json.dumps(config(**changes)), *ON_16)
    assert of(data, "parallelism", "dp", "tp", "sp", "cp", "cp_method") == [4, 2, True, 2, "all_gather"]
    assert of(data, "training", "recompute", "framework") == [{"mode": "full", "every": 2}, "eager"]
    assert "cross_entropy" not in data["training"]
    assert "fused_linear: with tp the loss is simulated with all logits at once" in said
    assert data["model"]["attention_pattern"][:6] == ["full", *["sliding"] * 3, "full", "sliding"]
    assert data["model"]["attention_pattern"][-1] == "full"


def test_ddp_and_modes_without_a_key(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "train_module__dp_config__name": "ddp",
        "train_module__dp_config__param_dtype": "bfloat16",
    }
    changes |= {"model__lm_head__loss_implementation": "fused_linear"}
    changes |= {
        "train_module__ac_config__mode": "budget",
        "train_module__float8_config": {"ao_recipe": "rowwise_with_gw_hp"},
    }
    data, said = converted(tmp_path, "config.json", json.dumps(config(**changes)), *ON_16)
    assert of(data, "parallelism", "zero", "fsdp_version", "shard_size") == [0, None, None]
    assert of(data, "training", "precision", "recompute") == ["bf16", "none"]
    assert of(data, "training", "cross_entropy", "param_dtype", "optimizer_dtype") == ["chunked", "bf16", "bf16"]
    assert data["parallelism"]["bucket_bytes"] == 100 * 2**20
    assert "ac_config.mode budget: nothing is simulated as recomputed" in said
    assert "float8_config: matmuls are simulated in bf16" in said


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"enabled": True, "modules_to_ignore": ["lm_head.w_out"]}, ["fp8", "tensorwise", "bf16"]),
        ({"ao": {"enable_fsdp_float8_all_gather": True}}, ["fp8", "tensorwise", None]),
        ({"ao_recipe": "rowwise"}, ["fp8", "rowwise", None]),
        ({"enabled": False, "ao_recipe": "rowwise"}, ["bf16", None, None]),
    ],
)
def test_matmuls_in_8_bits(tmp_path: Path, section: dict[str, Any], expected: list[str | None]) -> None:
    text = json.dumps(config(train_module__float8_config=section))
    data, said = converted(tmp_path, "config.json", text, *ON_16)
    gathered = data["parallelism"].get("param_gather_dtype")
    assert [*of(data, "training", "precision", "fp8_recipe"), gathered] == expected
    assert ("modules_to_ignore: simulated in fp8" in said) == ("modules_to_ignore" in section)
    assert "not expressed" not in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__block__name": "moe"}, "model: block moe, which is not converted: give --model"),
        ({"model__n_layers": 10**12}, "model.n_layers: found 1000000000000; must be at most 10000"),
        ({"model__block_pattern": ["a", "b"]}, "model: has block_pattern"),
        ({"model__block__sequence_mixer__clip_qkv": 8.0}, "model: has clip_qkv"),
        ({"model__block__feed_forward": None}, "has blocks without attention or a dense MLP"),
        ({"train_module__pp_config": {"degree": 2}}, "pp_config: pipeline parallelism of OLMo-core is not converted"),
        ({"train_module__rank_microbatch_size": 9000}, "found 9000; must be a multiple of the 8192 tokens"),
        ({"train_module__dp_config__name": "zero"}, "found 'zero'; can be converted: fsdp, hsdp, ddp"),
    ],
)
def test_what_is_not_converted(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, "config.json", json.dumps(config(**changes)), *ON_16)
