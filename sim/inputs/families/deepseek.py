"""Hugging Face's keys of DeepSeek's models and of those with its architecture. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import (
    Config,
    Family,
    NotExpressibleError,
    latent,
    llama,
    one_group,
    require,
    rope_share,
)
from sim.inputs.families.experts import dense_layers, named_as_deepseek, router
from sim.inputs.recorded import decided


def _deepseek(config: Config) -> Config:
    require(config, "moe_layer_freq", (1, None))
    require(config, "mlp_bias", (False, None))  # routed experts have none
    moe = router(config, "n_routed_experts") | {
        "shared_experts": config.get("n_shared_experts"),
        "dense_layers": dense_layers(config),
        "router_fp32": config.get("moe_router_dtype", "float32") == "float32",
        # routing groups stand on nodes (arXiv 2412.19437, 2.1.2); one group is no limit
        "max_nodes_per_token": None if config.get("n_group") == 1 else config.get("topk_group"),
    }
    if config.get("n_group") == 1:
        decided(config, "topk_group")
    mtp = config.get("num_nextn_predict_layers")
    found = llama(config) | {"kv_heads": None, "head_dim": None, "mla": latent(config), "moe": moe, "mtp_layers": mtp}
    return found | {"code": "deepseek_v3"}


def _deepseek_v2(config: Config) -> Config:
    """DeepSeek V2, whose router takes a softmax."""
    return _deepseek(config) | {"code": "deepseek_v2"}


def _deepseek_v32(config: Config) -> Config:
    """DeepSeek V3.2: latent attention over the keys that an indexer selects."""
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(kind in _INDEXED for kind in types)):
        raise NotExpressibleError(f"layer_types: can be simulated: a list of {' or '.join(_INDEXED)} only")
    index = {
        "heads": config.get("index_n_heads", 64),
        "head_dim": config.get("index_head_dim", 128),
        "top_k": config.get("index_topk", 2048),
    }
    return _deepseek({"first_k_dense_replace": 3} | config) | {"indexer": index}


_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_INDEXERS = {"full": "full", "shared": "reused", "F": "full", "S": "reused"}
_COMPRESSED = {0: "sliding", 4: "compressed_sparse", 128: "compressed"}
_COMPRESSED_TYPES = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "compressed",
}


def _deepseek_v4(config: Config) -> Config:
    """DeepSeek V4: windows and compressed keys, hyper-connections, experts in every layer.

    Layers whose experts a table chooses by the token (`num_hash_layers`) are simulated as those with a router: their
    scores are computed there too.
    """
    require(config, "n_shared_experts", (1, None))  # the code has one, whatever the config says
    require(config, "hc_sinkhorn_iters", (20, None))
    if {*(config.get("mlp_layer_types") or [])} - {"moe", "hash_moe"}:
        raise NotExpressibleError("mlp_layer_types: can be simulated: moe, hash_moe")
    decided(config, "num_hash_layers", "n_group", "topk_group")
    for key in ("attention_bias", "mlp_bias"):
        require(config, key, (False, None))
    layers = config["num_hidden_layers"]
    kinds = _compressed_kinds(config, layers)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128} | (
        config.get("compress_rates") or {}
    )
    head_dim = config.get("head_dim", 512)
    share = rope_share(config, config.get("qk_rope_head_dim", 64) / head_dim)
    moe = router(config, "n_routed_experts") | {"shared_experts": config.get("n_shared_experts", 1)}
    found = llama({"intermediate_size": config["moe_intermediate_size"], "num_key_value_heads": 1} | config) | {
        "head_dim": head_dim,
        "mlp": "limited_swiglu",
        "norm_in_fp32": True,
        "sinks": True,
        "window": config.get("sliding_window", 128),
        "attention_pattern": kinds[:layers],
        "hyper_connections": config.get("hc_mult", 4),
        "moe": moe,
        "mtp_layers": config.get("num_nextn_predict_layers"),
        "code": "deepseek_v4",
    }
    found["compressed_attention"] = {
        "q_lora_rank": config.get("q_lora_rank", 1024),
        "rope_head_dim": round(head_dim * share),
        "output_groups": config.get("o_groups", 8),
        "output_rank": config.get("o_lora_rank", 1024),
        "rate": config.get("compress_rate_hca", rates["heavily_compressed_attention"]),
        "sparse_rate": config.get("compress_rate_csa", rates["compressed_sparse_attention"]),
    }
    if "compressed_sparse" in found["attention_pattern"]:
        sizes = (("heads", "index_n_heads", 64), ("head_dim", "index_head_dim", 128), ("top_k", "index_topk", 512))
        found["indexer"] = {key: config.get(name, default) for key, name, default in sizes}
    return found


def _compressed_kinds(config: Config, layers: int) -> list[str]:
    """Kinds of layers by `layer_types`, by `compress_ratios`, or as `DeepseekV4Config` makes them: two compressed, then
    compressed and compressed_sparse in turn."""
    types, ratios = config.get("layer_types"), config.get("compress_ratios")
    for key, given, known in (("layer_types", types, _COMPRESSED_TYPES), ("compress_ratios", ratios, _COMPRESSED)):
        if given is None:
            continue
        if not isinstance(given, list) or len(given) < layers or not {*given} <= {*known}:
            raise NotExpressibleError(f"{key}: can be simulated: a list for all layers of {[*known]}")
        return [known[one] for one in given]
    return [*["compressed"] * 2, *["compressed", "compressed_sparse"] * layers]


def _glm_moe_dsa(config: Config) -> Config:
    """GLM-5: DeepSeek V3.2's layers, of which some may attend to what an earlier one's indexer selected."""
    found = _deepseek_v32({"index_n_heads": 32, "n_group": 1} | config)
    for key in ("indexer_types", "index_topk_pattern"):
        if (kinds := config.get(key)) is not None:
            decided(config, "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
            pattern = _indexers(key, kinds, config["num_hidden_layers"])
            # a prediction module's place among layers that use an earlier one's keys is not simulated
            return found | {"attention_pattern": pattern} | ({"mtp_layers": 0} if "reused" in pattern else {})
    require(config, "index_topk_freq", (1, None))
    return found


def _indexers(key: str, kinds: object, layers: int) -> list[str]:
    """Kinds of layers by whether they have an indexer of their own."""
    if not isinstance(kinds, list | str) or len(kinds) < layers or not {*kinds} <= {*_INDEXERS}:
        raise NotExpressibleError(f"{key}: can be simulated: one of {', '.join(_INDEXERS)} for each layer")
    return [_INDEXERS[kind] for kind in kinds[:layers]]


def _hy_v4(config: Config) -> Config:
    """Hunyuan 4: DeepSeek V3.2's attention with a gate and sinks, in most layers over the keys that an earlier layer's
    indexer selected; independent residual streams; routed experts with clamped SwiGLU."""
    for key in ("attention_bias", "mlp_bias"):
        require(config, key, (False, None))
    one_group(config)
    layers, kinds = config["num_hidden_layers"], config.get("indexer_types")
    if kinds is None:
        kinds = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
    own = {"index_n_heads": 16, "index_head_dim": 128, "first_k_dense_replace": 1, "n_shared_experts": 1}
    found = _deepseek_v32(own | config | {"n_group": 1, "num_nextn_predict_layers": 0})
    limit = config.get("swiglu_limit", 10.0)
    return found | {
        "attention_pattern": _indexers("indexer_types", kinds, layers),
        "attention_gate": True,
        "sinks": True,
        "hyper_connections": config.get("hc_mult", 4),
        "hyper_connection_kind": "independent",
        "moe": found["moe"] | ({"activation": "limited_swiglu"} if limit > 0 else {}),
        "code": "hy_v4",
        "left_out": ["the output matrix in fp32"],
    }


def _axk1(config: Config) -> Config:
    """A.X K1: DeepSeek V3's layers, and a norm of what experts give together (axk1/modeling_axk1.py: AXK1MoE)."""
    return _deepseek({"first_k_dense_replace": 1} | config) | {"norm_position": "behind_experts"}


def _axk2(config: Config) -> Config:
    """A.X K2: DeepSeek V3.2's layers, whose queries' latents give gates as well, with gates of low rank behind the
    norms before attention and before experts."""
    require(config, "attention_bias", (False, None))
    own = {"index_n_heads": 16, "index_head_dim": 128, "first_k_dense_replace": 1, "n_shared_experts": 1}
    groups = {"n_group": config.get("n_group") or 1}
    found = _deepseek_v32(own | config | groups | {"num_nextn_predict_layers": 0})
    return found | {"attention_gate": "latent", "norm_gate_rank": config.get("gated_norm_rank", 16)}


def _longcat_flash(config: Config) -> Config:
    """LongCat-Flash (arXiv 2509.01322): a layer of its config is two layers here, each with latent attention and a
    dense MLP. The first one's MLP runs beside routed experts, as a shared expert would.

    The report adds the experts' result behind the second MLP, so that their messages run beside the second layer
    (section 2.2).
    """
    require(config, "attention_bias", (False, None))
    require(config, "zero_expert_type", ("identity", None))
    layers = 2 * config["num_layers"] if "num_layers" in config else config["num_hidden_layers"]
    ffn = config["ffn_hidden_size" if "ffn_hidden_size" in config else "intermediate_size"]
    whole = config | {"num_hidden_layers": layers, "intermediate_size": ffn}
    moe = router(config, "n_routed_experts", "expert_ffn_hidden_size", "moe_topk") | {
        "shared_ffn": ffn,
        "zero_experts": config.get("zero_expert_num") or 0,
        "router_bias": config.get("router_bias", False),
        "router_fp32": True,
    }
    return llama(whole) | {
        "kv_heads": None,
        "head_dim": None,
        "mla": latent(config),
        "moe": moe,
        "mlp_pattern": ["experts", "dense"],
        "code": "longcat_flash",
        "left_out": ["experts' messages beside the next layer", "the factors on queries and latents"],
    }


def _sarvam_mla(config: Config) -> Config:
    """Sarvam 105B: DeepSeek V3's layers."""
    one_group(config)
    return _deepseek(named_as_deepseek({"first_k_dense_replace": 1, "n_group": 1} | config))


# What their configuration_*.py in Transformers has where a config.json leaves a key out.
_V3 = {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
_LITE = {"q_lora_rank": 768, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}  # GLM-4.7-Flash
FAMILIES: dict[str, Callable[[Config], Config]] = {
    "deepseek_v2": Family(_deepseek_v2, {"q_lora_rank": 1536, "n_shared_experts": 2}),
    "deepseek_v3": Family(_deepseek, _V3),
    "deepseek_v32": Family(_deepseek_v32, _V3),
    "deepseek_v4": _deepseek_v4,
    "kimi_k2": Family(_deepseek, _V3),
    "glm4_moe_lite": Family(_deepseek, _LITE),
    "glm_moe_dsa": Family(_glm_moe_dsa, {"q_lora_rank": 2048, "n_shared_experts": 1}),
    "hy_v4": Family(_hy_v4, {"q_lora_rank": 1536}),
    "axk1": Family(_axk1, {"q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}),
    "axk2": Family(_axk2, {"q_lora_rank": 384}),
    "longcat_flash": Family(_longcat_flash, {"q_lora_rank": 1536, "zero_expert_num": 256}),
    "sarvam_mla": Family(_sarvam_mla, {"n_shared_experts": 1}),
}
