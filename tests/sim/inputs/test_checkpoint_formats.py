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
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm_int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": SCHEME}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT8}}, "int8_weight_only"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
        (PACKED, "nvfp4"),
        (PACKED | {"config_groups": {"g": {"weights": FLOAT4}}}, "int4_weight_only"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}, "exclude": []}, "fp8"),
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
        {"quant_method": "modelopt", "quant_algo": "NVFP9"},
        ["fp8"],
        PACKED | {"config_groups": {"g": NVFP4 | {"input_activations": {"num_bits": 8, "type": "float"}}}},
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
    found = [served(str(tmp_path), engine).for_serving.kv_cache.dtype for engine in ("vllm-v1", "vllm-0.14")]
    assert found == ["bf16", kept]  # pull request 29980 of vllm-project/vllm


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


ROUTED = LLAMA | {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
ROUTED |= {"shared_expert_intermediate_size": 512, "num_key_value_heads": 8}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
OF_EXPERTS = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)}
OF_ATTENTION = {f"model.layers.{i}.self_attn.{m}_proj": {"quant_algo": "FP8"} for i in range(2) for m in "qkvo"}
INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("stored", "usual", "modules"),
    [
        (FP8_BLOCKS, "fp8", None),
        (FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.norm"]}, "fp8", None),
        (FP8_BLOCKS | {"modules_to_not_convert": ["self_attn"]}, "fp8", {"attention": "none"}),
        (FP8_BLOCKS | {"ignored_layers": ["model.layers.1.self_attn"]}, "fp8", {"attention": ("fp8", "none")}),
        (FP8_BLOCKS | {"modules_to_not_convert": ["mtp.layers.0.self_attn", "visual"]}, "fp8", None),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mlp.shared_expert"]}, "int4_weight_only",
         {"shared_experts": "none"}),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}}}, "int4_weight_only", {"attention": "none"}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4_experts", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.*.self_attn*"]}, "nvfp4",
         {"attention": "none"}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*.self_attn.*", "*shared_expert*"]},
         "nvfp4_experts", None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": OF_EXPERTS}, "nvfp4_experts",
         None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": OF_EXPERTS | OF_ATTENTION},
         "nvfp4_experts", {"attention": "fp8"}),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": INT4},
          "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_expert.*"]},
         "int4_weight_only", {"attention": "none", "shared_experts": "none"}),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"a": SCHEME | {"targets": ["re:.*attn.*"]}, "b": INT4 | {"targets": ["re:.*experts.*"]}}},
         "int4_weight_only", {"attention": "fp8", "shared_experts": "none"}),
    ],
)  # fmt: skip
def test_lists_of_every_format_say_which_modules_it_has(
    tmp_path: Path, stored: dict[str, Any], usual: str, modules: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ROUTED | {"quantization_config": stored}))
    scenario = served(str(tmp_path), "vllm-0.33")
    found = scenario.model.checkpoint_modules
    said = found if found is None else found.model_dump(exclude_none=True)
    assert (scenario.for_serving.quantization, said, scenario.warnings) == (usual, modules, ())


PLACES: dict[str, Any] = {
    "at the top": lambda stored: ({"quantization_config": stored}, None),
    "under its former name": lambda stored: ({"compression_config": stored}, None),
    "beside": lambda stored: ({}, {"producer": {"name": "modelopt"}, "quantization": stored}),
    "in the decoder's part": lambda stored: (
        {"model_type": "qwen3_vl", "vision_config": {}, "text_config": LLAMA | {"quantization_config": stored}}, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_format_is_found_wherever_publishers_write_it(tmp_path: Path, place: str) -> None:
    own, beside = PLACES[place]({"quant_algo": "FP8", "exclude_modules": ["*self_attn*"], "kv_cache_quant_algo": "FP8"})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | own))
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    scenario = served(str(tmp_path), "vllm-0.33")
    assert scenario.for_serving.quantization == "fp8"
    assert scenario.model.checkpoint_modules is not None
    assert scenario.model.checkpoint_modules.attention == "none"
    assert scenario.for_serving.kv_cache.dtype == "fp8"


def weights_with(tmp_path: Path, stored: dict[str, Any]) -> float:
    """Bytes of a served model's weights on its one GPU."""
    (tmp_path / "config.json").write_text(json.dumps(ROUTED | {"quantization_config": stored}))
    section = {"engine": "vllm-0.33", "requests": {**REQUESTS, "count": 2}}
    data = {"model": str(tmp_path), "cluster": {"gpu": "b200-sxm"}, "inference": section}
    return simulate_serving(parse_scenario(data)).capacity.weight_bytes[0]


@pytest.mark.parametrize(
    ("module", "elements", "layers"),
    [
        ("self_attn", 4 * 512 * 512, 2),
        ("mlp.shared_expert", 3 * 512 * 512, 2),
        ("mlp.experts", 4 * 3 * 512 * 256, 2),
        ("model.layers.1.mlp.experts", 4 * 3 * 512 * 256, 1),
    ],
)
def test_a_module_in_16_bits_takes_another_byte_for_each_weight(
    tmp_path: Path, module: str, elements: int, layers: int
) -> None:
    whole, without = (weights_with(tmp_path, FP8_BLOCKS | {"modules_to_not_convert": x}) for x in ([], [module]))
    assert without - whole == elements * layers


def test_a_module_s_format_that_the_gpu_lacks_is_named(tmp_path: Path) -> None:
    stored = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": OF_EXPERTS | OF_ATTENTION,
    }
    (tmp_path / "config.json").write_text(json.dumps(ROUTED | {"quantization_config": stored}))
    section = {"engine": "vllm-0.33", "requests": {**REQUESTS, "count": 2}}
    data = {"model": str(tmp_path), "cluster": {"gpu": "a100-sxm"}, "inference": section}
    found = simulate_serving(parse_scenario(data)).outcome.warnings
    assert [w.partition("multiplies no ")[2].partition(";")[0] for w in found if "multiplies no" in w] == [
        "nvfp4_experts",
        "fp8",
    ]


def test_groups_of_scales_take_their_bytes(tmp_path: Path) -> None:
    """2 bytes for 32 weights, or for 128."""
    linear = 2 * (4 * 512 * 512 + 3 * 512 * 512 + 4 * 3 * 512 * 256)
    sizes = [weights_with(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": size}) for size in (32, 128)]
    assert sizes[0] - sizes[1] == linear * (2 / 32 - 2 / 128)


@pytest.mark.parametrize(
    ("gpu", "engine", "form", "dtype"),
    [
        ("b200-sxm", "sglang-0.5", "mxfp4_experts", "mxfp8"),
        ("b200-sxm", "trtllm-1.1", "mxfp4_experts", "mxfp8"),
        ("b200-sxm", "vllm-0.33", "mxfp4_experts", "mxfp8"),
        ("b200-sxm", "vllm-v1", "mxfp4_experts", "bf16"),
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
