"""A served model is kept in memory as its checkpoint stores it, unless the scenario says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
REQUESTS = {"prompt_len": 100, "output_len": 10}


def served(model: str, engine: str = "vllm-v1", tp: int = 1, **inference: Any) -> Scenario:
    section = {"engine": engine, "requests": REQUESTS, **inference}
    data = {"model": model, "cluster": "dgx-h200", "parallelism": {"tp": tp}, "inference": section}
    return parse_scenario(data)


SCHEME = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
INT8 = {"weights": {"num_bits": 8, "type": "int"}}


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4_weight_only"),
        ({"quant_method": "gptq", "bits": 8}, "int8_weight_only"),
        ({"quant_method": "mxfp4"}, "mxfp4_experts"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm_int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": SCHEME}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT8}}, "int8_weight_only"),
    ],
)
def test_a_config_says_how_weights_are_stored(tmp_path: Path, stored: dict[str, Any], kept: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": stored}))
    scenario = served(str(tmp_path))
    assert scenario.for_serving.quantization == kept
    assert not scenario.warnings


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "quip"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": [4]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {**INT8, "input_activations": {"num_bits": 8}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
        {"quant_method": ["fp8"]},
    ],
)
def test_a_format_that_is_not_simulated_is_named(tmp_path: Path, stored: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": stored}))
    scenario = served(str(tmp_path))
    assert scenario.for_serving.quantization == "none"
    assert any("without the config's quantization_config" in w for w in scenario.warnings)


def test_engines_keep_the_checkpoints_format_and_the_bundled_one_16_bits() -> None:
    found = {
        e: served("deepseek-v3", e, 8).for_serving.quantization for e in ("vllm-v1", "sglang-0.5", "bundled", "trtllm")
    }
    assert found == {"vllm-v1": "fp8", "sglang-0.5": "fp8", "bundled": "none", "trtllm": "none"}
    assert served("gpt-oss-120b").for_serving.quantization == "mxfp4_experts"
    assert served("llama3-8b").for_serving.quantization == "none"


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": SCHEME},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "fp8",
        ),
    ],
)
def test_a_checkpoint_in_fp8_says_how_tensorrt_llm_keeps_the_cache(
    tmp_path: Path, stored: dict[str, Any], kept: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": stored}))
    assert served(str(tmp_path), "trtllm-1.3").for_serving.kv_cache.dtype == kept
    assert served(str(tmp_path), "trtllm-1.3", kv_cache={"dtype": "fp8"}).for_serving.kv_cache.dtype == "fp8"
    assert served(str(tmp_path), "vllm-v1").for_serving.kv_cache.dtype == "bf16"


def test_a_model_that_is_published_with_block_scales_has_a_cache_of_16_bits() -> None:
    assert served("deepseek-v3", "trtllm-1.3", 8).for_serving.kv_cache.dtype == "bf16"
    assert served("llama3-8b", "trtllm-1.3", quantization="fp8").for_serving.kv_cache.dtype == "fp8"


def test_what_a_scenario_says_decides() -> None:
    assert served("deepseek-v3", quantization="none").for_serving.quantization == "none"
    assert served("deepseek-v3", precision="fp8").for_serving.quantization == "none"
    assert served("deepseek-v3", precision="bf16").for_serving.quantization == "fp8"


def test_engines_split_experts_over_tp_unless_told_otherwise() -> None:
    assert served("deepseek-v3", "vllm-v1", 8).parallelism.expert_tp == 8
    assert served("deepseek-v3", "bundled", 8).parallelism.expert_tp == 1
    section = {"engine": "vllm-v1", "requests": REQUESTS}
    data = {"model": "deepseek-v3", "cluster": "dgx-h200", "parallelism": {"tp": 8, "ep": 8}, "inference": section}
    assert parse_scenario(data).parallelism.expert_tp == 1
    for said, split in (({"ep": 1}, 8), ({"ep": 1, "expert_tp": 1}, 1)):  # an ep of 1 is none
        assert parse_scenario({**data, "parallelism": {"tp": 8, **said}}).parallelism.expert_tp == split
