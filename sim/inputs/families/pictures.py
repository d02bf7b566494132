"""Hugging Face's keys of the decoders in models that also have an encoder of images or sound. Only numbers are read.

Their layers are those of a family of text. What differs is where a token's position comes from: three numbers, for
time, height and width, whose frequencies are joined once a step. Configs of Qwen 2-VL and 2.5-VL on the Hub are flat:
the decoder's keys stand beside `vision_config`, under the whole model's `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.deepseek import FAMILIES as LIKE_DEEPSEEK
from sim.inputs.families.dense import FAMILIES as DENSE
from sim.inputs.families.dense import (
    Config,
    Family,
    NotExpressibleError,
    llama,
    one_group,
    qwen2,
    qwen3,
    require,
    rope_in_windows_alone,
    window,
)
from sim.inputs.families.experts import FAMILIES as WITH_EXPERTS
from sim.inputs.families.experts import dense_layers, router
from sim.inputs.families.hub import FAMILIES as ON_THE_HUB
from sim.inputs.recorded import decided, renamed


def _qwen2_vl(config: Config) -> Config:
    return qwen2({"max_window_layers": 80} | config)


def _qwen3_vl(config: Config) -> Config:
    return qwen3(config | {"use_sliding_window": False})


def _glm4v(config: Config) -> Config:
    """GLM-4.1V: GLM-4's layers, whose heads share the hidden size and always have biases."""
    own = {"head_dim": config["hidden_size"] // config["num_attention_heads"], "attention_bias": True}
    return DENSE["glm4"](config | own) | {"code": "glm4v"}


def _glm_ocr(config: Config) -> Config:
    """GLM-OCR: GLM-4's layers without biases."""
    return DENSE["glm4"]({"head_dim": None} | config | {"attention_bias": False}) | {"qkv_bias": None, "code": "glm4v"}


def _glm4v_moe(config: Config) -> Config:
    """GLM-4.5V: GLM-4.5's layers, with biases of query, key and value."""
    require(config, "use_qk_norm", (False, None))
    return WITH_EXPERTS["glm4_moe"]({"attention_bias": True} | config)


def _mistral4(config: Config) -> Config:
    """Mistral Small 4: DeepSeek V2's layers, whose router computes in 16 bits."""
    require(config, "attention_bias", (False, None))
    one_group(config)
    found = LIKE_DEEPSEEK["deepseek_v2"]({"q_lora_rank": 1024, "n_shared_experts": 1} | config | {"n_group": 1})
    return found | {"moe": found["moe"] | {"router_fp32": False}, "code": "mistral4"}


def _molmo2(config: Config) -> Config:
    """Molmo 2: Qwen 3's layers, or with norms over all heads and behind attention and MLP as OLMo's
    (transformers/models/molmo2/modeling_molmo2.py: Molmo2Attention, Molmo2DecoderLayer)."""
    require(config, "qk_norm_type", ("qwen3", "olmo", None))
    bias = bool(config.get("attention_bias", config.get("qkv_bias")))  # of queries, keys and values
    found = qwen3(config | {"use_sliding_window": False, "attention_bias": False}) | {"qkv_bias": bias}
    over = "all_heads" if config.get("qk_norm_type") == "olmo" else "head"
    rows = config.get("additional_vocab_size", 128)
    return found | {
        "qk_norm_over": over,
        "norm_position": "post" if config.get("norm_after") else "pre",
        "left_out": [f"embeddings of {rows} additional tokens"] if rows else [],
    }


def _deepseek_ocr(config: Config) -> Config:
    """DeepSeek OCR 2 and Unlimited OCR: DeepSeek MoE's layers with DeepSeek V2's router. The latter's windows hide
    nothing of the prompt, whose length a config does not say."""
    require(config, "topk_method", ("greedy", None))
    decided(config, "n_group", "topk_group", "sliding_window")
    found = ON_THE_HUB["deepseek"]({"n_shared_experts": 2, "first_k_dense_replace": 1} | config)
    found |= {"moe": found["moe"] | {"router_fp32": True}, "code": "deepseek_ocr2"}
    windows = "reference_sliding_attention" in (config.get("layer_types") or ())
    return found | ({"left_out": ["windows of tokens behind the prompt"]} if windows else {})


def _aria(config: Config) -> Config:
    """Aria: Llama's attention, experts beside shared ones of their size."""
    require(config, "mlp_bias", (False, None))  # routed experts have none
    moe = router(config, "moe_num_experts", "intermediate_size", "moe_topk")
    shared = {"shared_experts": config.get("moe_num_shared_experts", 2)}
    return llama(config) | {"moe": moe | shared, "code": "aria"}


def _ernie4_5_vl_moe(config: Config) -> Config:
    """ERNIE 4.5 VL: ERNIE 4.5's experts for tokens of text, beside as many of another size for those of pictures."""
    sizes = config.get("moe_intermediate_size") or [1536, 512]
    moe = {"moe_intermediate_size": sizes[0] if isinstance(sizes, list) else sizes}
    if config.get("mlp_layer_types") is not None:
        moe["moe_layer_start_index"] = dense_layers(config)
    found = WITH_EXPERTS["ernie4_5_moe"](config | moe)
    return found | {"left_out": ["the experts of pictures' tokens"]}


def _muse_glimmer(config: Config) -> Config:
    """Muse Glimmer: gated attention in windows with rope, each fourth layer (counted from the last one) all tokens
    without it; norms on both sides, those of queries and keys without weights."""
    require(config, "attention_bias", (False, None))
    act = config.get("hidden_activation") or "silu"
    whole: Config = {"head_dim": 128, "sliding_window": 2048} | config | {"hidden_act": act}
    if whole.get("layer_types") is None:
        last = config["num_hidden_layers"] - 1
        kinds = ["sliding_attention" if (last - i) % 4 else "full_attention" for i in range(last + 1)]
        whole["layer_types"] = kinds
    ropes, kinds = config.get("layer_rope_theta"), whole["layer_types"]
    if ropes is not None and [bool(theta) for theta in ropes] != [kind != "full_attention" for kind in kinds]:
        raise NotExpressibleError("layer_rope_theta: can be simulated: 0 in layers of full_attention alone")
    own = {"norm_position": "both", "attention_gate": True, "qk_norm": "l2", "norm_in_fp32": True}
    caps = {
        "logit_softcap": config.get("final_logit_softcapping", 20.0),
        "left_out": _MUSE_LEFT_OUT,
        "code": "muse_glimmer",
    }
    return rope_in_windows_alone(whole, llama(whole) | own | caps, 4)


_MUSE_LEFT_OUT = ["the embedding's norm without weights", "norms of queries and keys without rope"]


def _step3p5(config: Config) -> Config:
    """Step 3.5 and 3.7: a gate on attention's heads, windows with more query heads than the other layers, experts with
    sigmoid routers beside a shared one. Step 3.5's config on the Hub has names of its own."""
    layers = config["num_hidden_layers"]
    require(config, "attention_bias", (False, None))  # the gates have none
    require(config, "mlp_bias", (False, None))  # routed experts have none
    decided(config, "n_shared_experts")  # share_expert_dim is of all of them
    names = {"moe_num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
    names |= {"moe_top_k": "num_experts_per_tok", "num_attention_groups": "num_key_value_heads"}
    names |= {"share_expert_dims": "share_expert_dim", "num_experts": "n_routed_experts"}
    whole = {"head_dim": 128} | renamed(config, names)
    if (kinds := whole.get("layer_types")) is not None:
        whole["layer_types"] = kinds[:layers]  # prediction modules stand behind
    routed = whole.get("mlp_layer_types")
    if routed is None:
        given = whole.get("moe_layers_enum")
        usual = range(config.get("first_k_dense_replace", 3), layers)
        found_in = {int(i) for i in given.split(",")} if isinstance(given, str) else {*(given or usual)}
        routed = ["sparse" if i in found_in else "dense" for i in range(layers)]
    moe = router(whole, "n_routed_experts") | {
        "shared_ffn": whole.get("share_expert_dim", 1280),
        "dense_layers": dense_layers({"mlp_layer_types": routed[:layers]}),
    }
    own = {"qk_norm": True, "norm_in_fp32": True, "rope_share": 1.0, "attention_gate": "per_head", "code": "step3p7"}
    found = llama(whole) | own | {"moe": moe} | window(whole, "sliding_window", ["full"])
    if any({*(whole.get("swiglu_limits") or []), *(whole.get("swiglu_limits_shared") or [])}):
        found["left_out"] = ["the clamp of some layers' SwiGLU"]
    heads = (whole.get("attention_other_setting") or {}).get("num_attention_heads")
    local, other = whole.get("num_sliding_attention_heads") or heads, whole["num_attention_heads"]
    if local in (None, other) or "sliding" not in found.get("attention_pattern", []):
        return found
    return found | {"heads": local, "full_attention": {"heads": other}}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _qwen2_vl),
    "molmo2_text": _molmo2,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe_text": Family(WITH_EXPERTS["qwen3_moe"], {"norm_topk_prob": True}),
    "glm4v_text": _glm4v,
    "glm4v_moe_text": _glm4v_moe,
    "glm_ocr_text": _glm_ocr,
    "mistral4": _mistral4,
    "hunyuan_vl_text": Family(DENSE["hunyuan_v1_dense"], {"tie_word_embeddings": True}),
    **dict.fromkeys(("granite4_vision_text", "granite_docling_text"), DENSE["granite"]),
    "qwen2_5_omni_text": _qwen2_vl,
    "qwen3_omni_moe_text": Family(WITH_EXPERTS["qwen3_moe"], {"norm_topk_prob": True}),
    **dict.fromkeys(("deepseek_ocr2_text", "unlimited_ocr_text"), _deepseek_ocr),
    "aria_text": _aria,
    "cosmos3_edge_text": DENSE["arcee"],
    "emu3_text_model": Family(llama, {"attention_dropout": 0.1}),
    "ernie4_5_vl_moe_text": _ernie4_5_vl_moe,
    "hy_v4_vl_text": Family(LIKE_DEEPSEEK["hy_v4"], {"q_lora_rank": 2048, "index_n_heads": 32}),
    "muse_glimmer_text": _muse_glimmer,
    **dict.fromkeys(("phi4_multimodal", "phi4mm"), DENSE["phi3"]),
    **dict.fromkeys(("step3p5", "step3p7"), _step3p5),
    "paddleocr_vl_text": Family(DENSE["ernie4_5"], {"head_dim": 128}, own={"code": None}),  # its rope is Llama's
}
