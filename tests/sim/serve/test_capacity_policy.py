"""What a request needs and takes when TensorRT-LLM lets it in (cpp/tensorrt_llm/batch_manager: capacityScheduler.cpp,
microBatchScheduler.cpp, kvCacheManager.cpp)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from tests.sim.serve.serving_cases import every_way, serving

LONG = tuple(Request(0.0, 64, 200) for _ in range(6))


def served(requests: tuple[Request, ...], engine: str, blocks: int = 1000, **inference: Any) -> ServingSimulation:
    section = {
        "engine": engine,
        "prefix_cache": "none",
        "kv_cache": {"block_tokens": 16, "max_tokens": 16 * blocks},
        **inference,
    }
    return every_way(serving(section), requests)[0]


def chunks(sim: ServingSimulation) -> list[list[int]]:
    """Tokens of the prompts' chunks in each iteration that has any."""
    loads = [i.load for i in sim.replicas[0].iterations if i.load.prefills]
    return [[q for q, _, alike in load.prefills for _ in range(alike)] for load in loads]


@pytest.mark.parametrize("engine", ["trtllm", "trtllm-1.0", "trtllm-1.3"])
def test_who_enters_by_each_policy(engine: str) -> None:
    """A request needs 17 blocks of 60 in the end, and 4 for its prompt: by one policy 3 run at once and none is put
    out, by the other all 6 enter."""
    sure, full = (served(LONG, engine, 60, capacity_policy=p) for p in ("guaranteed_no_evict", "max_utilization"))
    assert [max(i.load.sequences for i in sim.replicas[0].iterations) for sim in (sure, full)] == [3, 6]
    assert sure.replicas[0].counts.preemptions == 0 < full.replicas[0].counts.preemptions
    assert [s.finish_s for s in served(LONG, engine, 60).sequences] == [s.finish_s for s in sure.sequences]


def test_a_prompt_takes_its_blocks_at_its_first_chunk() -> None:
    """Of 12 blocks a first prompt of 8 takes all its own with its first chunk, so that a second of 5 waits."""
    requests = (Request(0.0, 128, 2), Request(0.0, 80, 2))
    inference = {"chunked_prefill": True, "max_batch_tokens": 96, "capacity_policy": "max_utilization"}
    assert chunks(served(requests, "trtllm-1.3", 12, **inference)) == [[96], [32], [80]]
    assert chunks(served(requests, "trtllm-1.3", 15, **inference)) == [[96], [32, 64], [16]]


@pytest.mark.parametrize(("engine", "expected"), [("trtllm-1.3", [[48], [16]]), ("vllm-0.14", [[50], [14]])])
def test_chunks_have_whole_blocks(engine: str, expected: list[list[int]]) -> None:
    inference = {"chunked_prefill": True, "max_batch_tokens": 50, "max_running_requests": 8}
    assert chunks(served((Request(0.0, 64, 2),), engine, **inference)) == expected


def test_an_iteration_below_a_block_cuts_within_it() -> None:
    inference = {"chunked_prefill": True, "max_batch_tokens": 10}
    assert chunks(served((Request(0.0, 32, 2),), "trtllm-1.3", **inference)) == [[10], [10], [10], [2]]


@pytest.mark.parametrize(("engine", "entered"), [("trtllm-1.2", [2, 1, 1]), ("trtllm-1.3", [4])])
def test_what_is_found_counts_in_the_budget_until_1_3(engine: str, entered: list[int]) -> None:
    """Of prompts of 512 tokens 496 are found; an iteration of 1,024 has room for two of them (for
    one beside tokens), or for all."""
    first, rest = Request(0.0, 512, 2, "a", 496), [Request(1.0, 512, 2, "a", 496) for _ in range(4)]
    sim = served((first, *rest), engine, prefix_cache="gpu", max_batch_tokens=1024)
    assert chunks(sim) == [[512], *[[16] * n for n in entered]]


@pytest.mark.parametrize(("engine", "running"), [("trtllm-1.2", 1), ("trtllm-1.3", 2)])
def test_what_is_found_counts_as_blocks_to_find_until_1_3(engine: str, running: int) -> None:
    """Of 60 blocks a request has 33, 31 of them shared: a second one needs 33 free ones, or the other 2."""
    requests = (Request(0.0, 512, 2, "a", 496), *[Request(1.0, 512, 16, "a", 496) for _ in range(2)])
    sim = served(requests, engine, 60, prefix_cache="gpu")
    assert max(i.load.sequences for i in sim.replicas[0].iterations) == running


def test_who_has_ended_takes_the_place_of_an_older_prefix() -> None:
    """A prefix of 8 blocks, of 20, has lost its end after two requests of 8 blocks each, whose blocks stay; where
    nothing else has been served, all of it is found."""
    shared = [Request(at, 136, 2, "a", 128) for at in (0.0, 3.0)]
    others = [Request(at, 126, 2) for at in (1.0, 2.0)]
    hits = [
        served(tuple(requests), "trtllm-1.3", 20, prefix_cache="gpu").replicas[0].counts.hit_tokens
        for requests in ([shared[0], *others, shared[1]], shared)
    ]
    assert hits == [80, 128]


def test_other_engines_refuse_a_policy() -> None:
    with pytest.raises(InputError, match=r"inference.capacity_policy: found 'max_utilization'; .*trtllm-1.0"):
        serving({"engine": "vllm-0.14", "capacity_policy": "max_utilization"})
    with pytest.raises(InputError, match=r"inference.preemption: found 'swap'; engine trtllm-1.0 swaps no requests"):
        serving({"engine": "trtllm-1.0", "capacity_policy": "max_utilization", "preemption": "swap"})
