"""Gaps between outputs: closed forms, and that a request's add up to the time from its first output to its last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.serve.requests import Request
from sim.serve.results.latencies import token_gaps
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.cases import llama_like
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, every_way, requests_of, serving, settings_of

MIXTURE = {**SMALL, "hidden": 1024, "heads": 8, "moe": {"experts": 16, "top_k": 2, "ffn": 4096}}
DRAFT = llama_like(layers=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=1024)
CLOSED = {"prompt_len": 300, "output_len": 30, "count": 16, "max_concurrency": 3}
FIRST = ("vllm-0.2.7", "vllm-0.6", "sglang-0.4.6", "sglang-0.5")  # prompts before tokens


def adds_up(sim: ServingSimulation, outputs: int | None = None) -> None:
    """The seconds of all gaps, and how many there are: one for each token after a request's first, or `outputs`."""
    found = token_gaps(sim.replicas)
    seconds, count = (0.0, 0.0) if found is None else (float(found.seconds @ found.tokens), found.tokens.sum())
    assert seconds == pytest.approx(sum(s.finish_s - s.first_token_s for s in sim.sequences), rel=1e-9)
    assert count == (sum(s.request.output_tokens - 1 for s in sim.sequences) if outputs is None else outputs)
    if found is not None:
        assert found.tokens.min() >= 0
        assert found.seconds.min() > 0


def means(sim: ServingSimulation) -> tuple[float, float]:
    """Over tokens: of the gaps between them, and of their requests' mean seconds each, both as the engine makes them.

    A client has first and last tokens somewhat later, each by its own time of the server's process."""
    served = [s for s in sim.sequences if s.request.output_tokens > 1]
    several = [s.request.output_tokens - 1 for s in served]
    later_s = np.array([s.last_after_s - s.first_after_s for s in served]) / several
    return sim.outcome.inter_token_latency_s.mean, np.average(sim.times.per_output_token_s - later_s, weights=several)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_request_alone_waits_for_its_own_tokens_only(pp: int) -> None:
    """Its pipeline stages have nothing else to do, and each token takes a little more than the one before."""
    for sim in every_way(serving({"requests": {"prompt_len": 512, "output_len": 33}}, parallelism={"pp": pp})):
        adds_up(sim)
        own, per_token_s = sim.outcome.inter_token_latency_s, sim.outcome.time_per_output_token_s.mean
        assert own.mean == pytest.approx(per_token_s, rel=1e-9)
        assert 0.9 * per_token_s < own.p50 <= own.p99 < 1.1 * per_token_s


@pytest.mark.parametrize("engine", FIRST)
def test_a_prompt_that_comes_first_is_in_the_gap_of_who_waits(engine: str) -> None:
    """A long prompt of another request, computed alone while the first request has tokens to come: one of its gaps is
    longer than that prompt takes."""
    two = (Request(0.0, 16, 200), Request(1e-3, 6000, 1))
    sim = simulate_serving(serving({"engine": engine, "chunked_prefill": False}), requests=two)
    first, second = sorted(sim.sequences, key=lambda s: s.index)
    assert first.first_token_s <= second.admitted_s < second.finish_s < first.finish_s
    adds_up(sim)
    prompt_s = max(i.spans[-1][1] - i.spans[0][0] for i in sim.replicas[0].iterations if i.load.tokens >= 6000)
    assert sim.gaps is not None
    assert sim.gaps.seconds[-1] > prompt_s
    assert sim.gaps.tokens[-1] == 1


@settings(max_examples=60, deadline=None)
@given(requests_of, settings_of, st.floats(1e5, 3e6), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_gaps_add_up_whoever_waits_for_whom(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, pp: int, dp: int
) -> None:
    """Also where sequences are preempted, computed again, copied away, or where the last token is lost. On every clock
    the same gaps."""
    gpu = {"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}
    sims = every_way(serving(inference, gpu=gpu, parallelism={"pp": pp, "dp": dp}), requests=requests)
    for sim in sims:
        adds_up(sim)
        if max(r.output_tokens for r in requests) > 1:
            gaps_s, requests_s = means(sim)
            assert gaps_s == pytest.approx(requests_s, rel=1e-9)
            assert sim.gaps is not None
            assert sim.gaps.seconds[-1] == pytest.approx(sims[0].gaps.seconds[-1], rel=1e-9)  # type: ignore[union-attr]


@settings(max_examples=40, deadline=None)
@given(
    requests_of,
    settings_of,
    st.sampled_from(
        [
            ({"router": "least_loaded"}, {"dp": 2}, SMALL),
            ({"router": "prefix_aware"}, {"dp": 3}, SMALL),
            ({"batching": "static"}, {"pp": 2}, SMALL),
            ({"requests": CLOSED}, {"dp": 2}, SMALL),
            ({}, {"dp": 4, "ep": 4}, MIXTURE),
            ({"disaggregated": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}}, {}, SMALL),
            ({"disaggregated": {"prefill": {"tp": 2}, "decode": {}}}, {}, SMALL),
        ]
    ),
)
def test_gaps_add_up_over_replicas_and_pools(
    requests: tuple[Request, ...],
    inference: dict[str, Any],
    case: tuple[dict[str, Any], dict[str, int], dict[str, Any]],
) -> None:
    more, parallelism, model = case
    adds_up(simulate_serving(serving({**inference, **more}, model, parallelism=parallelism), requests=requests))


@settings(max_examples=30, deadline=None)
@given(requests_of, st.sampled_from([1, 2]), st.booleans(), st.floats(0, 1))
def test_tokens_that_come_together_have_one_gap(
    requests: tuple[Request, ...], pp: int, pools: bool, acceptance: float
) -> None:
    """Drafted tokens: each check of a request's gives one output, and one that has no drafts (the first after a
    handover, with some engines) another."""
    inference: dict[str, Any] = {"speculative": {"draft": DRAFT, "tokens": 3, "acceptance": acceptance}}
    if pools:
        inference["disaggregated"] = {"prefill": {}, "decode": {}}
    sim = simulate_serving(serving(inference, parallelism={} if pools else {"pp": pp}), requests=requests)
    adds_up(sim, sum(r.counts.verifications for r in sim.replicas))
