"""Sizes of CUDA graphs and of the cache that a scenario states in place of its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import ONE, engine_scenario


def graphs(engine: str, **inference: Any) -> tuple[int, ...]:
    """Tokens of batches with a CUDA graph."""
    s = engine_scenario(engine, batching="continuous", **inference)
    return iteration_costs(s, load_profile(s.calibration)).host.graph_sizes


@pytest.mark.parametrize(
    ("engine", "stated", "last"),
    [
        ("vllm-v1", {"cuda_graph_max_size": 300}, (288, 296)),  # in steps of 8
        ("vllm-0.28", {"cuda_graph_max_size": 300}, (272, 288)),  # of 16
        ("vllm-0.28", {"cuda_graph_max_size": 64, "max_running_requests": 4}, (56, 64)),  # not twice the requests
        ("vllm-0.28", {"cuda_graph_sizes": [64, 8, 600], "max_batch_tokens": 512, "max_running_requests": 4}, (8, 64)),
        ("sglang", {"cuda_graph_max_size": 300}, (152, 160)),  # no more than by itself
        ("sglang-0.5", {"cuda_graph_max_size": 20}, (12, 16)),
        ("sglang-0.5.20", {"cuda_graph_max_size": 20}, (16, 20)),
        ("sglang-0.5", {"cuda_graph_sizes": [64, 8], "max_running_requests": 48}, (8, 48)),
        ("trtllm-1.0", {"cuda_graph_max_size": 100}, (96, 100)),
        ("trtllm-1.3", {"cuda_graph_sizes": [1, 100]}, (1, 100)),
    ],
)
def test_graphs_are_of_the_stated_sizes(engine: str, stated: dict[str, Any], last: tuple[int, int]) -> None:
    assert graphs(engine, **stated)[-2:] == last


@pytest.mark.parametrize(("engine", "found"), [("vllm-0.28", (3, 6)), ("sglang-0.5", (3, 6, 9, 12))])
def test_with_drafts_vllm_counts_tokens_and_sglang_sequences(engine: str, found: tuple[int, ...]) -> None:
    """Of two drafted tokens: 1 to 8 tokens in whole sequences, and 1 to 4 sequences."""
    drafting = {"draft": "llama3.2-1b", "tokens": 2}
    sizes = {"cuda_graph_max_size": 11} if engine == "vllm-0.28" else {"cuda_graph_sizes": [1, 2, 3, 4]}
    assert graphs(engine, speculative=drafting, **sizes) == found


def test_sglang_keeps_less_free_for_smaller_graphs() -> None:
    """2 MiB a sequence of the largest, above 10 GiB of reserve (server_args.py, _handle_gpu_memory_settings)."""
    own, small = (
        parse_scenario(
            {
                "model": "llama3-8b",
                "cluster": "dgx-b200",
                "inference": {"engine": "sglang-0.5", "requests": ONE, **stated},
            }
        ).for_serving.kv_cache.memory_fraction
        for stated in ({}, {"cuda_graph_max_size": 8})
    )
    assert small - own == pytest.approx(2 * (512 - 8) / (180 * 1024), abs=0.0011)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"engine": "vllm-0.6", "cuda_graph_max_size": 8}, "engine vllm-0.6 has no flag for sizes of CUDA graphs"),
        ({"engine": "trtllm", "cuda_graph_sizes": [8]}, "engine trtllm has no flag for sizes"),
        ({"cuda_graph_sizes": [8], "cuda_graph_max_size": 9}, "largest of cuda_graph_sizes is 8; leave one of the two"),
    ],
)
def test_sizes_that_an_engine_does_not_take_are_refused(stated: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        engine_scenario(**{"engine": "vllm-0.28", **stated})


def cache(max_tokens: int | None, engine: str = "vllm-0.28", **more: Any) -> tuple[int, list[str]]:
    """Tokens of the cache, and what is said of it."""
    kept = {} if max_tokens is None else {"max_tokens": max_tokens}
    s = engine_scenario(engine, **{"batching": "continuous", "max_request_tokens": 400, "kv_cache": kept, **more})
    result = simulate_serving(s).result
    return result["kv_cache"]["capacity_tokens"], [text for text in result["warnings"] if "cache" in text]


def test_a_cache_has_no_more_tokens_than_stated() -> None:
    assert cache(1000) == (992, [])  # whole blocks
    assert cache(1000, "sglang-0.5") == (1000, [])  # blocks of one token


def test_a_cache_has_the_stated_bytes() -> None:
    """Of 128 KiB a token, whatever part of the memory is the engine's."""
    token = 2**17
    for fraction in ({}, {"memory_fraction": 0.3}):
        found, texts = cache(None, kv_cache={"memory_bytes": 1000 * token, **fraction})
        assert found == 992
        assert [text for text in texts if "memory_fraction: of no effect" in text][:1] == texts
    _, (text,) = cache(None, kv_cache={"memory_bytes": 1e12})
    assert "kv_cache.memory_bytes: found 931.3 GiB" in text
    assert text.endswith("vLLM runs out of memory with so many")


@pytest.mark.parametrize(
    ("engine", "does"), [("vllm-0.28", "vLLM runs out of memory with so many"), ("sglang-0.5", "takes no more")]
)
def test_a_cache_that_does_not_fit_is_warned_about(engine: str, does: str) -> None:
    usual, _ = cache(None, engine)
    found, (text,) = cache(10**8, engine)
    assert found == usual
    assert f"found 100,000,000; there is room for {usual:,}, and" in text
    assert does in text


def test_a_measured_engine_s_cache_is_its_product_s(tmp_path: Path) -> None:
    measured = tmp_path / "mine.json"
    host = {"format": "engine/1", "engine": "vllm-0.28", "host": {"iteration_s": 0.001}, "source": "a test"}
    measured.write_text(json.dumps({**host, "date": "2026-11-22"}))
    _, texts = cache(10**8, str(measured))
    assert any(text.endswith("vLLM runs out of memory with so many") for text in texts)


def test_a_cache_too_small_for_a_request_is_told_by_its_key() -> None:
    _, texts = cache(100, "sglang-0.5")
    assert any("inference.kv_cache.max_tokens leaves room for 100" in text for text in texts)


def test_a_static_batch_takes_what_it_needs() -> None:
    _, texts = cache(100, batching="static")
    assert texts == [
        "inference.kv_cache.max_tokens: of no effect with batching static, which takes the memory that it needs"
    ]


@pytest.mark.parametrize(
    ("engine", "tokens", "pieces"),
    [("vllm-0.19", 96, 0), ("vllm-0.28", 97, 97), ("vllm-0.31", 97, 0), ("vllm-v1", 96, 97), ("sglang-0.5", 97, 0)],
)
def test_the_last_requests_of_vllm_have_no_whole_graph(engine: str, tokens: int, pieces: int) -> None:
    """Of 100 requests, 97 are padded to 104 tokens before 0.30, which has a graph of 100 (pull request 57355)."""
    s = engine_scenario(engine, batching="continuous", max_running_requests=100)
    host = iteration_costs(s, load_profile(s.calibration)).host
    assert host.launches(0, Load(tokens, tokens, 1000 * tokens, (), tokens)) == pieces
