"""Hugging Face's keys of each family of decoders, as a scenario's `model`. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.inputs.input_source import show

Config = dict[str, Any]


class NotExpressibleError(Exception):
    """The config asks for something that a scenario's model has no key for."""


def require(config: Config, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a config whose `key` is there and none of `allowed`."""
    if config.get(key, allowed[0]) not in allowed:
        words = " or ".join(show(value) for value in allowed)
        raise NotExpressibleError(f"{key}: found {show(config[key])}; only {words} can be simulated")


def window(config: Config, size: str, pattern: list[str]) -> Config:
    """Layers with local attention: `layer_types` where the config has them, else the family's own `pattern`."""
    if config.get(size) is None:
        return {}
    types = config.get("layer_types")
    if types is None:
        kinds = pattern
    else:
        known = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
        if unknown := [t for t in types if t not in known]:
            raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(known)}")
        kinds = [known[t] for t in types]
    return {"window": config[size], "attention_pattern": kinds} if set(kinds) != {"full"} else {}


def llama(config: Config) -> Config:
    require(config, "attention_bias", (False, None))
    require(config, "mlp_bias", (False, None))
    require(config, "hidden_act", ("silu", "swish"))
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


def router(
    config: Config, experts: str, ffn: str = "moe_intermediate_size", top_k: str = "num_experts_per_tok"
) -> Config:
    """Routed experts; `experts`, `ffn` and `top_k`: the keys of their sizes."""
    return {"experts": config[experts], "top_k": config[top_k], "ffn": config[ffn]}


def latent(config: Config) -> Config:
    """The sizes of latent attention."""
    required = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": config.get("q_lora_rank"), **{key: config[key] for key in required}}


def rope_share(config: Config, default: float) -> float:
    """`partial_rotary_factor`, which configs of Transformers 5 keep among the rope's parameters."""
    found = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return float(default if found is None else found)


def _experts_key(config: Config) -> str:
    """Where the number of experts stands: Transformers 5 writes `num_local_experts` for some families."""
    return "num_experts" if "num_experts" in config else "num_local_experts"


def _mixtral(config: Config) -> Config:
    return llama(config) | {"moe": router(config, "num_local_experts", "intermediate_size")}


def _minimax_m2(config: Config) -> Config:
    found = _mixtral({"head_dim": 128, **config})
    share = config["rotary_dim"] / found["head_dim"] if "rotary_dim" in config else rope_share(config, 1.0)
    return found | {"qk_norm": config.get("use_qk_norm", True), "qk_norm_over": "all_heads", "rope_share": share}


def _cohere(config: Config) -> Config:
    """Command R: attention and MLP on one layer norm without bias; one matrix for embedding and output."""
    require(config, "use_qk_norm", (False, None))
    found = llama({"tie_word_embeddings": True, **config})
    return found | {"norm": "layernorm", "parallel_block": True, "norm_in_fp32": True}


def _cohere2(config: Config) -> Config:
    """Command R7B: windows with rope, each fourth layer all tokens without it."""
    step = config.get("sliding_window_pattern") or 4
    found = _cohere({"sliding_window": 4096, **config})
    found |= window({"sliding_window": 4096, **config}, "sliding_window", ["sliding"] * (step - 1) + ["full"])
    if "attention_pattern" not in found:
        return found
    kinds = [found["attention_pattern"][i % len(found["attention_pattern"])] for i in range(found["layers"])]
    if [kind == "full" for kind in kinds] != [(i + 1) % step == 0 for i in range(found["layers"])]:
        raise NotExpressibleError(f"layer_types: can be simulated: full attention in each {step}-th layer")
    return found | {"no_rope_every": step}


def _qwen2(config: Config) -> Config:
    return llama({**config, "attention_bias": False}) | {"qkv_bias": True}


def qwen2_moe(config: Config) -> Config:
    shared = {"shared_ffn": config["shared_expert_intermediate_size"], "shared_gate": True}
    moe = router(config, _experts_key(config)) | shared | {"every": every(config, "decoder_sparse_step")}
    return _qwen2(config) | {"moe": moe}


def every(config: Config, key: str) -> int:
    """Experts in each so-many-th layer; lists of other layers are refused."""
    require(config, "mlp_only_layers", ([], None))
    return int(config.get(key, 1))


def _phi3(config: Config) -> Config:
    own = {"merged_projections": True, "rope_share": rope_share(config, 1.0)}
    return llama(config) | own | window(config, "sliding_window", ["sliding"])


def _olmo2(config: Config) -> Config:
    norms = {"qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post", "norm_in_fp32": True}
    return llama(config) | norms


def _gemma(config: Config, pattern: list[str]) -> Config:
    """Gemma 2: GeGLU, norms on both sides, embedding and output one matrix."""
    require(config, "use_bidirectional_attention", (False, None))
    for key in ("hidden_act", "hidden_activation"):
        require(config, key, ("gelu_pytorch_tanh", None))
    found = llama({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": "silu"})
    found |= {"mlp": "geglu", "norm_position": "both", "norm_in_fp32": True}
    found |= {"attention_softcap": config.get("attn_logit_softcapping")}
    found |= {"logit_softcap": config.get("final_logit_softcapping")}
    return found | window(config, "sliding_window", pattern)


def _gemma2(config: Config) -> Config:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # where a config leaves them out
    return _gemma({"sliding_window": 4096, **caps, **config}, ["sliding", "full"])


def _gemma3(config: Config) -> Config:
    pattern = ["sliding"] * (config.get("sliding_window_pattern", 6) - 1) + ["full"]
    return _gemma({"sliding_window": 4096, **config}, pattern) | {"qk_norm": True}


def _gpt_oss(config: Config) -> Config:
    """Biases in attention, experts and router; a sink for each query head."""
    plain = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, **config}
    require(plain, "attention_bias", (True,))
    moe = router(plain, "num_local_experts", "intermediate_size") | {"router_bias": True}
    found = llama({**plain, "attention_bias": False}) | {"bias": True, "sinks": True, "moe": moe}
    found |= {"mlp": "clamped_swiglu", "norm_in_fp32": True, "scaled_rope": True}
    return found | window(plain, "sliding_window", ["sliding", "full"])


def _glm4_moe(config: Config) -> Config:
    shared, dense = config.get("n_shared_experts", 1), config.get("first_k_dense_replace", 1)
    moe = router(config, "n_routed_experts") | {"shared_experts": shared, "dense_layers": dense, "router_fp32": True}
    found = llama({**config, "attention_bias": False}) | {"moe": moe}
    found |= {"qkv_bias": config.get("attention_bias", False), "qk_norm": config.get("use_qk_norm", False)}
    found |= {"rope_share": rope_share(config, 0.5)}
    return found | {"mtp_layers": config.get("num_nextn_predict_layers")}


def _llama4(config: Config) -> Config:
    """Chunks where a layer has rope, all tokens where it has none; one shared expert beside the routed ones."""
    sparse = config.get("moe_layers")
    each = every(config, "interleave_moe_layer_step")
    if sparse is not None and list(sparse) != list(range(each - 1, config["num_hidden_layers"], each)):
        raise NotExpressibleError(f"moe_layers: can be simulated: each {each}-th layer")
    step = config.get("no_rope_layer_interval", 4)
    ropes = config.get("no_rope_layers")
    if ropes and [bool(x) for x in ropes] != [(i + 1) % step != 0 for i in range(len(ropes))]:
        raise NotExpressibleError(f"no_rope_layers: can be simulated: none in each {step}-th layer")
    moe = router(config, "num_local_experts", "intermediate_size") | {"shared_experts": 1, "every": each}
    found = llama({**config, "intermediate_size": config["intermediate_size_mlp"]}) | {"moe": moe}
    pattern = ["chunked"] * (step - 1) + ["full"]
    chunks = window({"attention_chunk_size": 8192, **config}, "attention_chunk_size", pattern)
    return found | {"no_rope_every": step} | chunks


def _qwen3(config: Config) -> Config:
    return llama({"head_dim": 128, **config}) | {"qk_norm": True}


def _qwen3_moe(config: Config) -> Config:
    moe = router(config, _experts_key(config)) | {"every": every(config, "decoder_sparse_step")}
    return _qwen3(config) | {"moe": moe}


def _deepseek(config: Config) -> Config:
    require(config, "moe_layer_freq", (1, None))
    moe = router(config, "n_routed_experts") | {
        "shared_experts": config.get("n_shared_experts"),
        "dense_layers": config.get("first_k_dense_replace"),
        "router_fp32": True,
        # routing groups stand on nodes (arXiv 2412.19437, 2.1.2); one group is no limit
        "max_nodes_per_token": None if config.get("n_group") == 1 else config.get("topk_group"),
    }
    mtp = config.get("num_nextn_predict_layers")
    return llama(config) | {"kv_heads": None, "head_dim": None, "mla": latent(config), "moe": moe, "mtp_layers": mtp}


def _deepseek_v32(config: Config) -> Config:
    """DeepSeek V3.2: latent attention over the keys that an indexer selects."""
    dense, kinds = config.get("first_k_dense_replace", 3), config.get("mlp_layer_types")
    if kinds is not None:  # stands in place of the number, as in Transformers' DeepseekV32Config
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise NotExpressibleError("mlp_layer_types: can be simulated: a list of dense layers, then sparse ones")
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(kind == "indexed_attention" for kind in types)):
        raise NotExpressibleError("layer_types: can be simulated: a list of indexed_attention only")
    index = {
        "heads": config.get("index_n_heads", 64),
        "head_dim": config.get("index_head_dim", 128),
        "top_k": config.get("index_topk", 2048),
    }
    return _deepseek({**config, "first_k_dense_replace": dense}) | {"indexer": index}


def _gpt2(config: Config) -> Config:
    require(config, "activation_function", ("gelu_new", "gelu", "gelu_pytorch_tanh"))
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
    require(config, "hidden_act", ("gelu", "gelu_new", "gelu_fast"))
    require(config, "attention_bias", (True,))
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


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": llama,
    "mistral": llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "minimax_m2": _minimax_m2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
    "kimi_k2": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_v32,
}
