"""Parameter counts against published ones, and models read from Hugging Face configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple

from sim.core.errors import InputError
from sim.inputs import model_input
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import load_model, model_presets
from sim.inputs.scenario import parse_scenario
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.models.output.mtp import mtp_block
from sim.models.parameters import count_parameters

# Exact counts: `num_parameters` of the Hugging Face checkpoints' model cards and index files.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2": 235_741_434_880,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x22b": 140_620_634_112,
    "gemma3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}

# Billions as printed in the papers' tables, to the digits printed there.
ROUNDED = {
    "gpt3-6.7b": (6.7, 0.05),
    "gpt3-13b": (13.0, 0.2),
    "gpt3-175b": (175.0, 0.5),
    "megatron-1.7b": (1.7, 0.05),
    "megatron-3.6b": (3.6, 0.05),
    "megatron-7.5b": (7.5, 0.05),
    "megatron-18.4b": (18.4, 0.05),
    "megatron-39.1b": (39.1, 0.05),
    "megatron-76.1b": (76.1, 0.06),
    "megatron-145.6b": (145.6, 0.05),
    "megatron-310.1b": (310.1, 0.05),
    "megatron-529.6b": (529.6, 0.05),
    "megatron-1008b": (1008.0, 0.05),
    "korthikanti-22b": (22.0, 0.5),
    "korthikanti-175b": (175.0, 0.5),
    "korthikanti-530b": (530.0, 0.5),
    "korthikanti-1t": (1000.0, 10.0),
    "glm-4.5": (355.0, 3.0),
    "glm-4.5-air": (106.0, 1.0),
    "llama4-scout": (109.0, 1.5),
    "llama4-maverick": (400.0, 1.0),
    "minimax-m2": (230.0, 2.0),
    "olmo3-7b": (7.3, 0.05),
    "exaone4-32b": (32.0, 0.05),
    "smollm3-3b": (3.08, 0.01),
    "seed-oss-36b": (36.0, 0.5),
    "glm-4.7-flash": (30.0, 0.5),
    "glm-5": (744.0, 0.5),
    "hunyuan-a13b": (80.0, 0.5),
    "deepseek-v4-flash": (284.0, 0.5),
    "deepseek-v4-pro": (1600.0, 30.0),
    "qwen3-next-80b-a3b": (80.0, 0.5),
    "qwen3.5-35b-a3b": (35.0, 0.5),
    "nemotron3-super-120b-a12b": (120.6, 0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name: str) -> None:
    assert count_parameters(load_model(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_parameter_count(name: str) -> None:
    billions, tolerance = ROUNDED[name]
    assert count_parameters(load_model(name)).total / 1e9 == pytest.approx(billions, abs=tolerance)


def test_every_preset_is_checked_against_a_published_count() -> None:
    aliases = {"gpt2-124m", "llama3.1-8b", "llama3.1-70b"}
    assert set(model_presets()) == set(PUBLISHED) | set(ROUNDED) | aliases | {"deepseek-v3", "deepseek-v3.2", "kimi-k2"}


def test_deepseek_v3_is_published_with_router_biases_and_37_billion_active() -> None:
    model = load_model("deepseek-v3")
    count = count_parameters(model)
    assert model.moe is not None
    assert count.total + (61 - 3) * model.moe.experts == 671_026_419_200
    assert count.active / 1e9 == pytest.approx(37, abs=0.6)
    # 14 B published for the module with its copies of embedding and head (685 B in all, its README)
    assert (count.mtp + count.embedding + count.head) / 1e9 == pytest.approx(13.5, abs=0.6)


def test_kimi_k2_is_published_with_router_biases() -> None:
    model = load_model("kimi-k2")
    assert model.moe is not None
    assert count_parameters(model).total + (61 - 1) * model.moe.experts == 1_026_408_232_448


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("qwen3-235b-a22b", 22, 0.5),
        ("mixtral-8x22b", 39, 0.5),
        ("glm-4.5", 32, 2),
        ("kimi-k2", 32.6, 0.5),
        ("llama4-scout", 17, 0.5),
        ("llama4-maverick", 17, 0.5),
        ("hunyuan-a13b", 13, 0.5),
        ("glm-5", 40, 2),
    ],
)
def test_active_parameters_of_experts(name: str, billions: float, tolerance: float) -> None:
    assert count_parameters(load_model(name)).active / 1e9 == pytest.approx(billions, abs=tolerance)


def test_active_parameters() -> None:
    assert count_parameters(load_model("mixtral-8x7b")).active / 1e9 == pytest.approx(12.9, abs=0.05)
    assert count_parameters(load_model("deepseek-v2")).active / 1e9 == pytest.approx(21, abs=0.5)
    assert count_parameters(load_model("qwen3-30b-a3b")).active / 1e9 == pytest.approx(3.3, abs=0.06)
    dense = count_parameters(load_model("llama3-8b"))
    assert dense.active == dense.total


@pytest.mark.parametrize(("h", "layers", "v"), [(64, 1, 100), (768, 12, 50257), (12288, 96, 51200)])
def test_gpt_formula(h: int, layers: int, v: int) -> None:
    gpt = ModelConfig(layers=layers, hidden=h, heads=h // 32, vocab=v, tied_embeddings=True)
    assert count_parameters(gpt).total == h * v + layers * (12 * h**2 + 13 * h) + 2 * h


def test_parts_add_up_to_the_total() -> None:
    for name in model_presets():
        count = count_parameters(load_model(name))
        assert count.total == sum(astuple(count)[2:-1]), name


def test_padded_vocabulary() -> None:
    gpt2 = load_model("gpt2")
    assert (gpt2.padded_vocab(1), gpt2.padded_vocab(8)) == (50304, 51200)
    assert load_model("llama3-8b").padded_vocab(2) == 128256


def _config(tmp_path: Path, **config: Any) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "attention_bias": False,
}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
DEEPSEEK_V3 = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 48,
    "n_embd": 1600,
    "n_head": 25,
    "n_positions": 1024,
    "n_inner": None,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
NEOX = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 16384,
    "vocab_size": 50432,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama3-8b"),
        (QWEN2, "qwen2.5-7b"),
        (QWEN3, "qwen3-8b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (GPT2, "gpt2-xl"),
    ],
)
def test_hugging_face_config_equals_the_preset(config: dict[str, Any], preset: str, tmp_path: Path) -> None:
    assert load_model(_config(tmp_path, **config)) == load_model(preset)


def test_pythia_parameter_count(tmp_path: Path) -> None:
    # EleutherAI/pythia-6.9b: 6,857,302,016 parameters (model card of the suite, table of sizes).
    model = load_model(_config(tmp_path, **NEOX))
    assert count_parameters(model).total == 6_857_302_016
    assert (model.parallel_block, model.rope_share) == ("two_norms", 0.25)  # GPTNeoXConfig's defaults
    other = load_model(_config(tmp_path, **NEOX, use_parallel_residual=False, rotary_pct=1.0))
    assert (other.parallel_block, other.rope_share) == (False, 1.0)


@pytest.mark.parametrize(
    ("named", "read"),
    [("gelu_fast", "gelu_fast"), ("gelu_new", "gelu_new"), ("quick_gelu", "quick_gelu"), ("gelu_pytorch_tanh", "gelu")],
)
def test_a_gelu_that_transformers_writes_out_is_read_as_such(tmp_path: Path, named: str, read: str) -> None:
    assert load_model(_config(tmp_path, **NEOX | {"hidden_act": named})).mlp == read
    assert load_model(_config(tmp_path, **GPT2 | {"activation_function": named})).mlp == read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type: found 'bert', an encoder"),
        ({"model_type": "rwkv"}, "model_type: found 'rwkv'"),
        ({"model_type": None}, "model_type: found null"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ({"hidden_size": "big"}, "hidden: found 'big'; must be an integer"),
        ({"num_hidden_layers": 0}, "layers: found 0; must be at least 1"),
        ({"num_key_value_heads": 5}, "kv_heads: found 5; must divide heads (32)"),
        ({"max_position_embeddings": 10**9}, "config.json: max_position_embeddings: found 1000000000; must be at most"),
        ({"num_hidden_layers": "32"}, "config.json: num_hidden_layers: found '32'; must be a number, without quotes"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers: found 1000000000; must be at most 10,000"),
        ({"model_type": "jamba", "num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000; must be at most"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000"),
        ({"model_type": "qwen3_next", "full_attention_interval": 10**9}, "full_attention_interval: found 1000000000"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 10**9}, "sliding_window_pattern: found 1000000000"),
    ],
)
def test_hugging_face_config_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load_model(_config(tmp_path, **{**LLAMA, **changes}))
    assert message in str(error.value)


def test_hugging_face_config_missing_key(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(InputError, match=r"config\.json: vocab_size: is required and missing"):
        load_model(_config(tmp_path, **config))


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"model_type": ' + "9" * 5000 + "}", "\x00"])
def test_hugging_face_config_that_is_no_json_mapping(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(str(file))


@pytest.mark.parametrize(
    "name", ["gpt2", "llama3-8b", "llama3.2-1b", "mixtral-8x7b", "deepseek-v3", "qwen2.5-7b", "qwen3-30b-a3b"]
)
def test_blocks_that_are_simulated_have_the_counted_parameters(name: str) -> None:
    data = {"model": name, "training": {"seq_len": 1024, "global_batch_size": 1}, "cluster": "dgx-h100"}
    s = parse_scenario(data)
    count = count_parameters(s.model)
    layers = [layer_block(s, layer) for layer in range(s.model.layers)]
    ends = [embedding_block(s), head_block(s)]
    padding = (s.model.padded_vocab(1) - s.model.vocab) * s.model.hidden * (1 if s.model.tied_embeddings else 2)
    assert sum(b.params + b.expert_params for b in [*layers, *ends]) == count.total + padding
    if s.model.mtp_layers:
        module = mtp_block(s)
        assert (module.params + module.expert_params) * s.model.mtp_layers == count.mtp


def test_a_preset_of_another_changes_single_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole-of-two.yaml").write_text("layers: 2\nmoe: {experts: 8, top_k: 2, ffn: 4}\n")
    (tmp_path / "part-of-two.yaml").write_text("preset: whole-of-two\nmoe: {top_k: 1}\n")
    monkeypatch.setattr(model_input, "_FOLDER", tmp_path)
    assert model_input._preset("part-of-two") == {"layers": 2, "moe": {"experts": 8, "top_k": 1, "ffn": 4}}
