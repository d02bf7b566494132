"""Hugging Face's keys of families whose code lies beside their weights on the Hub (`trust_remote_code`), not in
Transformers. Only numbers are read; vLLM's model executor was read for the keys' meaning.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import Config, Family, llama, qwen2, require, rope_share
from sim.inputs.families.experts import dense_layers, router


def _baichuan(config: Config) -> Config:
    """Baichuan 1 and 2: query, key and value are one matrix; the models of 40 layers have ALiBi in place of rope."""
    found = llama(config) | {"trained_positions": config.get("model_max_length")}
    return found | {"positions": "none" if config["num_hidden_layers"] == 40 else "rope"}


def _chatglm(config: Config) -> Config:
    """ChatGLM 2 and 3, GLM-4 9B of 2024: few keys and values, biases in query, key and value, rope over half a head."""
    for key, allowed in (
        ("add_bias_linear", False),
        ("rmsnorm", True),
        ("apply_residual_connection_post_layernorm", False),
        ("post_layer_norm", True),
    ):
        require(config, key, (allowed,))
    return {
        "layers": config["num_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["multi_query_group_num"] if config.get("multi_query_attention", False) else None,
        "head_dim": config["kv_channels"],
        "ffn": config["ffn_hidden_size"],
        "vocab": config["padded_vocab_size"],
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "qkv_bias": config.get("add_qkv_bias", False),
        "merged_projections": True,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "positions": "rope",
        "rope_share": 0.5,
        "trained_positions": config.get("seq_length"),
    }


def _qwen(config: Config) -> Config:
    """The first Qwen: `intermediate_size` counts gate and up together."""
    require(config, "no_bias", (True,))
    require(config, "rotary_pct", (1.0, None))
    found = qwen2(config | {"intermediate_size": config["intermediate_size"] // 2})
    return found | {"head_dim": config.get("kv_channels"), "trained_positions": config.get("seq_length")}


def _deepseek(config: Config) -> Config:
    """DeepSeek MoE of January 2024 (arXiv 2401.06066): Llama's attention, fine-grained and shared experts."""
    require(config, "moe_layer_freq", (1, None))
    require(config, "mlp_bias", (False, None))  # routed experts have none
    moe = router(config, "n_routed_experts") | {"shared_experts": config.get("n_shared_experts")}
    return llama(config) | {"moe": moe | {"dense_layers": dense_layers(config)}}


def _bailing(config: Config) -> Config:
    """Ling and Ring, 1 and 2 (without linear attention)."""
    require(config, "use_bias", (False, None))
    require(config, "moe_shared_expert_intermediate_size", (config["moe_intermediate_size"], None))
    moe = router(config, "num_experts") | {
        "shared_experts": config.get("num_shared_experts"),
        "dense_layers": config.get("first_k_dense_replace"),
        "router_fp32": True,
    }
    found = llama(config) | {"qkv_bias": config.get("use_qkv_bias", False), "qk_norm": config.get("use_qk_norm", False)}
    share = rope_share(config, config["rotary_dim"] / found["head_dim"] if "rotary_dim" in config else 1.0)
    own = {"merged_projections": True, "rope_share": None if share == 1.0 else share, "moe": moe}
    return found | own | {"mtp_layers": config.get("num_nextn_predict_layers")}


def _internlm(config: Config) -> Config:
    """The first InternLM: Llama's layers, with biases in attention's four projections (`bias`; vLLM, models/llama.py:
    "Support internlm/internlm-7b with bias")."""
    return llama(config | {"attention_bias": config.get("bias", True)})


def _orion(config: Config) -> Config:
    """Orion: Llama's layers, with layer norms and their biases (vLLM, models/orion.py: OrionDecoderLayer)."""
    return llama(config) | {"norm": "layernorm", "norm_bias": True}


def _mimo(config: Config) -> Config:
    """MiMo 7B: Qwen 2's layers and prediction modules."""
    return qwen2(config) | {"mtp_layers": config.get("num_nextn_predict_layers")}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "baichuan": _baichuan,
    "bailing_moe": _bailing,
    "chatglm": _chatglm,
    "deepseek": _deepseek,
    "internlm": _internlm,
    "internlm2": Family(llama, only={"bias": (False,)}),
    "mimo": _mimo,
    "minicpm": Family(llama, {"tie_word_embeddings": True}),
    "orion": _orion,
    "qwen": _qwen,
    "xverse": llama,  # vLLM, models/registry.py: XverseForCausalLM
}
