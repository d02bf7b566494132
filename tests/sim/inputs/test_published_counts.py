"""Configs as they lie on the Hub, of families that Transformers does not build or whose keys differ there: parameters
are the published numbers (the safetensors' metadata, or the model's paper)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "baichuan2-7b": (LLAMA | {"model_type": "baichuan", "vocab_size": 125696}, 7_505_973_248),
    "bloom": (
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880},
        176_247_271_424,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        559_214_592,
    ),
    "chatglm3-6b": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "ffn_hidden_size": 13696,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "padded_vocab_size": 65024,
            "add_qkv_bias": True,
            "add_bias_linear": False,
        },
        6_243_584_000,
    ),
    "dbrx": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131_596_523_520,
    ),
    "deepseek-moe-16b": (
        {
            "model_type": "deepseek",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "vocab_size": 102400,
        },
        16_375_728_128,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "n_head": 71, "n_layer": 32, "vocab_size": 65024, "alibi": False},
        6_921_720_704,
    ),
    "gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_layer": 28,
            "rotary_dim": 64,
            "vocab_size": 50400,
            "n_positions": 2048,
        },
        6_050_882_784,
    ),
    "internlm2-7b": (
        LLAMA
        | {
            "model_type": "internlm2",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "vocab_size": 92544,
            "bias": False,
        },
        7_737_708_544,
    ),
    "minicpm-2b": (
        {
            "model_type": "minicpm",
            "hidden_size": 2304,
            "intermediate_size": 5760,
            "num_attention_heads": 36,
            "num_hidden_layers": 40,
            "vocab_size": 122753,
        },
        2_724_880_896,
    ),
    "mpt-7b": (
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "expansion_ratio": 4,
            "vocab_size": 50432,
            "no_bias": True,
            "attn_config": {"alibi": True},
        },
        6_649_286_656,
    ),
    "olmo-7b": (
        LLAMA | {"model_type": "olmo", "vocab_size": 50304, "tie_word_embeddings": False},
        6_888_095_744,
    ),
    "phi-2": (
        {
            "model_type": "phi",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "hidden_act": "gelu_new",
            "vocab_size": 51200,
            "partial_rotary_factor": 0.4,
        },
        2_779_683_840,
    ),
    "qwen-7b": (
        LLAMA
        | {
            "model_type": "qwen",
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "kv_channels": 128,
            "no_bias": True,
        },
        7_721_324_544,
    ),
}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_number(tmp_path: Path, name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert count_parameters(load_model(written(tmp_path, config))).total == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_trained_and_served(tmp_path: Path, name: str) -> None:
    gpu = {"gpu": {"preset": "h200-sxm", "memory_bytes": 4e12}}
    base = {"model": written(tmp_path, PUBLISHED[name][0]), "cluster": gpu, "calibration": "roofline"}
    step = simulate(parse_scenario({**base, "training": {"seq_len": 1024, "global_batch_size": 1}}))
    assert step.result["step_time_s"] > 0
    inference = {"requests": {"count": 2, "prompt_len": 64, "output_len": 4}}
    assert simulate_serving(parse_scenario({**base, "inference": inference})).end_s > 0


def test_an_infinite_number_that_nothing_reads_is_no_error(tmp_path: Path) -> None:
    """`time_step_limit: [0.0, Infinity]` stands in published configs of Mamba 2 and its hybrids."""
    config, _ = PUBLISHED["phi-2"]
    load_model(written(tmp_path, config | {"time_step_limit": [0.0, float("inf")]}))
    with pytest.raises(InputError, match=r"num_hidden_layers: found .*inf"):
        load_model(written(tmp_path, config | {"num_hidden_layers": float("inf")}))


def test_mimo_v2_5_pro_has_the_parameters_of_its_model_card(tmp_path: Path) -> None:
    """Card: 70 layers, 60 of them with windows, 69 with experts, 1.02 T parameters, 42 B of them active."""
    full = [layer in range(0, 70, 7) for layer in range(70)]
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128}
    config: dict[str, Any] = {
        "model_type": "mimo_v2",
        "vocab_size": 152576,
        "hidden_size": 6144,
        "num_hidden_layers": 70,
        "intermediate_size": 16384,
        **heads,
        **{f"swa_{key}": size for key, size in heads.items()},
        "sliding_window": 128,
        "hybrid_layer_pattern": [int(not here) for here in full],
        "moe_layer_freq": [0] + [1] * 69,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    model = load_model(written(tmp_path, config))
    counted = count_parameters(model)
    assert counted.total == pytest.approx(1.02e12, rel=0.005)
    assert counted.active == pytest.approx(42e9, rel=0.02)
    with pytest.raises(InputError, match="swa_num_attention_heads"):
        load_model(written(tmp_path, config | {"swa_num_attention_heads": 64}))
