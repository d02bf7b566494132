"""Blocks of latent attention's cache: as many tokens as vLLM's kernel takes, where nobody says."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario
from sim.serve.simulation import simulate_serving

REQUESTS = {"prompt_len": 65, "output_len": 2, "count": 1}


def scenario(engine: str, cluster: str = "dgx-h200", model: str = "deepseek-v3", **cache: Any) -> Scenario:
    inference = {"engine": engine, "requests": REQUESTS, "kv_cache": cache}
    return parse_scenario({"model": model, "cluster": cluster, "parallelism": {"tp": 8}, "inference": inference})


@pytest.mark.parametrize(
    ("engine", "cluster", "cache", "tokens"),
    [
        ("vllm-0.8", "dgx-h200", {}, 64),
        ("vllm-0.8", "dgx-b200", {}, 16),
        ("vllm-v1", "dgx-b200", {}, 128),
        ("vllm-0.11", "dgx-b200", {}, 128),
        ("vllm-0.14", "dgx-b200", {}, 64),
        ("vllm-0.14", "dgx-h200", {"dtype": "fp8"}, 64),
        ("vllm-0.14", "dgx-a100", {}, 16),
        ("vllm-0.19", "dgx-h200", {}, 16),
        ("vllm-0.19", "dgx-h200", {"dtype": "fp8"}, 64),
        ("vllm-0.28", "dgx-b200", {}, 32),
        ("vllm-0.14", "dgx-h200", {"block_tokens": 32}, 32),
        ("sglang-0.5", "dgx-h200", {}, 1),
        ("sglang-0.5.10", "dgx-h200", {}, 1),
        ("sglang-0.5.10", "dgx-b200", {}, 64),
        ("trtllm-1.0", "dgx-h200", {}, 64),
        ("trtllm-1.0", "dgx-b200", {}, 32),
        ("bundled", "dgx-h200", {}, 16),
    ],
)
def test_tokens_of_a_block(engine: str, cluster: str, cache: dict[str, Any], tokens: int) -> None:
    assert scenario(engine, cluster, **cache).for_serving.kv_cache.block_tokens == tokens


def test_other_attention_keeps_its_blocks() -> None:
    assert scenario("vllm-0.14", model="llama3-8b").for_serving.kv_cache.block_tokens == 16
    found = [
        scenario("sglang-0.5.20", on, "llama3-8b").for_serving.kv_cache.block_tokens for on in ("dgx-h200", "dgx-b200")
    ]
    assert found == [1, 64]  # trtllm_mha has pages of 64


def test_keys_that_are_selected_have_blocks_of_their_own() -> None:
    """DeepSeek V3.2: FlashMLA's sparse kernel and the indexer take 64 (v1/attention/backends/mla/indexer.py)."""
    found = [scenario(e, model="deepseek-v3.2").for_serving.kv_cache.block_tokens for e in ("vllm-0.11", "vllm-0.28")]
    assert found == [64, 64]
    assert scenario("sglang-0.5", model="deepseek-v3.2").for_serving.kv_cache.block_tokens == 64


@pytest.mark.parametrize(
    ("engine", "cluster", "model", "cache", "dtype"),
    [
        ("sglang-0.5", "dgx-b200", "deepseek-v3.2", {}, "fp8"),
        ("sglang-0.5.20", "dgx-b200", "deepseek-v3.2", {"dtype": "bf16"}, "bf16"),
        ("sglang-0.5", "dgx-h200", "deepseek-v3.2", {}, "bf16"),
        ("sglang-0.5", "dgx-b200", "deepseek-v3", {}, "bf16"),
        ("vllm-0.28", "dgx-b200", "deepseek-v3.2", {}, "bf16"),
    ],
)
def test_sglang_keeps_selected_latents_in_fp8_on_blackwell(
    engine: str, cluster: str, model: str, cache: dict[str, Any], dtype: str
) -> None:
    """656 bytes a layer, and the indexer's 132, instead of 1,152 and 132."""
    s = scenario(engine, cluster, model, **cache)
    assert s.for_serving.kv_cache.dtype == dtype
    if model == "deepseek-v3.2":
        token_bytes = simulate_serving(s).capacity.token_bytes[0]
        assert token_bytes == 61 * ({"fp8": 656, "bf16": 1152}[dtype] + 132)


def test_a_sequence_holds_whole_blocks() -> None:
    """66 tokens with keys: two blocks of 64, or five of 16."""
    used = [simulate_serving(scenario(e)).result["kv_cache"]["blocks_used"] for e in ("vllm-0.14", "vllm-0.19")]
    assert used == [2, 5]
