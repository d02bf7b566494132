"""Engines by their product and version, as scenarios and published tables name them."""

from __future__ import annotations

import pytest

from sim.core.errors import InputError
from sim.variants.engines.names import engine_named
from tests.sim.serve.serving_cases import (
    engine_scenario,
)


def test_an_unknown_engine_is_refused_with_those_known() -> None:
    with pytest.raises(InputError, match=r"inference\.engine.*'bundled'.*'vllm-v1'"):
        engine_scenario("vlm")


@pytest.mark.parametrize(
    ("texts", "engine"),
    [
        (("vLLM v0.15.1",), "vllm-0.14"),
        (("SGLang 0.5.3",), "sglang-0.5"),
        (("SGLang 0.5.2",), "sglang-0.4.8"),
        (("SGLang 0.4.7",), "sglang-0.4.7"),
        (("SGLang v0.4.6.post2",), "sglang-0.4.6"),
        (("SGLang 0.5.9",), "sglang-0.5"),
        (("SGLang",), "sglang-0.5.23"),
        (("vLLM",), "vllm-0.33"),
        (("TensorRT-LLM 1.0",), "trtllm-1.0"),
        (("vLLM 2023", ""), "vllm-0.2"),
        (("vLLM 0.6.3",), "vllm-0.6"),
        (("vLLM V1",), "vllm-v1"),
        (("vLLM 0.8.5",), "vllm-0.8"),
        (("vLLM v0.11",), "vllm-0.11"),
        (("SGLang v0.4.1",), "sglang"),
        (("TensorRT-LLM 0.14", "TensorRT-LLM 0.14, Triton"), "trtllm-triton"),
        (
            ("", "TensorRT-LLM static batching", "'Performance of TensorRT-LLM' (v0.6.1; v0.5 for latency)"),
            "trtllm-0.6",
        ),
        (("LMDeploy 0.6",), None),
        (("CUDA 12.4, vLLM 0.6.6",), "vllm-0.6.5"),
        (("PyTorch 2.5.1, vLLM v0.6.3.post1, CUDA 12.4",), "vllm-0.6"),
        (("Llama-3.1-70B with vLLM 0.8.4",), "vllm-0.8"),
        (("vLLM (V1 engine, 0.10.2)",), "vllm-v1"),
        (("Dynamo 0.4 with vLLM 0.10",), "vllm-v1"),
        (("vllm/vllm-openai:v0.11.0",), "vllm-0.11"),
        (("rocm7.0_vllm_0.9.1_20250715",), "vllm-v1"),
        (("vllm-0.11.0",), "vllm-0.11"),
        (("vLLM", "0.6.6"), "vllm-0.6.5"),
        (("vLLM", "CUDA 12.4"), "vllm-0.33"),
        (("TensorRT LLM 1.1",), "trtllm-1.1"),
        (("TensorRT-LLM 1.2.1",), "trtllm-1.2"),
        (("TRT-LLM v0.17.0",), "trtllm"),
        (("tensorrt_llm 0.7, Triton 24.08",), "trtllm-triton"),
    ],
)
def test_tables_name_engines_by_product_and_version(texts: tuple[str, ...], engine: str | None) -> None:
    found = engine_named(texts)
    assert (found and found.name) == engine


@pytest.mark.parametrize(
    ("name", "engine", "said"),
    [
        ("vllm-0.14", "vllm-0.14", None),
        ("vllm 0.15.1", "vllm-0.14", "found 'vllm 0.15.1'; simulated as vllm-0.14, the record in force"),
        ("vllm==0.13.0", "vllm-0.11", "vllm-0.11, the record in force"),
        ("sglang 0.5.6.post2", "sglang-0.5", "sglang-0.5, the record in force"),
        ("trtllm 1.2.0rc2", "trtllm-1.2", "trtllm-1.2, the record in force"),
        ("vllm", "vllm-0.33", "the newest record of vLLM"),
        ("vLLM v0.99", "vllm-0.33", "the newest record of vLLM"),
        ("sglang 0.3.4", "sglang", "no record of SGLang is that old; simulated as the oldest"),
        ("vllm 0.0.1", "vllm-0.2", "no record of vLLM is that old"),
    ],
)
def test_a_version_takes_the_record_in_force_and_the_result_names_it(name: str, engine: str, said: str | None) -> None:
    scenario = engine_scenario(name)
    assert scenario.for_serving.engine == engine
    found = [warning for warning in scenario.warnings if warning.startswith("inference.engine: ")]
    assert len(found) == (said is not None)
    assert all(said in warning for warning in found if said)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("lmdeploy", "LMDeploy"),
        ("TGI-3.3", "Text Generation Inference"),
        ("llama.cpp", "llama.cpp"),
        ("ollama", "Ollama"),
    ],
)
def test_an_engine_without_a_record_is_named_with_what_to_do(name: str, product: str) -> None:
    with pytest.raises(InputError, match=rf"{product} has no record here: calibrate.serving measures one"):
        engine_scenario(name)
