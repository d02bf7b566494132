"""How engines hand computed prompts to replicas that add tokens, against closed forms of one or two requests."""

from __future__ import annotations

from typing import Any

import pytest

from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.scheduling.sequences import Sequence
from sim.serve.scheduling.sglang_scheduler import SglangScheduler
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, serving

ONE_EACH = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def handed_over(engine: str, prompt: int = 1000, output: int = 32, **more: Any) -> ServingSimulation:
    requests = {"prompt_len": prompt, "output_len": output}
    return simulate_serving(serving({"engine": engine, "requests": requests, "disaggregated": ONE_EACH, **more}))


def ends_s(sim: ServingSimulation, pool: int) -> list[float]:
    (replica,) = sim.pools[pool].replicas
    return [i.spans[0][1] for i in replica.iterations]


@pytest.mark.parametrize("engine", ["sglang-0.5", "sglang-0.5.23", "trtllm-1.0"])
def test_the_first_token_comes_with_the_cache(engine: str) -> None:
    """The client has it once the cache is there, not when the prompt is computed; the decode replica adds the rest."""
    sim = handed_over(engine)
    (request,), (moved,) = sim.sequences, sim.transfers
    assert ends_s(sim, 0)[0] < moved.end_s == request.first_token_s
    assert sum(i.steps for i in sim.pools[1].replicas[0].iterations) == 31
    assert request.generated == 32


def test_vllms_decode_server_samples_the_first_token() -> None:
    """The prefill server's token is dropped: the decode server has the request from the proxy once the other has
    answered, waits for the cache, and adds all 32 tokens, the first of them from the prompt's last token."""
    sim = handed_over("vllm-0.19")
    (request,), (moved,) = sim.sequences, sim.transfers
    host = sim.pools[1].costs.host
    assert host.front is not None
    (computed_s,) = ends_s(sim, 0)
    answered_s = host.front.after_s(1, computed_s)[1]
    assert moved.asked_s == pytest.approx(computed_s + answered_s + host.times.before_s(1000), rel=1e-9)
    assert moved.tokens == 1000
    first = sim.pools[1].replicas[0].iterations[0]
    assert (first.load.tokens, first.load.decode_kv) == (1, 1000)
    assert request.first_token_s == first.spans[0][1] > moved.end_s
    assert sum(i.steps for i in sim.pools[1].replicas[0].iterations) == 32


def test_trtllms_decode_server_gets_tokens_not_text() -> None:
    """Its HTTP takes its time, its tokenizer does not."""
    sim = handed_over("trtllm-1.0")
    (moved,), host = sim.transfers, sim.pools[1].costs.host
    assert host.front is not None
    (computed_s,) = ends_s(sim, 0)
    expected_s = computed_s + host.front.after_s(1, computed_s)[1] + host.times.request_s
    assert moved.asked_s == pytest.approx(expected_s, rel=1e-9)


def test_sglang_sends_each_chunk_once_it_is_computed() -> None:
    """Four chunks: the first three are on their way while the next is computed, so the last alone is waited for."""
    sim = handed_over("sglang-0.5", prompt=1000, max_batch_tokens=256)
    assert [t.tokens for t in sim.transfers] == [256, 256, 256, 232]
    assert [t.asked_s for t in sim.transfers] == ends_s(sim, 0)
    assert [t.last for t in sim.transfers] == [False, False, False, True]
    assert sim.result["transfers"]["count"] == 1
    whole = handed_over("trtllm-1.0", prompt=1000, max_batch_tokens=256, chunked_prefill=True)
    assert [t.tokens for t in whole.transfers] == [1000]


def test_a_full_decode_server_of_sglang_holds_prompts_back() -> None:
    """It has room for one request at a time (512 tokens stay free beside each): the second prompt is computed once the
    first request has all its tokens. vLLM computes it at once."""
    requests = (Request(0.0, 600, 40), Request(0.0, 600, 40))
    for engine, waits in (("sglang-0.5", True), ("vllm-0.19", False)):
        own = {"engine": engine, "max_batch_tokens": 700, "disaggregated": ONE_EACH}
        scenario = serving({**own, "kv_cache": {"memory_fraction": 0.9}}, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS})
        sim = simulate_serving(scenario, requests=requests)
        assert sim.capacity.blocks * sim.scenario.for_serving.kv_cache.block_tokens > 600
        first, second = sim.sequences
        assert (second.admitted_s >= first.finish_s) is waits


def test_a_prefill_server_of_sglang_keeps_room_for_one_token_of_output() -> None:
    """Its max_new_tokens is 1: an answer of 3,000 tokens, which the other pool writes, keeps no prompt out of 200
    blocks."""
    requests = tuple([Request(0.0, 100, 3000) for _ in range(2)])
    sim = simulate_serving(serving({"engine": "sglang-0.5", "disaggregated": ONE_EACH}), requests=requests)
    for pool, enters in zip(sim.pools, (True, False), strict=True):
        (replica,) = pool.replicas
        scheduler = replica.scheduler
        assert isinstance(scheduler, SglangScheduler)
        scheduler.takes_over = False
        scheduler.cache.free = 200
        scheduler.running = [Sequence(requests[0], 0)]
        assert scheduler._may_enter(Sequence(requests[1], 1), 0) is enters
