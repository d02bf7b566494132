"""Each family's parameters and kinds of layers are those of the model that Transformers builds from the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.core.errors import InputError
from sim.inputs.huggingface import FAMILIES
from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from tests.sim.transformers_configs import (
    CONVOLUTIONS,
    GEMMA_4_EXPERTS,
    GEMMA_4_SMALL,
    GPT2,
    LAGUNA,
    LAYERS,
    OWN,
    ROPE,
    SIZES,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Weights that docs/models.md names as not counted: routers' biases, biases of heads' gates (Beam), norms around experts
# (Gemma 4).
NOT_COUNTED = (
    *("e_score_correction_bias", "expert_bias", "self_attn.gate_bias", "act_fn.alpha_p", "act_fn.alpha_n"),
    *(
        "router.scale",
        "router.per_expert_scale",
        "feedforward_layernorm_1.weight",
        "feedforward_layernorm_2.weight",
    ),
)
TOWERS = "model.embed_tokens_extend."  # of Phi 4 multimodal
KINDS = {
    "full_attention": "full",
    "minimax_m3_sparse": "selected",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state_space",
    "conv": "state_space",
    "hybrid": "beside",
}


def _known_to_transformers() -> list[str]:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [family for family in FAMILIES if family in known]


@pytest.mark.parametrize("family", _known_to_transformers())
def test_a_family_has_the_parameters_and_layers_of_transformers(tmp_path: Path, family: str) -> None:
    sizes = GPT2 if family in ("gpt2", "gpt_bigcode") else SIZES
    config = transformers.CONFIG_MAPPING[family](**sizes | OWN.get(family, {}))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    model = load_model(str(tmp_path / "config.json"))
    own = [(name, p.numel()) for name, p in built.named_parameters() if not name.startswith(TOWERS)]
    assert count_parameters(model).total == sum(size for name, size in own if not name.endswith(NOT_COUNTED))
    kinds = getattr(config, "layer_types", None)
    indexed = "full" if model.block_indexer is None else "selected"
    known = KINDS | {"indexed_attention": indexed}
    if kinds is not None and {*kinds} <= {*known} and "reused" not in model.attention_pattern:
        assert [model.attention_kind(i) for i in range(model.layers)] == [known[kind] for kind in kinds]
    assert family not in ("mistral", "mixtral", "starcoder2") or model.window == 128


@pytest.mark.parametrize("title", ["MiniMax M3", "Qwen 4 Exp", "Hunyuan 4 preview", "A.X K2 Light", "Gemma 4 E2B"])
def test_a_model_of_its_full_sizes_has_the_parameters_of_transformers(tmp_path: Path, title: str) -> None:
    """The config of the page on families."""
    rows = yaml.safe_load((Path(__file__).parents[3] / "docs" / "families.yaml").read_text(encoding="utf-8"))
    keys = next(row["config"] for row in rows if row["title"] == title)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**keys))
    (tmp_path / "config.json").write_text(json.dumps(keys))
    counted = {name: p.numel() for name, p in built.named_parameters() if not name.endswith(NOT_COUNTED)}
    assert count_parameters(load_model(str(tmp_path / "config.json"))).total == sum(counted.values())


def test_gemma_3_s_released_configs_leave_out_what_is_as_in_transformers(tmp_path: Path) -> None:
    """google/gemma-3-4b-pt names four sizes of its decoder."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**text))
    assert count_parameters(load_model(str(tmp_path))).total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("afmoe", "attention_bias", True),
        ("apertus1p5_text", "output_vocab_size", 64),
        ("axk2", "attention_bias", True),
        ("axk2", "mlp_layer_types", ["sparse", "dense"] * (LAYERS // 2)),
        ("beam", "mlp_layer_types", ["sparse", "dense"] * (LAYERS // 2)),
        ("deepseek_v4", "n_shared_experts", 2),
        ("dots1", "n_group", 4),
        ("flint", "mlp_only_layers", [0, 3]),
        ("glm4_moe", "n_group", 4),
        ("gpt_bigcode", "add_cross_attention", True),
        ("gpt_neo", "attention_types", [[["global", "random"], LAYERS // 2]]),
        ("helium", "head_dim", 32),
        ("hunyuan_v1_dense", "use_cla", True),
        ("hunyuan_v1_dense", "use_qk_norm", False),
        ("hunyuan_v1_moe", "moe_intermediate_size", [3072] * LAYERS),
        ("hunyuan_v1_moe", "num_shared_expert", [2] * LAYERS),
        ("hy_v4", "indexer_types", ["full"] * (LAYERS - 1)),
        ("hy_v4", "n_group", 4),
        ("glm_moe_dsa", "indexer_types", ["full"] * (LAYERS - 1)),
        ("glm_moe_dsa", "index_topk_pattern", "F" * (LAYERS - 1) + "X"),
        ("lara_mini", "layer_types", ["conv"] * LAYERS),
        ("laguna", "attention_bias", True),
        ("laguna", "gating", "per-element"),
        ("laguna", "num_attention_heads_per_layer", [8, 4] * (LAYERS // 2)),
        ("lfm3", "attention_bias", True),
        ("lfm3", "layer_types", ["linear_attention"] * LAYERS),
        ("mimo_v2_flash", "add_full_attention_sink_bias", True),
        ("minimax_m2", "attn_type_list", [1, 0] * (LAYERS // 2)),
        ("minimax_m2", "shared_intermediate_size", 256),
        ("minimax_m3_vl_text", "index_local_blocks", 0),
        ("minimax_m3_vl_text", "layer_types", ["sliding_attention"] * LAYERS),
        ("minimax_m3_vl_text", "mlp_layer_types", ["sparse", "dense"] * (LAYERS // 2)),
        ("olmoe", "clip_qkv", 8.0),
        ("opt", "_remove_final_layer_norm", True),
        ("opt", "layer_norm_elementwise_affine", False),
        ("qwen4_exp_text", "attention_bias", True),
        ("qwen4_exp_text", "indexer_kv_heads", 2),
        ("qwen4_exp_text", "layer_types", ["sliding_attention"] * LAYERS),
        ("qwen4_exp_text", "ngram_vocab_size_base", 10**12),
        ("solar_open", "attention_bias", True),
        ("solar_open", "partial_rotary_factor", 0.5),
        ("starcoder2", "use_bias", False),
    ],
)
def test_a_config_that_asks_for_more_than_is_simulated_is_refused(
    tmp_path: Path, family: str, key: str, value: Any
) -> None:
    sizes = GPT2 | {"n_positions": 512} if family == "gpt_bigcode" else SIZES
    config = {**sizes, **OWN.get(family, {}), "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(InputError, match=key):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("family", "key"), [("deepseek_v2", "mlp_bias"), ("hy_v3", "mlp_bias"), ("qwen3_next", "attention_bias")]
)
def test_biases_of_some_matrices_alone_are_refused(tmp_path: Path, family: str, key: str) -> None:
    """Routed experts have no biases, whatever `mlp_bias` says; of Qwen3-Next no config is known that asks for them."""
    config = transformers.CONFIG_MAPPING[family](**SIZES | OWN.get(family, {}) | {key: True})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with pytest.raises(InputError, match=key):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("bailing_hybrid", {"layer_group_size": 2, "first_k_dense_replace": 3, "linear_conv_kernel_dim": 2}),
        ("bailing_hybrid", {"linear_num_heads": 4}),
        ("bailing_hybrid", {"tie_word_embeddings": True}),  # which ties nothing in three families
        ("kimi_linear", {"tie_word_embeddings": True}),
        ("nemotron_h", {"tie_word_embeddings": True}),
        ("bamba", {"attn_layer_indices": None}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"num_ln_in_parallel_attn": 3}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
        ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True, "alibi": True}),
        (
            "beam",
            {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1), "layer_types": ["full_attention"] * LAYERS},
        ),
        ("cohere_compass_text", {"layer_types": None, "rope_parameters": {"full_attention": ROPE}}),
        ("flint", {"mlp_only_layers": [0, 1, 2], "attention_bias": True}),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 128}),
        ("gemma4_text", {"num_hidden_layers": 12}),  # whose sizes by layer are numbered "05", "11"
        ("gemma4_text", GEMMA_4_EXPERTS),
        ("gemma4_text", GEMMA_4_SMALL),
        ("gemma4_text", GEMMA_4_SMALL | {"use_double_wide_mlp": False, "vocab_size_per_layer_input": 500}),
        ("glm_moe_dsa", {"indexer_types": ["full", "full", *["shared"] * 3, "full", "shared", "shared"]}),
        ("granitemoeshared", {"shared_intermediate_size": 256}),
        ("helium", {"attention_bias": True}),
        ("hyperclovax", {"use_post_norm": False}),
        ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
        ("laguna", LAGUNA),
        ("laguna", LAGUNA | {"gating": "per-head", "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (LAYERS - 3)}),
        ("laguna", {"num_attention_heads_per_layer": [4] * LAYERS}),
        ("lfm2", {"conv_bias": True, "block_ffn_dim_multiplier": 1.3}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": None, "full_attn_idxs": [1, 3]}),
        ("lfm2_moe", {"num_dense_layers": 3}),
        ("lfm3", {"use_attention_gate": False, "layer_types": CONVOLUTIONS}),
        ("lfm3", {"use_sandwich_norm": False, "conv_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mixtral", {"head_dim": 32}),
        ("olmo_hybrid", {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}),
        ("olmo_hybrid", {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("persimmon", {"qk_layernorm": False}),
        ("phi", {"qk_layernorm": True, "num_key_value_heads": 8}),
        ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
        ("seed_oss", {"attention_out_bias": True}),
        ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("kimi_linear", {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * (LAYERS - 3)}),
    ],
)
def test_keys_other_than_the_usual_ones_count_as_in_transformers(
    tmp_path: Path, family: str, own: dict[str, Any]
) -> None:
    config = transformers.CONFIG_MAPPING[family](**SIZES | OWN.get(family, {}) | own)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    counted = {name: p.numel() for name, p in built.named_parameters() if not name.endswith(NOT_COUNTED)}
    assert count_parameters(load_model(str(tmp_path / "config.json"))).total == sum(counted.values())


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("zamba2", "one block of weights"),
        ("jetmoe", "are experts"),
        ("diffllama", "difference of two softmaxes"),
        ("gemma3n_text", ""),
        ("inkling2_text", "short convolutions"),
        ("diffusion_gemma_text", "reads the prompt with one pass"),
        ("voxtral_realtime_text", "MLP of the delay"),
        ("phi4flash", "gated memory units"),
        ("bitnet", "weights of three values"),
        ("xlstm", "recurrences"),
        ("modernbert-decoder", "another matrix and a norm"),
    ],
)
def test_families_of_other_kinds_are_refused_with_what_they_are(tmp_path: Path, family: str, why: str) -> None:
    known = family in transformers.CONFIG_MAPPING  # the code of some is on the Hub alone
    config = json.loads(transformers.CONFIG_MAPPING[family]().to_json_string(use_diff=False)) if known else SIZES
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": family}))
    with pytest.raises(InputError, match=f"model_type: found '{family}', a model .*{why}.*can be captured"):
        load_model(str(tmp_path / "config.json"))


def test_zero_experts_are_choices_of_the_router_alone(tmp_path: Path) -> None:
    """Transformers gives each of them a matrix that nothing reads, 2·ffn by hidden, which weights on the Hub lack."""
    own = OWN["longcat_flash"] | {"zero_expert_num": 8}
    config = transformers.CONFIG_MAPPING["longcat_flash"](**SIZES | own)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    model = load_model(str(tmp_path / "config.json"))
    unread = LAYERS // 2 * 8 * 2 * 128 * 512
    assert count_parameters(model).total == sum(p.numel() for p in built.parameters()) - unread
    assert [model.mlp_kind(i) for i in range(model.layers)] == ["experts", "dense"] * (LAYERS // 2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"zero_expert_type": "copy"}))
    with pytest.raises(InputError, match="zero_expert_type: found 'copy'; only 'identity'"):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("exaone", {"num_hidden_layers": "num_layers", "hidden_act": "activation_function"}),
        ("sarvam_moe", {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}),
    ],
)
def test_names_of_the_first_configs_on_the_hub_are_read(tmp_path: Path, family: str, names: dict[str, str]) -> None:
    config = transformers.CONFIG_MAPPING[family](**SIZES | OWN.get(family, {}))
    found = []
    for renamed in ({}, names):
        written = {renamed.get(key, key): value for key, value in config.to_dict().items()}
        (tmp_path / "config.json").write_text(json.dumps(written))
        found.append(load_model(str(tmp_path / "config.json")))
    assert found[0] == found[1]


def test_minimax_m3_s_first_keys_are_read(tmp_path: Path) -> None:
    """Its config on the Hub has signs of layers, and the indexer's sizes in a mapping."""
    config = transformers.CONFIG_MAPPING["minimax_m3_vl_text"](**SIZES | OWN["minimax_m3_vl_text"]).to_dict()
    names = {"num_index_heads": "n_heads", "index_dim": "head_dim", "block_size": "block_size"}
    names |= {"topk_blocks": "topk_blocks", "local_block": "local_blocks"}
    sparse = {f"sparse_{name}": config.pop(f"index_{key}") for name, key in names.items()}
    sparse["sparse_attention_freq"] = [int(kind != "full_attention") for kind in config.pop("layer_types")]
    signs = [int(kind == "sparse") for kind in config.pop("mlp_layer_types")]
    found = []
    for keys in ({}, {"sparse_attention_config": sparse, "moe_layer_freq": signs}):
        whole = SIZES | OWN["minimax_m3_vl_text"] if not keys else {}
        written = transformers.CONFIG_MAPPING["minimax_m3_vl_text"](**whole).to_dict() if not keys else config | keys
        (tmp_path / "config.json").write_text(json.dumps(written))
        found.append(load_model(str(tmp_path / "config.json")))
    assert found[0] == found[1]


def test_a_mistral_without_the_key_of_its_window_has_transformers_default(tmp_path: Path) -> None:
    for own, window in (({}, transformers.MistralConfig().sliding_window), ({"sliding_window": None}, None)):
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, **own, "model_type": "mistral"}))
        assert load_model(str(tmp_path / "config.json")).window == window


LEFT_OUT = {
    "axk1": ["q_lora_rank", "n_shared_experts", "topk_group"],
    "deepseek_v2": ["q_lora_rank", "n_shared_experts"],
    "deepseek_v3": ["q_lora_rank", "n_shared_experts", "first_k_dense_replace", "topk_group"],
    "bailing_hybrid": ["model_max_length"],
    "exaone4": ["sliding_window"],
    "gemma4_text": ["layer_types"],
    "glm4_moe_lite": ["q_lora_rank", "n_shared_experts"],
    "glm_moe_dsa": ["q_lora_rank", "n_shared_experts"],
    "granite_swa": ["tie_word_embeddings"],
    "granitemoehybrid": ["num_local_experts"],
    "hunyuan_vl_text": ["tie_word_embeddings"],
    "hyperclovax": ["use_post_norm"],
    "internlm3": ["num_key_value_heads"],
    "llama4_text": ["head_dim"],
    "longcat_flash": ["q_lora_rank", "zero_expert_num"],
    "minicpm3": ["q_lora_rank"],
    "ministral3": ["head_dim"],
    "mistral": ["max_position_embeddings"],
    "mistral4": ["q_lora_rank", "n_shared_experts"],
    "mpt": ["max_seq_len"],
    "nanochat": ["final_logit_softcapping"],
    "nemotron_h": ["head_dim"],
    "qwen3": ["sliding_window"],
    "seed_oss": ["attention_dropout"],
    "youtu": ["q_lora_rank"],
}


@pytest.mark.parametrize("own", [{}, {"qk_norm_type": "olmo", "norm_after": True, "attention_bias": True}])
def test_molmo_2_s_decoder_has_the_parameters_of_transformers(tmp_path: Path, own: dict[str, Any]) -> None:
    """But for the additional tokens' embeddings, which a warning names."""
    config = transformers.CONFIG_MAPPING["molmo2"](text_config=SIZES | {"head_dim": 64} | own)
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(config)
    counted = [p.numel() for name, p in built.named_parameters() if "language_model" in name or "lm_head" in name]
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    model = load_model(str(tmp_path / "config.json"))
    rows = config.text_config.additional_vocab_size
    assert count_parameters(model).total == sum(counted) - rows * model.hidden
    assert f"embeddings of {rows} additional tokens" in model.left_out


def test_layers_of_gemma_4_may_all_have_the_same_sizes(tmp_path: Path) -> None:
    """Transformers then writes an empty `per_layer_config`."""
    keys = transformers.Gemma4TextConfig(**SIZES | OWN["gemma4_text"], head_dim=64, global_head_dim=64).to_dict()
    assert not keys["per_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**keys))
    counted = {id(p): p.numel() for p in built.parameters()}
    assert count_parameters(load_model(str(tmp_path / "config.json"))).total == sum(counted.values())


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in LEFT_OUT.items() for key in keys])
def test_a_key_that_is_left_out_has_transformers_default(tmp_path: Path, family: str, key: str) -> None:
    """Not none: the config class of the family fills it in."""
    keys = transformers.CONFIG_MAPPING[family](**SIZES | OWN.get(family, {})).to_dict()
    del keys[key]
    if key == "layer_types":
        keys.pop("per_layer_config", None)
    found = []
    for written in (keys, transformers.CONFIG_MAPPING[family].from_dict(dict(keys)).to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(written))
        found.append(load_model(str(tmp_path / "config.json")))
    assert found[0] == found[1]


@pytest.mark.parametrize(("framework", "said"), [("transformers", False), ("megatron", True)])
def test_what_dbrx_leaves_out_is_said(tmp_path: Path, framework: str, said: bool) -> None:
    """Its clamp, which frameworks with layers of their own do not have."""
    (tmp_path / "config.json").write_text(json.dumps(transformers.DbrxConfig(**SIZES | OWN["dbrx"]).to_dict()))
    training = {"framework": framework, "seq_len": 64, "global_batch_size": 1}
    keys = {"model": str(tmp_path / "config.json"), "training": training, "cluster": {"gpu": "h200-sxm"}}
    warnings = parse_scenario(keys).warnings
    assert any("the config's clamp of queries, keys and values" in w for w in warnings) == said
