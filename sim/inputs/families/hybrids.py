"""Hugging Face's keys of families with Mamba's state-space layers, beside attention or without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.inputs.families.dense import Config, NotExpressibleError, llama, require, rope_share
from sim.inputs.families.experts import router
from sim.inputs.input_source import show
from sim.inputs.recorded import decided

_KINDS = {  # names of a layer's kind: a scenario's attention and, where the layer has one thing alone, its MLP
    "linear_attention": ("state_space", "none"),
    "mamba": ("state_space", "none"),
    "attention": ("full", "none"),
    "full_attention": ("full", "none"),
    "mlp": ("none", "dense"),
    "moe": ("none", "experts"),
}


def _kinds(names: list[str], key: str) -> list[tuple[str, str]]:
    if unknown := [name for name in names if name not in _KINDS]:
        raise NotExpressibleError(f"{key}: found {show(unknown[0])}; can be simulated: {', '.join(_KINDS)}")
    return [_KINDS[name] for name in names]


def layer_types(config: Config, default: list[str]) -> list[str]:
    """The kinds of attention of all layers, by `layer_types` or `layers_block_type`."""
    key = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    found = config[key] if config.get(key) is not None else default
    return [attention for attention, _ in _kinds(found, key)]


def _mamba2(config: Config) -> Config:
    """Mamba 2: nothing but state-space layers."""
    require(config, "hidden_act", ("silu", "swish"))
    heads, groups = config["num_heads"], config.get("n_groups", 8)
    decided(config, "expand", "time_step_rank")
    states = {
        "heads": heads,
        "head_dim": config["head_dim"],
        "state": config["state_size"],
        "groups": groups,
        "conv_kernel": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "bias": config.get("use_bias", False),
        "chunk": config.get("chunk_size", 256),
    }
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "head_dim": config["head_dim"],
        "vocab": config["vocab_size"],
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "state_space": states,
        "mlp_pattern": ["none"],
    }


def _mamba1(config: Config) -> Config:
    """Mamba (arXiv 2312.00752): nothing but selective scans; Falcon Mamba's norms of steps, B and C have no weights."""
    require(config, "hidden_act", ("silu", "swish"))
    require(config, "use_bias", (False,))
    hidden, rank = config["hidden_size"], config.get("time_step_rank", "auto")
    inner = config.get("intermediate_size") or config.get("expand", 2) * hidden
    decided(config, "expand")
    states = {
        "kind": "mamba1",
        "heads": inner,
        "head_dim": 1,
        "state": config.get("state_size", 16),
        "rank": _step_rank(rank, hidden),
        "conv_kernel": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "gated_norm": False,
    }
    return {
        "layers": _layers(config),
        "hidden": hidden,
        "heads": 1,
        "vocab": config["vocab_size"],
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "state_space": states,
        "mlp_pattern": ["none"],
    }


def _step_rank(given: Any, hidden: int) -> Any:
    """The width of Mamba 1's steps before they are widened: as given, or a sixteenth of the hidden size (`auto`)."""
    return -(-hidden // 16) if given == "auto" else given


def _layers(config: Config) -> int:
    """The number of layers, which Mamba's first configs call `n_layer`."""
    return int(config["num_hidden_layers"] if "num_hidden_layers" in config else config["n_layer"])


def _bamba(config: Config) -> Config:
    """Bamba: Mamba 2, attention in the layers that `attn_layer_indices` names, an MLP in each."""
    full = config.get("attn_layer_indices") or []
    names = ["attention" if i in full else "mamba" for i in range(config["num_hidden_layers"])]
    found = llama(config) | {"rope_share": rope_share(config, 0.5)}
    found |= {"attention_pattern": layer_types(config, names)}
    if "state_space" not in found["attention_pattern"]:
        return found
    if not full:
        del found["rope_share"]
    return found | {"state_space": _states(config, config.get("mamba_expand", 2) * config["hidden_size"])}


def _states(config: Config, inner: int) -> Config:
    """Sizes under the names that hybrids of Granite's and Falcon's make share; `inner`: all heads' width."""
    heads, width = config["mamba_n_heads"], config.get("mamba_d_head", "auto")
    return {
        "heads": heads,
        "head_dim": inner // heads if width == "auto" else width,
        "state": config["mamba_d_state"],
        "groups": config.get("mamba_n_groups", 1),
        "conv_kernel": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "bias": config.get("mamba_proj_bias", False),
        "chunk": config.get("mamba_chunk_size", 256),
    }


def _granite_hybrid(config: Config) -> Config:
    """Granite 4: Mamba 2 or attention, then experts beside a shared MLP, or that alone."""
    shared, experts = config["shared_intermediate_size"], config.get("num_local_experts", 8)
    found = llama(config | {"intermediate_size": shared}) | {
        "positions": "rope" if config.get("position_embedding_type") == "rope" else "none",
        "attention_pattern": layer_types(config, ["mamba"] * config["num_hidden_layers"]),
        "code": "granite",
    }
    if "state_space" in found["attention_pattern"]:
        found["state_space"] = _states(config, config.get("mamba_expand", 2) * config["hidden_size"])
    if experts:
        sizes = {"num_local_experts": experts, "num_experts_per_tok": 2} | config
        found["moe"] = router(sizes, "num_local_experts", "intermediate_size") | {"shared_ffn": shared}
    return found


def _falcon_h1(config: Config) -> Config:
    """Falcon-H1: attention and Mamba 2 side by side in every layer, then an MLP."""
    for key in ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"):
        require(config, key, (False, None))
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    decided(config, "mamba_expand", "mamba_norm_before_gate")
    states = _states(config, inner) | {"gated_norm": config.get("mamba_rms_norm", False)}
    return llama(config) | {"state_space": states, "attention_pattern": ["beside"]}


_NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_h(config: Config) -> Config:
    """Nemotron-H: each layer is one thing, Mamba 2, attention, an MLP or experts; squared ReLU, no positions."""
    require(config, "mlp_hidden_act", ("relu2",))
    require(config, "mamba_hidden_act", ("silu", None))
    decided(config, "expand", "partial_rotary_factor", "time_step_rank", "topk_group")
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        require(config, key, (False, None))
    for key in ("n_group", "n_shared_experts"):
        require(config, key, (1, None))
    names = config.get("layers_block_type") or [_NEMOTRON.get(sign, sign) for sign in config["hybrid_override_pattern"]]
    kinds = _kinds(names, "hybrid_override_pattern")
    states = {
        "heads": config["mamba_num_heads"],
        "head_dim": config["mamba_head_dim"],
        "state": config["ssm_state_size"],
        "groups": config.get("n_groups", 8),
        "conv_kernel": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "chunk": config.get("chunk_size", 128),
        "state_dtype": config.get("mamba_ssm_cache_dtype", "float32"),
    }
    found = llama({"num_hidden_layers": len(kinds), "intermediate_size": 21504} | config) | {
        "layers": len(kinds),
        "mlp": "relu2",
        "tied_embeddings": False,  # nemotron_h/modeling_nemotron_h.py: _tied_weights_keys is empty
        "positions": "none",
        "norm_in_fp32": True,
        "state_space": states,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "attention_pattern": [a for a, _ in kinds],
        "mlp_pattern": [m for _, m in kinds],
    }
    if "experts" not in found["mlp_pattern"]:
        return found
    own = {"shared_ffn": config["moe_shared_expert_intermediate_size"], "latent": config.get("moe_latent_size")}
    moe = router(config, "n_routed_experts") | {"router_fp32": True} | own
    require(config, "mtp_hybrid_override_pattern", ("*E", None))
    # Attention has the second name since Transformers 5.24 (configuration_utils.py: remap_legacy_layer_types).
    require(config, "mtp_layers_block_type", (["attention", "moe"], ["full_attention", "moe"], None))
    return found | {"moe": moe, "code": "deepseek_v3", "mtp_layers": config.get("num_nextn_predict_layers")}


def _jamba(config: Config) -> Config:
    """Jamba: Mamba 1, in each eighth layer attention; an MLP or experts in turn; no positions."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    require(config, "mamba_proj_bias", (False, None))
    require(config, "mamba_inner_layernorms", (True, None))
    rank = config.get("mamba_dt_rank", "auto")
    states = {
        "kind": "mamba1",
        "heads": config.get("mamba_expand", 2) * hidden,
        "head_dim": 1,
        "groups": 1,
        "state": config.get("mamba_d_state", 16),
        "rank": _step_rank(rank, hidden),
        "conv_kernel": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "inner_norms": True,
        "gated_norm": False,
    }

    def every(what: str, period: int, offset: int) -> list[bool]:
        first, step = config.get(f"{what}_layer_offset", offset), config.get(f"{what}_layer_period", period)
        return [(i - first) % step == 0 for i in range(layers)]

    experts = config.get("num_experts", 16)
    routed = every("expert", 2, 1) if experts > 1 else [False] * layers
    found = llama(config) | {
        "positions": "none",
        "state_space": states,
        "attention_pattern": ["full" if attends else "state_space" for attends in every("attn", 8, 4)],
        "mlp_pattern": ["experts" if here else "dense" for here in routed],
    }
    if "state_space" not in found["attention_pattern"]:
        del found["state_space"]
    moe = {"moe": router(config, "num_experts", "intermediate_size"), "code": "olmoe"}
    return found | (moe if any(routed) else {})


FAMILIES: dict[str, Callable[[Config], Config]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba1),
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
}
