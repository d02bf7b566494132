"""What an engine reserves and uses of its GPUs, against closed forms, and what is said of one that does not start."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.run import main
from sim.inputs.scenario import parse_scenario
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines.outside_memory import CONTEXT_BYTES
from sim.views.headline import headline
from tests.sim.serve.serving_cases import SMALL, engine_scenario, serving

GPU_BYTES = 79.11 * 2**30  # what CUDA shows of an H100's 80


def served(engine: str, count: int = 1, tp: int = 1, **inference: Any) -> ServingSimulation:
    requests = {"prompt_len": 512, "output_len": 33, "count": count}
    return simulate_serving(engine_scenario(engine, tp, batching="continuous", requests=requests, **inference))


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.6", "vllm-0.14", "vllm-0.19"])
def test_vllm_reserves_its_part_of_the_gpu_however_many_requests_come(engine: str) -> None:
    """All of it but a part of a block; what is in use grows."""
    used = 0.0
    for count in (1, 20, 100):
        sim = served(engine, count, max_batch_tokens=2048, prefix_cache="none")
        block_bytes = sim.scenario.for_serving.kv_cache.block_tokens * sim.capacity.stage_token_bytes
        part = sim.scenario.for_serving.kv_cache.memory_fraction * GPU_BYTES
        assert part - block_bytes < sim.outcome.peak_reserved_bytes <= part
        assert used < sim.outcome.peak_memory_bytes < sim.outcome.peak_reserved_bytes
        assert sim.outcome.fits_in_memory
        used = sim.outcome.peak_memory_bytes


def test_tensorrt_llm_reserves_a_part_of_what_weights_and_tensors_leave() -> None:
    sim = served("trtllm-1.0", prefix_cache="none")
    (row,) = sim.outcome.memory
    block_bytes = sim.scenario.for_serving.kv_cache.block_tokens * sim.capacity.stage_token_bytes
    taken = row.parameters + row.buffers
    expected = taken + sim.scenario.for_serving.kv_cache.free_fraction * (GPU_BYTES - CONTEXT_BYTES - taken)
    assert row.reserved is not None
    assert expected - block_bytes < row.reserved <= expected


def test_static_batching_takes_what_its_batch_needs() -> None:
    sim = simulate_serving(serving({"batching": "static"}))
    assert sim.outcome.peak_reserved_bytes == sim.outcome.peak_memory_bytes
    assert [n.name for n in headline(sim.outcome)][-1] == "Peak memory"


def test_a_stage_with_less_to_hold_reserves_less() -> None:
    """Every stage has as many blocks as the fullest one: the others have room left. Five layers on two stages."""
    sim = simulate_serving(serving({}, {**SMALL, "layers": 5}, parallelism={"pp": 2}))
    for row, weights, token, buffers in zip(
        sim.outcome.memory,
        sim.capacity.weight_bytes,
        sim.capacity.token_bytes,
        sim.capacity.buffer_bytes,
        strict=True,
    ):
        assert row.reserved == pytest.approx(weights + buffers + 16 * sim.capacity.blocks * token, rel=1e-12)
    assert len({row.reserved for row in sim.outcome.memory}) == 2


def test_an_engine_whose_weights_do_not_fit_does_not_start() -> None:
    """No latency and no cache in the summary; in the JSON the keys that there always are."""
    sim = served("vllm-0.14", model="llama3.1-70b")
    why = "weights 131.4 GiB, the GPU has 79.11 GiB"
    whole, result = sim.result, sim.outcome
    assert whole["does_not_start"] == why
    assert whole["warnings"][0].startswith(f"does not fit in memory, so it does not start: {why};")
    assert not whole["fits_in_memory"]
    assert whole["kv_cache"]["blocks"] == whole["kv_cache"]["blocks_used"] == whole["memory"][0]["kv_cache"] == 0
    assert whole["peak_reserved_bytes"] == whole["peak_memory_bytes"] == result.memory[0].peak > 131 * 2**30
    assert whole.keys() - {"does_not_start"} == served("vllm-0.14").result.keys()
    assert [n[:3] for n in headline(result)] == [("Server", "does not start", why)]


def test_what_leaves_no_room_for_a_block_does_not_start_either() -> None:
    """Weights of 67.7 GiB fit on the GPU, but not in three quarters of it."""
    small = {"memory_fraction": 0.75}
    sim = served("vllm-0.14", model="llama3.1-70b", quantization="fp8", kv_cache=small)
    assert sim.outcome.does_not_start is not None
    assert sim.outcome.does_not_start.endswith("of which the engine takes 59.33 GiB (kv_cache.memory_fraction 75.0 %)")
    assert sim.outcome.peak_memory_bytes < GPU_BYTES
    assert not sim.outcome.fits_in_memory


@pytest.mark.parametrize("layout", [{"dp": 8, "ep": 8}, {"tp": 8, "ep": 8}])
def test_replicas_whose_weights_do_not_fit_are_simulated_in_few_iterations(layout: dict[str, int]) -> None:
    """Side by side, as on GPUs with more memory; one request after another has 8 · 64 iterations on each replica. A
    replica alone takes alike iterations together, and so may have a cache for one request."""
    requests = {"prompt_len": 64, "output_len": 64, "count": 64}
    given = {"engine": "vllm-0.14", "quantization": "fp8", "requests": requests}
    section = {"model": "deepseek-v3", "cluster": "dgx-h100", "parallelism": layout, "inference": given}
    sim = simulate_serving(parse_scenario(section))
    assert sim.outcome.does_not_start is not None
    assert sum(len(r.iterations) for pool in sim.pools for r in pool.replicas) < 8 * 100


def test_a_cache_too_small_for_the_longest_request_is_another_matter() -> None:
    """The engine starts, and who sends shorter requests is served: the figures are shown, with a warning."""
    inference = {"requests": {"prompt_len": 2000, "output_len": 16}}
    c = simulate_serving(serving(inference)).capacity
    memory_bytes = (c.weight_bytes[0] + c.buffer_bytes[0] + 10.5 * 16 * c.token_bytes[0]) / 0.9
    sim = simulate_serving(serving(inference, gpu={"memory_bytes": memory_bytes}))
    assert sim.capacity.blocks_fit == 10
    assert sim.outcome.does_not_start is None
    assert not sim.outcome.fits_in_memory
    assert sim.outcome.warnings[0].startswith("does not fit in memory: the requests need a cache of 2,016 tokens")


def test_the_command_says_so_and_ends_well() -> None:
    """As with a step that does not fit."""
    arguments = ["serve_llama8b", "--set", "model=llama3.1-70b", "--set", "inference.requests.count=4"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    assert "does not start weights 131.4 GiB, the GPU has 79.11 GiB" in words
    for absent in ("latency", "Output tokens", "requests/s", "blocks of"):
        assert absent not in words.replace("latencies", "")
    strict = CliRunner().invoke(main, [*arguments, "--require-fit"], catch_exceptions=False)
    assert strict.exit_code == 1
