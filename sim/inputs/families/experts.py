"""Hugging Face's keys of families with experts, as a scenario's `model`. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import (
    Config,
    Family,
    NotExpressibleError,
    cohere,
    drops,
    ernie,
    exaone_windows,
    hunyuan,
    llama,
    no_rope_step,
    one_group,
    qwen2,
    qwen3,
    qwen_window,
    require,
    rope_in_windows_alone,
    rope_share,
    window,
)
from sim.inputs.input_source import show
from sim.inputs.recorded import decided, renamed


def router(
    config: Config, experts: str, ffn: str = "moe_intermediate_size", top_k: str = "num_experts_per_tok"
) -> Config:
    """Routed experts; `experts`, `ffn` and `top_k`: the keys of their sizes."""
    return {"experts": config[experts], "top_k": config[top_k], "ffn": config[ffn]}


def casting_router(config: Config, normalizes: bool) -> str:
    """Whose code routes as Qwen 2's experts do: `norm_topk_prob` (by default as given) divides the chosen weights."""
    return "qwen2_moe" if config.get("norm_topk_prob", normalizes) else "olmoe"


def _experts_key(config: Config) -> str:
    """Where the number of experts stands: Transformers 5 writes `num_local_experts` for some families."""
    return "num_experts" if "num_experts" in config else "num_local_experts"


def every(config: Config, key: str) -> int:
    """Experts in every n-th layer; lists of other layers are refused."""
    require(config, "mlp_only_layers", ([], None))
    return int(config.get(key, 1))


def _granite_moe(config: Config) -> Config:
    return _mixtral(config) | {"code": "granite"}


def _granite_shared(config: Config) -> Config:
    """Granite's experts beside an MLP for all tokens."""
    found = _granite_moe(config)
    shared = config.get("shared_intermediate_size") or None
    return found | {"moe": found["moe"] | ({"shared_ffn": shared} if shared else {})}


def _mixtral(config: Config) -> Config:
    return llama(config) | {"moe": router(config, "num_local_experts", "intermediate_size")}


def _minimax_m2(config: Config) -> Config:
    require(config, "shared_intermediate_size", (0, None))
    require(config, "qk_norm_type", ("per_layer", None))
    if signs := [sign for sign in config.get("attn_type_list") or [] if sign != 1]:  # 0: lightning attention
        raise NotExpressibleError(f"attn_type_list: found {show(signs[0])}; can be simulated: 1 in every layer")
    found = _mixtral({"head_dim": 128} | config)
    share = rope_share(config, 1.0)
    share = config["rotary_dim"] / found["head_dim"] if "rotary_dim" in config else share
    own = {"qk_norm": config.get("use_qk_norm", True), "qk_norm_over": "all_heads", "rope_share": share}
    return found | own | {"code": "minimax_m2"}


def qwen2_moe(config: Config) -> Config:
    """Qwen 2 with experts; windows in every second of the first `max_window_layers`
    (qwen2_moe/configuration_qwen2_moe.py: Qwen2MoeConfig.__post_init__)."""
    first = config.get("max_window_layers", 28)
    kinds = ["full" if i % 2 or i >= first else "sliding" for i in range(config["num_hidden_layers"])]
    shared = {"shared_ffn": config["shared_expert_intermediate_size"], "shared_gate": True}
    moe = router(config, _experts_key(config)) | shared | {"every": every(config, "decoder_sparse_step")}
    found = qwen2(config | {"use_sliding_window": False}) | qwen_window(config, kinds)
    return found | {"qkv_bias": config.get("qkv_bias", True), "moe": moe, "code": casting_router(config, False)}


def _qwen3_moe(config: Config) -> Config:
    """Qwen 3 with experts; windows in all layers or none (qwen3_moe/modeling_qwen3_moe.py: Qwen3MoeModel.forward)."""
    for key, allowed in (("qkv_bias", (False, None)), ("shared_expert_intermediate_size", (0, None))):
        require(config, key, allowed)
    windows = qwen_window(config | {"layer_types": None}, ["sliding"])
    decided(config, "layer_types", "max_window_layers")
    moe = router(config, _experts_key(config)) | {"every": every(config, "decoder_sparse_step")}
    found = qwen3(config | {"use_sliding_window": False}, head_dim=None) | windows
    return found | {"moe": moe, "code": casting_router(config, False)}


def _gpt_oss(config: Config) -> Config:
    """Biases in attention, experts and router; a sink for each query head."""
    plain = {"head_dim": 64, "attention_bias": True, "sliding_window": 128} | config
    require(plain, "attention_bias", (True,))
    moe = router(plain, "num_local_experts", "intermediate_size") | {"router_bias": True}
    require(config, "experts_per_token", (moe["top_k"], None))  # its first config has both names
    found = llama(plain | {"attention_bias": False}) | {"bias": True, "sinks": True, "moe": moe}
    found |= {"mlp": "clamped_swiglu", "norm_in_fp32": True, "scaled_rope": True}
    found |= {"code": "gpt_oss"}
    return found | window(plain, "sliding_window", ["sliding", "full"])


def _glm4_moe(config: Config) -> Config:
    one_group(config)
    shared, dense = config.get("n_shared_experts", 1), config.get("first_k_dense_replace", 1)
    moe = router(config, "n_routed_experts") | {"shared_experts": shared, "dense_layers": dense, "router_fp32": True}
    found = llama(config | {"attention_bias": False}) | {"moe": moe}
    found |= {"qkv_bias": config.get("attention_bias", False), "qk_norm": config.get("use_qk_norm", False)}
    found |= {"rope_share": rope_share(config, 0.5)}
    return found | {"mtp_layers": config.get("num_nextn_predict_layers"), "code": "deepseek_v3"}


def _exaone_moe(config: Config) -> Config:
    """K-EXAONE: EXAONE 4's attention, norms before attention and MLP, DeepSeek's experts."""
    one_group(config)
    whole = {"sliding_window": 4096} | config
    moe = router(config, "num_experts") | {"shared_experts": config.get("num_shared_experts", 1), "router_fp32": True}
    moe |= {"dense_layers": dense_layers({"first_k_dense_replace": 1} | config)}
    return exaone_windows(whole, llama(whole) | {"qk_norm": True, "moe": moe, "code": "deepseek_v3"})


def _afmoe(config: Config) -> Config:
    """Trinity (Arcee): windows with rope, gated attention, norms on both sides, DeepSeek's experts."""
    require(config, "attention_bias", (False, None))  # the gates have none
    whole = {"head_dim": 128, "sliding_window": 1024} | config
    step = config.get("global_attn_every_n_layers", 4)
    moe = router(config, "num_experts") | {"shared_experts": config.get("num_shared_experts", 2)}
    moe |= {"dense_layers": config.get("num_dense_layers", 1)}
    own = {"qk_norm": True, "attention_gate": True, "norm_position": "both", "norm_in_fp32": True, "moe": moe}
    return rope_in_windows_alone(whole, llama(whole) | own | {"code": "afmoe"}, step)


def _hy_v3(config: Config) -> Config:
    """Hunyuan 3: Qwen 3's attention, a shared expert beside the routed ones, first layers dense."""
    require(config, "mlp_bias", (False, None))  # routed experts have none
    moe = router(config, "num_experts") | {"shared_experts": config.get("num_shared_experts", 1), "router_fp32": True}
    moe |= {"dense_layers": dense_layers({"first_k_dense_replace": 1} | config)}
    code = "hy_v3" if config.get("enable_moe_fp32_combine", True) else "hy_v3_narrow"
    return qwen3(config) | {"moe": moe, "code": code}


def _mellum(config: Config) -> Config:
    """Mellum 2: Qwen 3's experts, windows in the layers that `layer_types` names."""
    require(config, "num_nextn_predict_layers", (None, 0))
    kinds = config.get("mlp_layer_types") or ["sparse"]
    require({"mlp_layer_types": sorted({*kinds})}, "mlp_layer_types", (["sparse"],))
    experts = {"moe": router(config, _experts_key(config)), "code": casting_router(config, True)}
    found = llama({"head_dim": 128} | config) | {"qk_norm": True} | experts
    return found | window({"sliding_window": 1024} | config, "sliding_window", ["full"])


def _phimoe(config: Config) -> Config:
    """Phi 3.5 MoE: Mixtral's layers with layer norms, and biases where the config asks for them."""
    own = {"norm": "layernorm", "norm_bias": True, "head_bias": config.get("lm_head_bias", False)}
    return _mixtral(config) | own | {"code": "phimoe"}


def _dbrx(config: Config) -> Config:
    """DBRX: layer norms without biases, 16 experts of which 4 are chosen."""
    attention, ffn = config["attn_config"], config["ffn_config"]
    require(ffn.get("ffn_act_fn") or {}, "name", ("silu", None))
    decided(ffn, "hidden_size")
    decided(config, "num_key_value_heads")  # attention's own decides
    return {
        "layers": config["n_layers"],
        "hidden": config["d_model"],
        "heads": config["n_heads"],
        "kv_heads": attention.get("kv_n_heads"),
        "vocab": config["vocab_size"],
        "mlp": "swiglu",
        "bias": False,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        **drops(config.get("resid_pdrop"), attention.get("attn_pdrop")),
        "positions": "rope",
        "trained_positions": config.get("max_seq_len"),
        "moe": router(ffn, "moe_num_experts", "ffn_hidden_size", "moe_top_k"),
        "code": "dbrx",
    }


def _kolibri1(config: Config) -> Config:
    """Kolibri 1: norms on both sides, windows with rope, each fifth layer all tokens without it, a shared expert."""
    moe = router(config, _experts_key(config)) | {
        "shared_ffn": config["shared_expert_intermediate_size"],
        "router_fp32": True,
    }
    whole = {"head_dim": 128, "sliding_window": 513, "intermediate_size": config["moe_intermediate_size"]} | config
    own = {"qk_norm": True, "norm_position": "both", "moe": moe}
    return rope_in_windows_alone(whole, llama(whole) | own, 5)


def _cohere2_moe(config: Config) -> Config:
    """Command A's successors with experts: Command R7B's attention beside routed and shared experts."""
    require(config, "prefix_dense_sliding_window_pattern", (1,))
    step = config.get("sliding_window_pattern") or 4
    moe = router(config, _experts_key(config), "intermediate_size") | {
        "shared_experts": config.get("num_shared_experts", 0),
        "dense_layers": dense_layers(config),
    }
    dense = config.get("prefix_dense_intermediate_size") or config["intermediate_size"]
    whole = {"head_dim": 128, "sliding_window": 4096} | config | {"intermediate_size": dense}
    norm = {} if config.get("rms_norm_eps") is None else {"norm": "rmsnorm", "norm_in_fp32": False}
    sigmoid = config.get("expert_selection_fn", "softmax") == "sigmoid"
    summed = config.get("shared_expert_combination_strategy", "average") == "sum"
    code = "cohere2_moe" + sigmoid * "_sigmoid" + summed * "_sum"
    return rope_in_windows_alone(whole, cohere(whole) | norm | {"moe": moe, "code": code}, step)


def _mimo_v2_flash(config: Config) -> Config:
    """MiMo V2 Flash: twice the key and value heads, and sinks, in layers with windows; values narrower than keys."""
    one_group(config)
    require(config, "n_shared_experts", (None, 0))
    require(config, "add_swa_attention_sink_bias", (True, None))
    require(config, "add_full_attention_sink_bias", (False, None))
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        require(config, f"swa_{key}", (config.get(key), None))
    count, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    types = config.get("layer_types")
    if types is None:  # its first config has 1 for a layer with a window
        signs = config.get("hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 != 0 for i in range(count)]
        types = ["sliding_attention" if sign else "full_attention" for sign in signs]
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        routed = config.get("moe_layer_freq") or [False] + [True] * (count - 1)
        kinds = ["sparse" if here else "dense" for here in routed]
    whole: Config = {"head_dim": 192, "sliding_window": 129} | config | {"layer_types": types, "mlp_layer_types": kinds}
    if (before := config.get("sliding_window_size")) is not None:
        decided(config, "sliding_window")
        whole["sliding_window"] = before + 1
    moe = router(config, "n_routed_experts") | {"dense_layers": dense_layers(whole), "router_fp32": True}
    of_windows = config.get("swa_num_key_value_heads", 2 * kv_heads)
    found = llama(whole | {"num_key_value_heads": of_windows, "attention_bias": False}) | {"moe": moe}
    width: int = config.get("head_dim", 192)
    share = round(rope_share(config, 1 / 3) * width) / width
    found |= {"v_head_dim": config.get("v_head_dim", 128), "sinks": True, "rope_share": share, "code": "mimo_v2_flash"}
    decided(config, "attention_chunk_size", "swa_head_dim", "swa_v_head_dim", "swa_num_attention_heads")
    found |= {"qkv_bias": config.get("attention_bias", False), "left_out": ["the factor on values"]}
    found |= {"full_attention": {"kv_heads": kv_heads, "sinks": False}}
    return found | window(whole, "sliding_window", [])


def _llama4(config: Config) -> Config:
    """Chunks where a layer has rope, all tokens where it has none; one shared expert beside the routed ones."""
    sparse = config.get("moe_layers")
    each = every(config, "interleave_moe_layer_step")
    if sparse is not None and list(sparse) != list(range(each - 1, config["num_hidden_layers"], each)):
        raise NotExpressibleError(f"moe_layers: can be simulated: each {each}-th layer")
    step = config.get("no_rope_layer_interval", 4)
    moe = router(config, "num_local_experts", "intermediate_size") | {"shared_experts": 1, "every": each}
    found = llama(config | {"intermediate_size": config["intermediate_size_mlp"]}) | {"moe": moe, "code": "llama4"}
    found |= {"qk_norm": "l2" if config.get("use_qk_norm", True) else False}
    pattern = ["chunked"] * (step - 1) + ["full"]
    chunks = window({"attention_chunk_size": 8192} | config, "attention_chunk_size", pattern)
    return found | {"no_rope_every": no_rope_step(step, config.get("no_rope_layers"))} | chunks


def dense_layers(config: Config) -> int | None:
    """Layers before the first with experts; `mlp_layer_types` stands in place of the number in later configs."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return config.get("first_k_dense_replace")
    decided(config, "first_k_dense_replace")
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise NotExpressibleError("mlp_layer_types: can be simulated: a list of dense layers, then sparse ones")
    return dense


def _dots1(config: Config) -> Config:
    """dots.llm1: Qwen 3's attention, DeepSeek's experts."""
    one_group(config)
    moe = router(config, "n_routed_experts") | {"shared_experts": config.get("n_shared_experts"), "router_fp32": True}
    whole = [*["full"] * config.get("max_window_layers", 62), *["sliding"] * config["num_hidden_layers"]]
    moe |= {"dense_layers": dense_layers(config)}
    found = llama(config) | {"qk_norm": True, "moe": moe, "code": "deepseek_v3"}
    return found | window(config, "sliding_window", whole[: config["num_hidden_layers"]])


def _solar_open(config: Config) -> Config:
    """Solar Open: GLM-4.5's experts in every layer, Llama's attention."""
    require(config, "attention_bias", (False, None))
    if rope_share(config, 1.0) != 1.0:
        raise NotExpressibleError("partial_rotary_factor: only 1.0 can be simulated")
    plain = {"first_k_dense_replace": 0, "intermediate_size": config["moe_intermediate_size"], "head_dim": 128} | config
    return _glm4_moe(plain) | {"qk_norm": False, "qkv_bias": False, "rope_share": None}


def _ernie_moe(config: Config) -> Config:
    """ERNIE 4.5 with experts from layer `moe_layer_start_index` on."""
    last = config["num_hidden_layers"] - 1
    require(config, "moe_layer_end_index", (-1, last, None))
    moe = router(config, "moe_num_experts", top_k="moe_k") | {
        "shared_experts": config.get("moe_num_shared_experts", 2),
        "dense_layers": config.get("moe_layer_start_index", 1),
        "every": config.get("moe_layer_interval", 1),
        "router_fp32": True,
    }
    return ernie(config) | {"moe": moe, "code": "ernie4_5_moe"}


def _hunyuan_moe(config: Config) -> Config:
    """Hunyuan-A13B: a shared expert of the routed ones' size."""
    for key in ("num_experts", "moe_topk"):
        if isinstance(config[key], list) and len({*config[key]}) > 1:
            raise NotExpressibleError(f"{key}: can be simulated: one number for all layers")
    sizes = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    plain = config | {key: each[0] for key in sizes if isinstance(each := config.get(key), list) and each}
    require(plain, "moe_intermediate_size", (plain["intermediate_size"], None))
    require(plain, "num_shared_expert", (1, None))
    require(plain, "moe_layer_num_skipped", (0, None))
    moe = router(plain, "num_experts", "intermediate_size", "moe_topk") | {"shared_experts": 1, "router_fp32": True}
    return hunyuan(plain) | {"moe": moe, "code": "hunyuan_v1_moe"}


def _olmoe(config: Config) -> Config:
    require(config, "clip_qkv", (None,))
    moe = router(config, _experts_key(config), "intermediate_size")
    own = {"qk_norm": True, "qk_norm_over": "all_heads", "code": casting_router(config, False)}
    return llama(config) | own | {"moe": moe}


def _sarvam_moe(config: Config) -> Config:
    """Sarvam 30B: GLM-4.5's layers with rope over whole heads, which its code still joins to an empty rest."""
    own = {"qk_norm": config.get("use_qk_norm", True), "rope_share": rope_share(config, 1.0)}
    return _glm4_moe(named_as_deepseek(config)) | own


def named_as_deepseek(config: Config) -> Config:
    """The config under the names of Transformers; the first ones on the Hub have others."""
    names = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    return renamed(config, names)


def _laguna(config: Config) -> Config:
    """Laguna (Poolside): a gate on attention's heads, layers without a window with another number of them, experts
    beside a shared one."""
    require(config, "gating", (True, "per-head"))  # per element it is a softplus in fp32
    require(config, "moe_apply_router_weight_on_input", (False, None))
    require(config, "attention_bias", (False, None))  # the gates have none
    moe = router(config, "num_experts") | {
        "shared_ffn": config["shared_expert_intermediate_size"],
        "dense_layers": dense_layers({"first_k_dense_replace": 1} | config),
    }
    whole = {"head_dim": 128, "sliding_window": 512} | config
    found = llama(whole) | {"moe": moe, "qk_norm": True, "rope_share": 1.0, "attention_gate": "per_head"}
    found |= window(whole, "sliding_window", ["full"]) | {"code": "laguna"}
    return found | _laguna_heads(config, found)


def _laguna_heads(config: Config, found: Config) -> Config:
    """The query heads of layers with windows, and of those without."""
    each = config.get("num_attention_heads_per_layer")
    if each is None:
        return {}
    kinds = found.get("attention_pattern", ["full"])
    heads = {kind: {n for i, n in enumerate(each) if kinds[i % len(kinds)] == kind} for kind in {*kinds}}
    if any(len(numbers) != 1 for numbers in heads.values()):
        raise NotExpressibleError("num_attention_heads_per_layer: can be simulated: one number for each of layer_types")
    whole, local = (next(iter(heads.get(kind, {None}))) for kind in ("full", "sliding"))
    if local is None or whole in (None, local):
        return {"heads": local or whole}
    return {"heads": local, "full_attention": {"heads": whole}}


_ONE_FULL_IN_FOUR = ("full", *("sliding",) * 3)
FAMILIES: dict[str, Callable[[Config], Config]] = {
    "mixtral": Family(_mixtral, pattern=("sliding",)),
    "minimax_m2": Family(_minimax_m2, pattern=("sliding",)),
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "solar_open": _solar_open,
    "llama4_text": Family(_llama4, {"head_dim": 128}),
    "dots1": _dots1,
    "ernie4_5_moe": _ernie_moe,
    "hunyuan_v1_moe": _hunyuan_moe,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_shared,
    "granitemoe_swa": Family(
        _granite_shared,
        {"sliding_window": 128},
        own={"sinks": True, "code": "granite_swa"},
        pattern=_ONE_FULL_IN_FOUR,
    ),
    "olmoe": _olmoe,
    "flex_olmo": Family(_olmoe, own={"norm_position": "post", "norm_in_fp32": True, "code": "flex_olmo"}),
    "phimoe": Family(_phimoe, pattern=("sliding",)),
    "dbrx": _dbrx,
    "exaone_moe": _exaone_moe,
    "afmoe": _afmoe,
    "hy_v3": _hy_v3,
    "kolibri1": _kolibri1,
    "mimo_v2": _mimo_v2_flash,  # V2.5 and V2.5 Pro, whose model card names the backbone; its code is on the Hub
    "mimo_v2_flash": _mimo_v2_flash,
    "cohere2_moe": _cohere2_moe,
    "mellum": _mellum,
    "laguna": _laguna,
    "sarvam_moe": _sarvam_moe,
}
