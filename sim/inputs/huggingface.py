"""Model shapes from a Hugging Face `config.json`. Only numbers are read; no code of the model is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.core.files import read_json
from sim.inputs.input_source import nearest, show
from sim.inputs.yaml_input import MAX_BYTES, one_line

Config = dict[str, Any]


def model_from_config(file: Path) -> Config:
    """The `model` mapping of a config file; InputError for an unknown family or a variant not expressible."""
    config = _read(file)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise InputError(f"{file}: {_unknown(config, family)}")
    try:
        mapping = _FAMILIES[family](config)
    except KeyError as missing:
        raise InputError(f"{file}: {missing.args[0]}: is required and missing for model_type {family}") from None
    except _NotExpressibleError as problem:
        raise InputError(f"{file}: {problem}") from None
    return {key: value for key, value in mapping.items() if value is not None}


def _unknown(config: Config, family: Any) -> str:
    """Name the keys that nothing here reads, and the other way in."""
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in _FAMILIES:
        return (
            f"model_type: found {show(family)}, a model of several kinds of input; "
            f"its text_config by itself can be simulated, as a file of its own (model_type {text['model_type']})"
        )
    strange = sorted(key for key in config if key not in _KNOWN_KEYS and not key.startswith("_"))
    keys = f"; keys that no known family has: {', '.join(map(one_line, strange[:12]))}" if strange else ""
    return (
        f"model_type: found {show(family)}; must be one of {', '.join(_FAMILIES)}{nearest(family, _FAMILIES)}{keys}; "
        "any other model can be captured as a program: python -m calibrate.capture config.json"
    )


class _NotExpressibleError(Exception):
    """The config asks for something that a scenario's model has no key for."""


def _read(file: Path) -> Config:
    config = read_json(file, MAX_BYTES)
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a mapping (a Hugging Face config.json)")
    return config


def _require(config: Config, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a config whose `key` is there and none of `allowed`."""
    if config.get(key, allowed[0]) not in allowed:
        words = " or ".join(show(value) for value in allowed)
        raise _NotExpressibleError(f"{key}: found {show(config[key])}; only {words} can be simulated")


def _window(config: Config, size: str, pattern: list[str]) -> Config:
    """Layers with local attention: `layer_types` where the config has them, else the family's own `pattern`."""
    if config.get(size) is None:
        return {}
    types = config.get("layer_types")
    if types is None:
        kinds = pattern
    else:
        known = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
        if unknown := [t for t in types if t not in known]:
            raise _NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(known)}")
        kinds = [known[t] for t in types]
    return {"window": config[size], "attention_pattern": kinds} if set(kinds) != {"full"} else {}


def _llama(config: Config) -> Config:
    _require(config, "attention_bias", (False, None))
    _require(config, "mlp_bias", (False, None))
    _require(config, "hidden_act", ("silu", "swish"))
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "dropout": config.get("attention_dropout"),
        "positions": "rope",
    }


def _mixtral(config: Config) -> Config:
    moe = {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["intermediate_size"],
    }
    return _llama(config) | {"moe": moe}


def _qwen2(config: Config) -> Config:
    return _llama({**config, "attention_bias": False}) | {"qkv_bias": True}


def _qwen2_moe(config: Config) -> Config:
    moe = {
        "experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "shared_ffn": config["shared_expert_intermediate_size"],
        "shared_gate": True,
        "every": _every(config, "decoder_sparse_step"),
    }
    return _qwen2(config) | {"moe": moe}


def _every(config: Config, key: str) -> int:
    """Experts in each so-many-th layer; lists of other layers are refused."""
    _require(config, "mlp_only_layers", ([], None))
    return int(config.get(key, 1))


def _phi3(config: Config) -> Config:
    return _llama(config) | _window(config, "sliding_window", ["sliding"])


def _olmo2(config: Config) -> Config:
    return _llama(config) | {"qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"}


def _gemma(config: Config, pattern: list[str]) -> Config:
    """Gemma 2: GeGLU, norms on both sides, embedding and output one matrix."""
    _require(config, "use_bidirectional_attention", (False, None))
    for key in ("hidden_act", "hidden_activation"):
        _require(config, key, ("gelu_pytorch_tanh", None))
    found = _llama({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": "silu"})
    return found | {"mlp": "geglu", "norm_position": "both"} | _window(config, "sliding_window", pattern)


def _gemma2(config: Config) -> Config:
    return _gemma({"sliding_window": 4096, **config}, ["sliding", "full"])


def _gemma3(config: Config) -> Config:
    pattern = ["sliding"] * (config.get("sliding_window_pattern", 6) - 1) + ["full"]
    return _gemma({"sliding_window": 4096, **config}, pattern) | {"qk_norm": True}


def _gpt_oss(config: Config) -> Config:
    """Biases in attention, experts and router; a sink for each query head."""
    plain = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, **config}
    _require(plain, "attention_bias", (True,))
    moe = {
        "experts": plain["num_local_experts"],
        "top_k": plain["num_experts_per_tok"],
        "ffn": plain["intermediate_size"],
        "router_bias": True,
    }
    found = _llama({**plain, "attention_bias": False}) | {"bias": True, "sinks": True, "moe": moe}
    return found | _window(plain, "sliding_window", ["sliding", "full"])


def _glm4_moe(config: Config) -> Config:
    moe = {
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "shared_experts": config.get("n_shared_experts", 1),
        "dense_layers": config.get("first_k_dense_replace", 1),
    }
    found = _llama({**config, "attention_bias": False}) | {"moe": moe}
    found |= {"qkv_bias": config.get("attention_bias", False), "qk_norm": config.get("use_qk_norm", False)}
    return found | {"mtp_layers": config.get("num_nextn_predict_layers")}


def _llama4(config: Config) -> Config:
    """Chunks where a layer has rope, all tokens where it has none; one shared expert beside the routed ones."""
    _require(config, "moe_layers", (None,))
    step = config.get("no_rope_layer_interval", 4)
    ropes = config.get("no_rope_layers")
    if ropes and [bool(x) for x in ropes] != [(i + 1) % step != 0 for i in range(len(ropes))]:
        raise _NotExpressibleError(f"no_rope_layers: can be simulated: none in each {step}-th layer")
    moe = {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["intermediate_size"],
        "shared_experts": 1,
        "every": _every(config, "interleave_moe_layer_step"),
    }
    found = _llama({**config, "intermediate_size": config["intermediate_size_mlp"]}) | {"moe": moe}
    pattern = ["chunked"] * (step - 1) + ["full"]
    chunks = _window({"attention_chunk_size": 8192, **config}, "attention_chunk_size", pattern)
    return found | {"no_rope_every": step} | chunks


def _qwen3(config: Config) -> Config:
    return _llama({"head_dim": 128, **config}) | {"qk_norm": True}


def _qwen3_moe(config: Config) -> Config:
    moe = {
        "experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "every": _every(config, "decoder_sparse_step"),
    }
    return _qwen3(config) | {"moe": moe}


def _deepseek(config: Config) -> Config:
    _require(config, "moe_layer_freq", (1, None))
    mla = {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_nope_head_dim": config["qk_nope_head_dim"],
        "qk_rope_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }
    moe = {
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "shared_experts": config.get("n_shared_experts"),
        "dense_layers": config.get("first_k_dense_replace"),
        # routing groups stand on nodes (arXiv 2412.19437, 2.1.2); one group is no limit
        "max_nodes_per_token": None if config.get("n_group") == 1 else config.get("topk_group"),
    }
    mtp = config.get("num_nextn_predict_layers")
    return _llama(config) | {"kv_heads": None, "head_dim": None, "mla": mla, "moe": moe, "mtp_layers": mtp}


def _gpt2(config: Config) -> Config:
    _require(config, "activation_function", ("gelu_new", "gelu", "gelu_pytorch_tanh"))
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn": config.get("n_inner"),
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "dropout": config.get("resid_pdrop", 0.1),
        "positions": "learned",
        "max_positions": config["n_positions"],
    }


def _gpt_neox(config: Config) -> Config:
    _require(config, "hidden_act", ("gelu", "gelu_new", "gelu_fast"))
    _require(config, "attention_bias", (True,))
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "dropout": config.get("hidden_dropout"),
        "positions": "rope",
    }


_FAMILIES: dict[str, Callable[[Config], Config]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
    "kimi_k2": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}

# Keys that say how a known family computes or how it is written down, read here or of no weight for time and memory.
_KNOWN_KEYS_TEXT = """
    architectures attention_bias attention_chunk_size attention_dropout auto_map bos_token_id dtype eos_token_id
    decoder_sparse_step first_k_dense_replace head_dim hidden_act hidden_activation hidden_dropout hidden_size
    initializer_range interleave_moe_layer_step intermediate_size intermediate_size_mlp kv_lora_rank layer_norm_eps
    layer_types max_position_embeddings max_window_layers mlp_bias mlp_only_layers model_type moe_intermediate_size
    moe_layer_freq n_embd n_group n_head n_layer n_routed_experts n_shared_experts norm_topk_prob num_attention_heads
    num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_nextn_predict_layers
    output_router_logits pad_token_id partial_rotary_factor pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim
    rms_norm_eps rope_parameters rope_scaling rope_theta routed_scaling_factor router_aux_loss_coef scoring_func
    shared_expert_intermediate_size sliding_window sliding_window_pattern tie_word_embeddings topk_group topk_method
    torch_dtype transformers_version use_cache use_qk_norm use_sliding_window v_head_dim vocab_size
"""
_KNOWN_KEYS = frozenset(_KNOWN_KEYS_TEXT.split())
