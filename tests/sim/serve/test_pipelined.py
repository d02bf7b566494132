"""Groups that go through pipeline stages together change no result: the scheduler that looks at everybody is the
reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.serve.pipelined import Pipelined
from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, finished, serving

ENGINES: list[dict[str, Any]] = [
    {},
    {"preemption": "swap"},
    {"prefix_cache": "gpu"},
    {"engine": "vllm-0.14", "prefix_cache": "gpu"},
    {"engine": "trtllm-1.2"},
    {"engine": "trtllm-1.2", "chunked_prefill": True},
]
requests_of = st.lists(
    st.tuples(st.floats(0, 0.02), st.integers(1, 400), st.integers(1, 120), st.sampled_from(["", "a", "b"])),
    min_size=1,
    max_size=40,
)


def _requests(drawn: list[tuple[float, int, int, str]]) -> tuple[Request, ...]:
    rows = sorted(drawn, key=lambda row: row[0])
    return tuple([Request(at, prompt, output, name, prompt // 2 if name else 0) for at, prompt, output, name in rows])


@settings(max_examples=60, deadline=None)
@given(
    requests_of,
    st.sampled_from(ENGINES),
    st.sampled_from([2, 4]),
    st.sampled_from([4, 8, 256]),
    st.sampled_from([256, 8192]),
    st.sampled_from([2e6, 1e7, 1e9]),
    st.sampled_from(["static", "simpy"]),
)
def test_groups_of_a_pipeline_change_nothing(
    drawn: list[tuple[float, int, int, str]],
    inference: dict[str, Any],
    pp: int,
    running: int,
    tokens: int,
    cache_bytes: float,
    engine: Any,
) -> None:
    inference = {**inference, "max_running_requests": running, "max_batch_tokens": tokens}
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism={"pp": pp})
    grouped, single = (
        simulate_serving(scenario, requests=_requests(drawn), group=g, engine=engine) for g in (True, False)
    )
    for a, b in zip(grouped.sequences, single.sequences, strict=True):
        assert (a.first_token_s, a.finish_s, a.preemptions) == (b.first_token_s, b.finish_s, b.preemptions)
    finished(grouped)
    assert grouped.replicas[0].counts == single.replicas[0].counts
    assert grouped.replicas[0].iterations == single.replicas[0].iterations
    assert grouped.result["inter_token_latency_s"] == single.result["inter_token_latency_s"]
    for key in ("blocks_used_mean", "waste", "running_mean"):
        assert grouped.result["kv_cache"][key] == pytest.approx(single.result["kv_cache"][key], rel=1e-12, abs=1e-12)


def test_most_iterations_of_a_pipeline_look_at_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM over four stages with room for all: the scheduler is never asked to look at everybody."""
    settled: list[int] = []
    monkeypatch.setattr(Pipelined, "settle", lambda self: settled.append(len(self.under_way)))
    requests = {"prompt_len": 100, "output_len": 64, "count": 64, "rate_per_s": 2000}
    sim = simulate_serving(serving({"engine": "vllm-0.14", "requests": requests}, parallelism={"pp": 4}))
    finished(sim)
    assert not settled
