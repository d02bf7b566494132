"""Model shapes from a Hugging Face `config.json`. Only numbers are read; no code of the model is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import InputError
from sim.files import read_json
from sim.inputs.input_source import nearest, show
from sim.inputs.yaml_input import MAX_BYTES

Config = dict[str, Any]


def model_from_config(file: Path) -> Config:
    """The `model` mapping of a config file; InputError for an unknown family or a variant not expressible."""
    config = _read(file)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise InputError(
            f"{file}: model_type: found {show(family)}; must be one of {', '.join(_FAMILIES)}"
            f"{nearest(family, _FAMILIES)}"
        )
    try:
        mapping = _FAMILIES[family](config)
    except KeyError as missing:
        raise InputError(f"{file}: {missing.args[0]}: is required and missing for model_type {family}") from None
    except _NotExpressibleError as problem:
        raise InputError(f"{file}: {problem}") from None
    return {key: value for key, value in mapping.items() if value is not None}


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


def _qwen3(config: Config) -> Config:
    return _llama({"head_dim": 128, **config}) | {"qk_norm": True}


def _qwen3_moe(config: Config) -> Config:
    _require(config, "decoder_sparse_step", (1,))
    _require(config, "mlp_only_layers", ([], None))
    moe = {
        "experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
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
        "max_nodes_per_token": config.get("topk_group"),  # routing groups stand on nodes (arXiv 2412.19437, 2.1.2)
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
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
