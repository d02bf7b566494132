"""Published checkpoints: bytes of their weights on the GPUs of who served them, and which architecture a name means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.huggingface import model_of_config
from sim.inputs.model_config import ModelConfig
from sim.inputs.scenario import parse_scenario
from sim.models.parameters import count_parameters
from sim.serve.simulation import simulate_serving

KIMI_K2: dict[str, Any] = {"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "v_head_dim": 128}
KIMI_K2 |= {"num_hidden_layers": 61, "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512}
KIMI_K2 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "vocab_size": 163840, "max_position_embeddings": 262144}
KIMI_K2 |= {"n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
KIMI_K2 |= {"first_k_dense_replace": 1, "n_group": 1, "tie_word_embeddings": False}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}},
    },
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
LLAMA_405B: dict[str, Any] = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248}
LLAMA_405B |= {"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_405B |= {"max_position_embeddings": 131072, "tie_word_embeddings": False}
OF_META = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{i}.self_attn.{name}_proj" for i in range(126) for name in "qkvo"),
        *(f"model.layers.{i}.mlp.{name}_proj" for i in (0, 125) for name in ("gate", "up", "down")),
    ],
}


@pytest.mark.parametrize(
    ("config", "cluster", "gib"),
    [
        # "Loading model weights took 57.7520 GB" (vllm-project/vllm, issue 6746)
        (LLAMA_405B | {"quantization_config": OF_META}, "dgx-h100", 57.75),
        # 72 GiB of each of 8 GPUs, measured; the checkpoint has 595 GB
        (
            {"model_type": "kimi_k25", "vision_config": {}, "text_config": KIMI_K2 | {"quantization_config": INT4}},
            "dgx-h200",
            72.0,
        ),
    ],
)
def test_weights_of_a_gpu_are_those_that_were_measured(
    tmp_path: Path, config: dict[str, Any], cluster: str, gib: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = {"engine": "vllm-v1", "requests": {"prompt_len": 64, "output_len": 2, "count": 1}}
    data = {"model": str(tmp_path), "cluster": cluster, "parallelism": {"tp": 8}, "inference": served}
    capacity = simulate_serving(parse_scenario(data)).capacity
    assert max(capacity.weight_bytes) / 2**30 == pytest.approx(gib, rel=0.02)


LING: dict[str, Any] = {"model_type": "bailing_hybrid", "hidden_size": 4096, "intermediate_size": 9216}
LING |= {"num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 157184, "n_group": 8}
LING |= {"layer_group_size": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "topk_group": 4}
LING |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8}
LING |= {"num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1}
LING |= {"max_position_embeddings": 131072}
LING_2 = {"architectures": ["BailingMoeV2_5ForCausalLM"]}


def model(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**model_of_config(config, "config.json"))


@pytest.mark.parametrize(
    ("own", "kind", "gate"),
    [
        (LING_2, "lightning", False),
        ({"group_norm_size": 4}, "lightning", False),
        ({"architectures": ["BailingMoeV3ForCausalLM"]}, "kda_whole", "per_head"),
        ({"short_conv_kernel_size": 4, "kda_safe_gate": True}, "kda_whole", "per_head"),
    ],
)
def test_one_model_type_of_two_architectures_is_told_by_all_that_decides(
    own: dict[str, Any], kind: str, gate: object
) -> None:
    found = model(LING | own)
    assert found.state_space is not None
    assert (found.state_space.kind, found.attention_gate) == (kind, gate)


def test_ling_2_6_has_its_published_size() -> None:
    counts = count_parameters(model(LING | LING_2))
    assert counts.total == pytest.approx(104e9, rel=0.005)
    assert counts.active == pytest.approx(7.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "deepseek_ref", "architectures": ["DeepseekV4ForCausalLM"]}, "deepseek_v4"),
        ({"model_type": "minimax_m3"}, "minimax_m3_vl_text"),
        ({"model_type": "mine", "architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "minicpmv", "llm_config": {"model_type": "internlm2"}, "vision_config": {}}, "internlm2"),
    ],
)
def test_a_family_is_found_by_its_name_or_its_code(config: dict[str, Any], family: str) -> None:
    """A size that is missing is told with the family that wants it."""
    with pytest.raises(InputError, match=rf"missing for model_type {family}"):
        model_of_config(config, "config.json")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "llama4"),
        ({"model_type": "minimax_m3_vl", "text_config": {}, "vision_config": {}}, "minimax_m3"),
    ],
)
def test_a_decoder_alone_is_read_whether_or_not_it_says_its_family(config: dict[str, Any], code: str) -> None:
    """With the sizes of its class, as it gives none."""
    assert model_of_config(config, "config.json")["code"] == code


def test_code_of_another_family_is_named() -> None:
    found = model_of_config(LLAMA_405B | {"architectures": ["MixtralForCausalLM"]}, "config.json")
    assert found["left_out"] == ["code of MixtralForCausalLM (simulated: that of llama)"]
