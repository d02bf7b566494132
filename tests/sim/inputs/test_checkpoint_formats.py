"""A served model is kept in memory as its checkpoint stores it, unless the scenario says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving

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
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = {"weights": FLOAT4, "input_activations": FLOAT4}
PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": NVFP4}}
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
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
        (PACKED, "nvfp4"),
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
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]},
        PACKED | {"config_groups": {"g": {"weights": FLOAT4}}},
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


def weights_of(form: str, gpu: str = "b200-sxm", model: str = "qwen3-30b-a3b") -> ServingSimulation:
    section = {"engine": "vllm-0.33", "quantization": form, "requests": {**REQUESTS, "count": 4}}
    return simulate_serving(parse_scenario({"model": model, "cluster": {"gpu": gpu}, "inference": section}))


def test_nvfp4_takes_nine_sixteenths_of_a_byte_and_leaves_tables_in_16_bits() -> None:
    """4 bits and an 8-bit scale for 16: of all linear layers, or of routed experts alone."""
    plain, all_linear, of_experts = (weights_of(form) for form in ("none", "nvfp4", "nvfp4_experts"))
    elements = [spec.served_elements(plain.costs.dims) for spec in plain.costs.specs]
    assert len(elements) == 1
    layers, own = plain.scenario.model.layers, elements[0]
    saved = [plain.capacity.weight_bytes[0] - one.capacity.weight_bytes[0] for one in (all_linear, of_experts)]
    assert saved[0] == pytest.approx(layers * (own.linear + own.experts) * (2 - 0.5625))
    assert saved[1] == pytest.approx(layers * own.experts * (2 - 0.5625))


def test_nvfp4_is_multiplied_where_the_gpu_has_units_for_it() -> None:
    dims = {gpu: weights_of("nvfp4_experts", gpu).costs.dims for gpu in ("b200-sxm", "h200-sxm")}
    assert [(one.linear, one.experts_dtype) for one in dims.values()] == [("bf16", "nvfp4"), ("bf16", "bf16")]
    warnings = [weights_of(form, "h200-sxm").outcome.warnings for form in ("nvfp4", "nvfp4_experts")]
    assert all(any("are kept in 4 bits and multiplied in bf16" in w for w in own) for own in warnings)


def test_a_checkpoint_that_leaves_attention_in_16_bits_has_its_experts_in_nvfp4(tmp_path: Path) -> None:
    """`ignore` of NVIDIA's checkpoints of DeepSeek names attention; TensorRT-LLM keeps keys as the checkpoint says."""
    kept = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]}
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for said, dtype in ((None, "bf16"), ("FP8", "fp8")):
        stored = {**kept, "kv_cache_quant_algo": said}
        (tmp_path / "config.json").write_text(json.dumps({**mixtral, "quantization_config": stored}))
        scenario = served(str(tmp_path), "trtllm-1.3")
        assert scenario.for_serving.quantization == "nvfp4_experts"
        assert scenario.for_serving.kv_cache.dtype == dtype


@pytest.mark.parametrize(
    ("gpu", "engine", "form", "dtype"),
    [
        ("b200-sxm", "sglang-0.5", "mxfp4_experts", "mxfp8"),
        ("b200-sxm", "trtllm-1.1", "mxfp4_experts", "mxfp8"),
        ("b200-sxm", "vllm-0.33", "mxfp4_experts", "bf16"),
        ("h200-sxm", "sglang-0.5", "mxfp4_experts", "bf16"),
        ("b200-sxm", "vllm-0.33", "fp8_mxfp4_experts", "mxfp8"),
        ("h200-sxm", "vllm-0.33", "fp8_mxfp4_experts", "bf16"),
    ],
)
def test_what_experts_in_mxfp4_are_multiplied_in(gpu: str, engine: str, form: str, dtype: str) -> None:
    """vLLM 0.33, fused_moe/oracle/mxfp4.py; SGLang 0.5.3 and 0.5.23, layers/quantization/mxfp4.py; TensorRT-LLM,
    _torch/model_config.py: get_mxfp4_quant_algo."""
    section = {"engine": engine, "quantization": form, "requests": {**REQUESTS, "count": 4}}
    data = {"model": "gpt-oss-20b", "cluster": {"gpu": gpu}, "inference": section}
    dims = simulate_serving(parse_scenario(data)).costs.dims
    assert dims.experts_dtype == dtype
    assert dims.linear == ("fp8" if form.startswith("fp8") else "bf16")
