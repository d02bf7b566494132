"""What SGLang makes of limits that somebody states, or leaves out, beside its own."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.serve.serving_cases import ONE, engine_scenario


def sized(parallelism: dict[str, int] | None = None, model: str = "llama3-8b", **keys: Any) -> float:
    """The share of an H100's memory that a scenario's weights and cache get."""
    section = {"engine": "sglang-0.5.23", "requests": ONE, **keys}
    data = {"model": model, "cluster": "dgx-h100", "parallelism": parallelism or {}, "inference": section}
    return parse_scenario(data).for_serving.kv_cache.memory_fraction


def test_sglang_leaves_memory_for_the_chunks_and_requests_that_somebody_asks_for() -> None:
    """1.5 MiB a token of a chunk, of all replicas that share experts, and 2 MiB a sequence of a graph."""
    gpu_mib = engine_scenario("sglang-0.5.23").cluster.gpu.memory_bytes / 2**20
    usual, larger = sized(), sized(max_batch_tokens=16384)
    prompt_graphs = 8 * (16384 - 8192) // 512  # MiB, for as many sizes more
    assert usual - larger == pytest.approx((1.5 * 8192 + prompt_graphs) / gpu_mib, abs=1e-3)
    assert sized(max_batch_tokens=8192) == usual
    assert sized(max_running_requests=16) - usual == pytest.approx(2 * (256 - 16) / gpu_mib, abs=1e-3)
    assert sized(max_running_requests=16, cuda_graph_max_size=256) == usual
    old: dict[str, Any] = {"engine": "sglang-0.5.20"}  # before 0.5.22 graphs were counted to the GPU's own size
    assert sized(max_running_requests=16, **old) == sized(**old)
    shared = {"dp": 8, "expert_tp": 8}
    assert sized(shared, "gpt-oss-120b", max_batch_tokens=1024) == sized(shared, "gpt-oss-120b")


POOLS = {pool: {"replicas": 1, "tp": 1} for pool in ("prefill", "decode")}


@pytest.mark.parametrize(
    ("keys", "where", "share"),
    [
        ({"max_batch_tokens": 32768}, None, 0.376),
        ({"max_batch_tokens": 65536}, "kv_cache.memory_fraction", 0.83),
        ({"max_batch_tokens": 65536, "kv_cache": {"memory_fraction": 0.7}}, None, 0.7),
        ({"max_batch_tokens": 65536, "batching": "static"}, None, None),
        ({"max_batch_tokens": 65536, "disaggregated": POOLS}, "disaggregated.prefill.memory_fraction", 0.837),
        ({"max_running_requests": 65536, "disaggregated": POOLS}, "kv_cache.memory_fraction", 0.875),
    ],
)
def test_limits_that_would_take_all_memory_leave_what_sglangs_own_do(
    keys: dict[str, Any], where: str | None, share: float | None
) -> None:
    section = {"engine": "sglang-0.5.23", "requests": ONE, **keys}
    scenario = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": section})
    told = [note for note in scenario.warnings if "leaves no memory for weights and cache" in note]
    assert [note.split(":")[0] for note in told] == ([] if where is None else [f"inference.{where}"])
    served = scenario.for_serving
    found = served.kv_cache.memory_fraction
    if served.disaggregated is not None and "prefill" in (where or ""):
        found = served.disaggregated.prefill.memory_fraction or 0.0
    assert share is None or found == share


@pytest.mark.parametrize(
    ("engine", "model", "keys", "told"),
    [
        ("sglang-0.5.10", "qwen3-next-80b-a3b", {}, False),
        ("sglang-0.5.11", "qwen3-next-80b-a3b", {}, False),
        ("sglang-0.5.11", "qwen3-next-80b-a3b", {"prefix_cache": "none"}, None),
        ("sglang-0.5.11", "qwen3-next-80b-a3b", {"async_scheduling": True}, True),
        ("sglang-0.5.11", "qwen3-30b-a3b", {}, None),
        ("sglang-0.5.14", "qwen3-next-80b-a3b", {}, None),
        ("vllm-0.33", "qwen3-next-80b-a3b", {}, None),
    ],
)
def test_sglang_0_5_10_keeps_prefixes_of_states_and_waits_for_the_gpu(
    engine: str, model: str, keys: dict[str, Any], told: bool | None
) -> None:
    """srt/server_args.py, _handle_mamba_radix_cache: no_buffer, its default, switches the overlap off."""
    section = {"engine": engine, "requests": ONE, **keys}
    data = {"model": model, "cluster": "dgx-h100", "parallelism": {"tp": 4}, "inference": section}
    assert parse_scenario(data).for_serving.async_scheduling is told


def test_a_static_batch_of_sglang_says_nothing_of_a_memory_fraction_that_nobody_said() -> None:
    drafts = {"speculative": {"draft": "llama3.2-1b"}}
    section = {"engine": "sglang-0.5.23", "requests": ONE, "batching": "static", **drafts}
    notes = parse_scenario({"model": "llama3.1-8b", "cluster": "dgx-h100", "inference": section}).warnings
    assert not any("memory_fraction" in note for note in notes)
