"""Checkpoints in few bits, prediction layers and objects given key by key in command lines of serving engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.test_serving import BENCH, converted


@pytest.mark.parametrize(
    ("model", "shipped", "stored"),
    [
        ("zai-org/GLM-5-FP8", "hf://zai-org/GLM-5", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "llama3.1-70b", "nvfp4"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-v3", "nvfp4_experts"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "hf://Qwen/Qwen2.5-72B-Instruct", "int4_weight_only"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "hf://Qwen/Qwen2.5-72B-Instruct", "int8_weight_only"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama3.1-8b", "llm_int8"),
    ],
)
def test_the_end_of_a_checkpoints_id_says_its_format(tmp_path: Path, model: str, shipped: str, stored: str) -> None:
    found, text = converted(tmp_path, f"vllm serve {model} --tensor-parallel-size 8\n{BENCH}")
    assert found["model"] == shipped
    assert found["inference"]["quantization"] == stored
    assert f"{model}: read as {shipped} with weights in few bits ({stored.removesuffix('_experts')})" in text
    parse_scenario(found | {"cluster": "dgx-b200"})


@pytest.mark.parametrize(
    ("flag", "stored"),
    [("modelopt_fp4", "nvfp4"), ("modelopt", "nvfp4"), ("fp8", "fp8")],
)
def test_a_flag_says_the_format_unless_it_leaves_it_to_the_checkpoint(tmp_path: Path, flag: str, stored: str) -> None:
    server = f"vllm serve nvidia/Llama-3.3-70B-Instruct-FP4 --quantization {flag}"
    assert converted(tmp_path, f"{server}\n{BENCH}")[0]["inference"]["quantization"] == stored


def test_both_pools_serve_one_checkpoint(tmp_path: Path) -> None:
    server = "python -m sglang.launch_server --model-path nvidia/DeepSeek-R1-0528-FP4 --tp 8 --disaggregation-mode"
    found, text = converted(tmp_path, f"{server} prefill\n{server} decode\n{BENCH}")
    assert found["inference"]["quantization"] == "nvfp4_experts"
    assert "prefill and decode servers differ" not in text


@pytest.mark.parametrize(
    ("model", "written"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"preset": "hf://Qwen/Qwen3-Next-80B-A3B-Instruct", "mtp_layers": 1}),
        ("deepseek-ai/DeepSeek-V3", "hf://deepseek-ai/DeepSeek-V3"),
    ],
)
def test_a_prediction_layer_that_a_shipped_model_leaves_out_drafts(tmp_path: Path, model: str, written: object) -> None:
    server = f"vllm serve {model} -tp 8 --speculative-config.method mtp --speculative-config.num_speculative_tokens 2"
    found, text = converted(tmp_path, f"{server}\n{BENCH}")
    assert found["model"] == written
    assert found["inference"]["speculative"] == {"tokens": 2}
    assert ("model.mtp_layers: 1" in text) == isinstance(written, dict)
    parse_scenario(found)


def test_an_object_may_be_given_key_by_key(tmp_path: Path) -> None:
    """vLLM 0.33, utils/argparse_utils.py: also with an equals sign, by its short name, and in the YAML of --config."""
    whole = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
    keys = ("--speculative-config.method=mtp -sc.num_speculative_tokens 3", whole, "--config more.yml")
    (tmp_path / "more.yml").write_text("speculative-config: {method: mtp, num_speculative_tokens: 3}\n")
    found = [converted(tmp_path, f"vllm serve deepseek-v3 -tp 8 {flags}\n{BENCH}") for flags in keys]
    assert [one["inference"]["speculative"] for one, _ in found] == [{"tokens": 3}] * 3
    assert not any("not expressed here" in text for _, text in found)


@pytest.mark.parametrize(
    "server",
    [
        "vllm serve llama3-8b --stream-interval 20",
        "python -m sglang.launch_server --model llama3-8b --stream-interval 20",
        "trtllm-serve llama3-8b --config more.yml",
    ],
)
def test_how_many_tokens_a_piece_has(tmp_path: Path, server: str) -> None:
    (tmp_path / "more.yml").write_text("stream_interval: 20\n")
    assert converted(tmp_path, f"{server}\n{BENCH}")[0]["inference"]["stream_interval"] == 20


def test_no_prefix_cache_of_a_model_with_states(tmp_path: Path) -> None:
    for model, kept in (("qwen3-next-80b-a3b", "none"), ("llama3-8b", "gpu")):
        found, text = converted(tmp_path, f"vllm serve {model} --enable-prefix-caching\n{BENCH}")
        assert found["inference"]["prefix_cache"] == kept
        assert ("states are not kept for prefixes here" in text) == (kept == "none")
        parse_scenario(found)
