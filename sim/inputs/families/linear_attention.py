"""Hugging Face's keys of families with linear attention: the gated and Kimi's delta rule, lightning attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.inputs.families.dense import Config, NotExpressibleError, latent, llama, qwen3, require, rope_share
from sim.inputs.families.experts import dense_layers, qwen2_moe, router
from sim.inputs.families.hybrids import layer_types
from sim.inputs.input_source import show
from sim.inputs.recorded import decided

_NO_WINDOWS = {"use_sliding_window": False}  # which qwen3_next/modeling_qwen3_next.py and Qwen 3.5's do not read


def _qwen3_next(config: Config) -> Config:
    """Qwen3-Next: the gated delta rule, in each fourth layer attention with a gate; experts with a gated shared one."""
    require(config, "attention_bias", (False, None))
    whole = {"head_dim": 256, "norm_topk_prob": True} | config | _NO_WINDOWS
    found = qwen2_moe(whole) | {"qkv_bias": False, "qk_norm": True}
    found |= {"code": "qwen3_next" if whole["norm_topk_prob"] else "qwen3_next_as_chosen"}
    return found | _gated_delta_layers(config)


def _qwen3_5(config: Config) -> Config:
    """Qwen3.5: Qwen3-Next's layers with a dense MLP."""
    return qwen3({"head_dim": 256} | config | _NO_WINDOWS) | {"code": "gemma"} | _gated_delta_layers(config)


def qwen3_5_moe(config: Config) -> Config:
    """Qwen3.5 with experts in every layer."""
    return _qwen3_next({"intermediate_size": config["moe_intermediate_size"]} | config)


def _gated_delta_layers(config: Config) -> Config:
    """The gated delta rule; in every n-th layer attention with a gate."""
    require(config, "attn_output_gate", (True, None))
    names = ["linear_attention"] * (config.get("full_attention_interval", 4) - 1) + ["full_attention"]
    own = {"attention_gate": True, "rope_share": rope_share(config, 0.25), "state_space": gated_delta(config)}
    own["norm_in_fp32"] = True  # qwen3_next/modeling_qwen3_next.py: Qwen3NextRMSNorm, as Gemma's
    return own | {"attention_pattern": layer_types(config, names)}


def gated_delta(config: Config) -> Config:
    return {
        "kind": "gated_delta",
        "heads": config["linear_num_value_heads"],
        "head_dim": config["linear_value_head_dim"],
        "state": config["linear_key_head_dim"],
        "groups": config["linear_num_key_heads"],
        "chunk": 64,
        "conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "conv_bias": False,
        "state_dtype": config.get("mamba_ssm_dtype"),  # Qwen 3.5's is float32
    }


def _olmo_hybrid(config: Config) -> Config:
    """OLMo Hybrid: the gated delta rule, in each fourth layer OLMo 3's attention over all tokens, or without rope."""
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    keys = config.get("linear_num_key_heads") or heads
    width = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / keys)
    sizes = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * width,
    }
    names = ["full_attention" if i % 4 == 3 or i == count - 1 < 3 else "linear_attention" for i in range(count)]
    rope = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta")) is not None
    return llama(config | {"head_dim": None}) | {
        "qk_norm": True,
        "qk_norm_over": "all_heads",
        "norm_position": "by_kind",
        "norm_in_fp32": True,
        "code": "olmo",
        "positions": "rope" if rope else "none",
        "state_space": gated_delta(config | sizes),
        "attention_pattern": layer_types(config, names),
    }


def _lightning(heads: Any, width: Any, chunk: Any) -> Config:
    """Sizes of lightning attention."""
    own = {"kind": "lightning", "heads": heads, "head_dim": width, "state": width, "groups": heads, "chunk": chunk}
    return own | {"conv_kernel": 0, "conv_bias": False}


def _minimax(config: Config) -> Config:
    """MiniMax-Text-01 and M1: lightning attention, in every n-th layer attention, with a window where the config has
    one (minimax/modeling_minimax.py: MiniMaxModel.forward); experts."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    signs = config.get("attn_type_list")  # 0 for lightning attention
    names = ["full_attention" if sign else "linear_attention" for sign in signs or [1, 0]]
    states = _lightning(heads, width, config.get("block_size", 256))
    found = llama(config) | {"moe": router(config, "num_local_experts", "intermediate_size"), "state_space": states}
    kinds = layer_types(config, names)
    if "full" in kinds and (size := config.get("sliding_window")) is not None:
        return found | {"window": size, "attention_pattern": ["sliding" if x == "full" else x for x in kinds]}
    return found | {"attention_pattern": kinds}


# Of the delta rule with a gate for every channel, whatever else is kept in (vLLM, mamba_utils.py: kda_state_dtype).
# kimi_linear/modeling_kimi_linear.py, bailing_hybrid/modeling_bailing_hybrid.py: _tied_weights_keys is empty, whatever
# `tie_word_embeddings` says.
_NEVER_TIED = {"tied_embeddings": False}
KDA_STATE = "float32"


def _channel_gated(kind: str, heads: Any, width: Any, conv_kernel: Any) -> Config:
    """Sizes of the delta rule with a gate for every channel."""
    return {
        "kind": kind,
        "heads": heads,
        "head_dim": width,
        "state": width,
        "groups": heads,
        "chunk": 64,
        "conv_kernel": conv_kernel,
        "conv_bias": False,
        "state_dtype": KDA_STATE,
    }


def _top_k_key(config: Config) -> str:
    return "num_experts_per_token" if "num_experts_per_token" in config else "num_experts_per_tok"


def _kimi_linear(config: Config) -> Config:
    """Kimi Linear: the delta rule with a gate for every channel, in each fourth layer latent attention; experts."""
    own = config.get("linear_attn_config") or {}
    heads = own.get("num_heads", config.get("linear_num_heads"))
    width = own.get("head_dim", config.get("linear_head_dim"))
    if heads is None or width is None:
        raise KeyError("linear_attn_config")
    layers = config["num_hidden_layers"]
    full = own.get("full_attn_layers") or [i + 1 for i in range(layers) if i and i % 4 == 0]  # counted from 1
    names = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    states = _channel_gated(
        "kda", heads, width, own.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))
    )
    moe = router(config, "num_experts", top_k=_top_k_key(config)) | {
        "shared_experts": config.get("num_shared_experts", config.get("n_shared_experts", 1)),
        "dense_layers": dense_layers({"first_k_dense_replace": 1} | config),
        "router_fp32": True,
    }
    require(config, "moe_layer_freq", (1, None))
    require(config, "num_expert_group", (1, None))
    decided(config, "topk_group")
    found = llama(config) | {"kv_heads": None, "head_dim": None, "mla": latent(config), "moe": moe}
    found |= {"trained_positions": config.get("model_max_length")}
    found |= {"positions": "none", "state_space": states, "code": "deepseek_v3"} | _NEVER_TIED
    return found | {"attention_pattern": layer_types(config, names)}


_OF_LING_3 = ("linear_conv_kernel_dim", "short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound")


def _has_delta_rule(config: Config) -> bool:
    """Tell Ling 3 from Ling 2.5 and 2.6, which share a `model_type`, by the code that a config names and by keys that
    one of them has; the default is Ling 3, as in Transformers."""
    code, sizes = str(next(iter(config.get("architectures") or []), "")), not config.keys().isdisjoint(_OF_LING_3)
    if sizes and "MoeV2" in code:
        raise NotExpressibleError(f"architectures: found {show(code)}, which has no convolutions, beside their sizes")
    return sizes or ("MoeV2" not in code and "group_norm_size" not in config) or "MoeV3" in code


def _bailing_hybrid(config: Config) -> Config:
    """Ling 2.5, 2.6 and 3.

    Ling 3: Kimi's delta rule with whole matrices to its gates, in each sixth layer latent attention with a gate on its
    heads; DeepSeek V3's experts. Ling 2.5: lightning attention in the delta rule's place, no gates on heads.
    """
    require(config, "attention_bias", (False, None))
    for key in ("use_bias", "use_qkv_bias"):
        require(config, key, (False, None))
    delta = _has_delta_rule(config)
    heads = config.get("linear_num_heads", config["num_attention_heads"])
    width = config.get("linear_head_dim", config.get("head_dim", 128))
    decided(config, "group_norm_size", "use_qk_norm", "partial_rotary_factor", "rotary_dim", "head_dim")
    layers, group = config["num_hidden_layers"], config.get("layer_group_size", 6)
    groups = config.get("num_expert_group", config.get("n_group", 8))
    names = ["linear_attention" if (i + 1) % group else "full_attention" for i in range(layers)]
    moe = router(config, "num_experts", top_k=_top_k_key(config)) | {
        "shared_experts": config.get("num_shared_experts", 1),
        "dense_layers": dense_layers({"first_k_dense_replace": 2} | config),
        "router_fp32": True,
        "max_nodes_per_token": None if groups == 1 else config.get("topk_group", 4),
    }
    require(config, "moe_shared_expert_intermediate_size", (moe["ffn"], None))
    if delta:
        taps = config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4))
        states = _channel_gated("kda_whole", heads, width, taps)
    else:
        states = _lightning(heads, width, 256)
    return llama(config) | {
        **_NEVER_TIED,
        "kv_heads": None,
        "head_dim": None,
        "mla": latent(config),
        "moe": moe,
        "state_space": states,
        "attention_pattern": layer_types(config, names),
        "attention_gate": "per_head" if delta else False,
        "code": "deepseek_v3",
        "trained_positions": config.get("model_max_length", config.get("max_position_embeddings")),
    }


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), _minimax),
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
}
