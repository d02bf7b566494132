"""Copies of the cache to host memory and back, block by block."""

from __future__ import annotations

import pytest

from sim.serve.simulation import simulate_serving
from tests.sim.cases import scenario_with


@pytest.mark.parametrize(
    ("engine", "tp", "pp", "pieces"),
    [
        ("vllm-0.6", 1, 1, 64),
        ("vllm-0.11", 8, 1, 64),
        ("vllm-0.11", 1, 2, 32),
        ("vllm-0.19", 1, 1, 0),
        ("bundled", 1, 1, 0),
    ],
)
def test_each_copy_of_a_block_has_its_latency(engine: str, tp: int, pp: int, pieces: int) -> None:
    """Llama 3 8B: keys and values of 32 layers, each block of 16 tokens by itself before vLLM 0.20."""
    section = {"engine": engine, "prefix_cache": "cpu", "requests": {"prompt_len": 100, "output_len": 2}}
    scenario = scenario_with(model="llama3-8b", cluster="dgx-h100", parallelism={"tp": tp, "pp": pp}, inference=section)
    (replica,) = simulate_serving(scenario).replicas
    gpu, bus = scenario.cluster.gpu, replica.scheduler.bus
    token_bytes = 2 * 8 * 128 * 2 * 32 / tp / pp
    expected = token_bytes / gpu.host_bandwidth_bytes_per_s + pieces * gpu.launch_overhead_s / 16
    assert bus.s_per_token == pytest.approx(expected)


def test_a_latent_cache_is_one_copy_a_layer() -> None:
    section = {"engine": "vllm-0.11", "prefix_cache": "cpu", "requests": {"prompt_len": 100, "output_len": 2}}
    scenario = scenario_with(model="deepseek-v3", cluster="dgx-h200", parallelism={"tp": 8}, inference=section)
    (replica,) = simulate_serving(scenario).replicas
    gpu, bus = scenario.cluster.gpu, replica.scheduler.bus
    expected = 61 * (576 * 2 / gpu.host_bandwidth_bytes_per_s + gpu.launch_overhead_s / 64)
    assert bus.s_per_token == pytest.approx(expected)
