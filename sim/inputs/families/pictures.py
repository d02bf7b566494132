"""Hugging Face's keys of the decoders in models that also have an encoder of images or sound. Only numbers are read.

Their layers are those of a family of text. What differs is where a token's position comes from: three numbers, for
time, height and width, whose frequencies are joined once a step. Configs of Qwen 2-VL and 2.5-VL on the Hub are flat:
the decoder's keys stand beside `vision_config`, under the whole model's `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.deepseek import FAMILIES as LIKE_DEEPSEEK
from sim.inputs.families.dense import FAMILIES as DENSE
from sim.inputs.families.dense import Config, Family, qwen2, qwen3, require
from sim.inputs.families.experts import FAMILIES as WITH_EXPERTS


def _qwen2_vl(config: Config) -> Config:
    return qwen2({"max_window_layers": 80, **config})


def _qwen3_vl(config: Config) -> Config:
    return qwen3({**config, "use_sliding_window": False})


def _glm4v(config: Config) -> Config:
    """GLM-4.1V: GLM-4's layers, whose heads share the hidden size and always have biases."""
    own = {"head_dim": config["hidden_size"] // config["num_attention_heads"], "attention_bias": True}
    return DENSE["glm4"](config | own)


def _glm_ocr(config: Config) -> Config:
    """GLM-OCR: GLM-4's layers without biases."""
    return DENSE["glm4"]({"head_dim": None, **config, "attention_bias": False}) | {"qkv_bias": None}


def _glm4v_moe(config: Config) -> Config:
    """GLM-4.5V: GLM-4.5's layers, with biases of query, key and value."""
    require(config, "use_qk_norm", (False, None))
    return WITH_EXPERTS["glm4_moe"]({"attention_bias": True, **config})


def _mistral4(config: Config) -> Config:
    """Mistral Small 4: DeepSeek V2's layers, whose router computes in 16 bits."""
    require(config, "attention_bias", (False, None))
    require(config, "n_group", (1, None))
    found = LIKE_DEEPSEEK["deepseek_v2"]({"q_lora_rank": 1024, "n_shared_experts": 1, **config, "n_group": 1})
    return found | {"moe": found["moe"] | {"router_fp32": False}, "code": "mistral4"}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _qwen2_vl),
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe_text": Family(WITH_EXPERTS["qwen3_moe"], {"norm_topk_prob": True}),
    "glm4v_text": _glm4v,
    "glm4v_moe_text": _glm4v_moe,
    "glm_ocr_text": _glm_ocr,
    "mistral4": _mistral4,
    "hunyuan_vl_text": Family(DENSE["hunyuan_v1_dense"], {"tie_word_embeddings": True}),
    "paddleocr_vl_text": Family(DENSE["ernie4_5"], {"head_dim": 128}),
}
