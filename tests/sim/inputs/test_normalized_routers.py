"""`norm_topk_prob` of Hugging Face configs: whether a token's chosen weights are divided by their sum."""

from __future__ import annotations

import pytest

from sim.inputs.huggingface import model_of_config

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("family", "said", "code"),
    [
        ("olmoe", False, "olmoe"),
        ("olmoe", True, "qwen2_moe"),
        ("olmoe", None, "olmoe"),
        ("qwen3_moe", False, "olmoe"),
        ("qwen3_moe", True, "qwen2_moe"),
        ("mellum", None, "qwen2_moe"),
        ("qwen3_vl_moe_text", None, "qwen2_moe"),
    ],
)
def test_whether_chosen_weights_are_divided_by_their_sum(family: str, said: bool | None, code: str) -> None:
    """Defaults are those of Transformers' config classes; Qwen 3 VL's router always divides."""
    config = SIZES | {"model_type": family} | ({} if said is None else {"norm_topk_prob": said})
    assert model_of_config(config, "config.json")["code"] == code
