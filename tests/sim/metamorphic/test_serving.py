"""What must hold between serving workloads that differ in one thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import parse_scenario
from sim.results.records import Record
from sim.serve.replicas.router import ROUTERS
from sim.serve.requests import make_requests
from sim.serve.results.other_servers import with_intervals
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.metamorphic.laws import run, vary

CLUSTERS = ["dgx-v100", "dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72"]
MODELS = ["llama3.2-1b", "llama3-8b", "qwen3-30b-a3b", "llama2-13b", "mistral-7b"]
FEW = settings(max_examples=15, deadline=None)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A few requests to a model that fits."""
    cluster = draw(st.sampled_from(CLUSTERS))
    return {
        "model": draw(st.sampled_from(MODELS)),
        "cluster": {"preset": cluster, "gpu": {"memory_bytes": 4e11}},
        "parallelism": {"tp": draw(st.sampled_from([1, 4])), "pp": draw(st.sampled_from([1, 2]))},
        "inference": {
            "precision": "fp16" if cluster == "dgx-v100" else "bf16",
            "requests": {
                "prompt_len": draw(st.sampled_from([100, 1000])),
                "count": draw(st.sampled_from([1, 10, 40])),
                "output_len": draw(st.sampled_from([2, 64])),
            },
            "batching": draw(st.sampled_from(["continuous", "static"])),
        },
    }


@FEW
@given(scenario=scenarios())
def test_more_tokens_take_longer_and_more_cache(scenario: dict[str, Any]) -> None:
    base, cache = run(**scenario), 0
    # measured kernels have steps; on two stages those decode together whose prompts ended together: 9 + 1 or 5 + 5
    prompt_loss = 0.98 if scenario["parallelism"]["pp"] == 1 else 0.9
    for key, loss in (("prompt_len", prompt_loss), ("output_len", 1.0), ("count", 0.95)):
        more = vary(scenario, **{f"inference__requests__{key}": 2 * scenario["inference"]["requests"][key]})
        assert more["duration_s"] > base["duration_s"] * loss, key
        cache = max(cache, more["kv_cache"]["blocks_used"])
    assert cache > base["kv_cache"]["blocks_used"]
    first, whole = base["time_to_first_token_s"]["p50"], base["request_latency_s"]["p50"]
    assert 0 < first < whole


@FEW
@given(scenario=scenarios())
def test_fewer_bits_are_fewer_bytes(scenario: dict[str, Any]) -> None:
    held = [
        vary(scenario, inference__quantization=q)["memory"][0]["parameters"]
        for q in ("none", "int8_weight_only", "int4_weight_only")
    ]
    assert held == sorted(held, reverse=True)
    assert held[2] < 0.75 * held[0]
    fp8 = vary(scenario, inference__kv_cache={"dtype": "fp8"})["kv_cache"]["bytes_per_token"]
    assert fp8 == 0.5 * run(**scenario)["kv_cache"]["bytes_per_token"]


@pytest.mark.parametrize(
    ("cluster", "bytes_per_s"), [("dgx-a100", 2.04e12), ("dgx-h100", 3.35e12), ("dgx-h200", 4.8e12)]
)
@pytest.mark.parametrize(("model", "params"), [("llama3-8b", 8.03e9 - 0.53e9), ("llama2-13b", 13.0e9 - 0.16e9)])
def test_one_sequence_decodes_as_fast_as_weights_are_read(
    cluster: str, bytes_per_s: float, model: str, params: float
) -> None:
    result = run(model=model, cluster=cluster, inference={"requests": {"prompt_len": 128, "output_len": 32}})
    least_s = 2 * params / bytes_per_s
    assert least_s < result["time_per_output_token_s"]["p50"] < 1.7 * least_s


@pytest.mark.parametrize(
    ("cluster", "flops_per_s"), [("dgx-a100", 312e12), ("dgx-h100", 989e12), ("dgx-b200", 2250e12)]
)
def test_a_long_prompt_is_bound_by_matrix_units(cluster: str, flops_per_s: float) -> None:
    tokens, params = 8192, 7.5e9
    result = run(model="llama3.1-8b", cluster=cluster, inference={"requests": {"prompt_len": tokens, "output_len": 2}})
    flops = 2 * params * tokens + 2 * 32 * 4096 * tokens**2  # matmuls, and attention under its mask
    assert 0.4 < flops / flops_per_s / result["time_to_first_token_s"]["p50"] < 0.9


def test_cache_is_linear_in_tokens_and_in_what_a_layer_keeps() -> None:
    def used(prompt: int, **keys: Any) -> dict[str, Any]:
        requests = {"prompt_len": prompt, "output_len": 2}
        return dict(run(model="llama3-8b", cluster="dgx-h100", inference={"requests": requests}, **keys)["kv_cache"])

    assert used(16_000)["blocks_used"] / used(4_000)["blocks_used"] == pytest.approx(4, rel=0.01)
    assert used(1000)["bytes_per_token"] == 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, size, bytes
    assert used(1000, parallelism={"tp": 4})["bytes_per_token"] == used(1000)["bytes_per_token"] / 4


arriving = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(list(ENGINES)),
        "requests": st.fixed_dictionaries(
            {
                "prompt_len": st.integers(1, 2000),
                "output_len": st.integers(2, 100),
                "count": st.integers(1, 40),
                "rate_per_s": st.sampled_from([0.5, 5, 50, 500]),
            }
        ),
        "prefix_cache": st.just("none"),
        "max_running_requests": st.sampled_from([4, 256]),
    }
)


def served(inference: dict[str, Any], tp: int, late_s: float = 0.0, **parallelism: int) -> ServingSimulation:
    """Llama 3 8B on H100s; all requests come `late_s` later."""
    data = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": inference}
    scenario = parse_scenario({**data, "parallelism": {"tp": tp, **parallelism}})
    requests = make_requests(scenario.for_serving.requests)
    return simulate_serving(scenario, requests=tuple(r._replace(arrival_s=r.arrival_s + late_s) for r in requests))


@FEW
@given(inference=arriving, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]))
def test_little_s_law_and_the_sum_of_tokens(inference: dict[str, Any], tp: int, pp: int) -> None:
    """Sequences that run, over time, are what each of them runs; iterations compute every token once."""
    sim = served(inference, tp, pp=pp)
    states = sim.replicas[0].states.arrays()
    running_s = float((np.diff(states.time_s) * states.running[:-1]).sum())
    assert running_s == pytest.approx(sum(s.finish_s - s.admitted_s for s in sim.sequences))
    computed = sum(i.load.tokens * i.steps for i in sim.replicas[0].iterations)
    more = len(sim.requests) * sim.replicas[0].scheduler.token_more  # at most one for each that has ended
    assert 0 <= computed - sum(r.prompt_tokens + r.output_tokens - 1 for r in sim.requests) <= more


@FEW
@given(inference=arriving, tokens=st.integers(3_000, 30_000))
def test_more_cache_never_lengthens_a_run(inference: dict[str, Any], tokens: int) -> None:
    """A request may take longer beside more others, but all of them do not: by less than an iteration's rounding. No
    block is used that does not exist."""
    caches = [{"max_tokens": tokens}, {"max_tokens": 2 * tokens}, {}]
    few, more, all_ = [served({**inference, "kv_cache": cache}, 1) for cache in caches]
    for sim in (few, more, all_):
        assert sim.outcome.kv_cache.blocks_used <= sim.outcome.kv_cache.blocks
    assert more.end_s <= 1.02 * few.end_s
    assert all_.end_s <= 1.02 * more.end_s


@FEW
@given(inference=arriving, tp=st.sampled_from([1, 2]))
def test_a_trace_may_begin_at_any_time(inference: dict[str, Any], tp: int) -> None:
    now, later = (with_intervals(served(inference, tp, late_s)) for late_s in (0.0, 1e4))
    assert now.intervals is not None
    assert later.intervals is not None
    for name in now.intervals.__struct_fields__:
        for a, b in ((now, later), (now.intervals, later.intervals)):
            before, after = (
                x.to_json() if isinstance(x, Record) else {"": x} for x in (getattr(a, name), getattr(b, name))
            )
            np.testing.assert_allclose(list(after.values()), list(before.values()), rtol=1e-6)
    assert np.subtract(later.duration_interval_s, 1e4) == pytest.approx(now.duration_interval_s, rel=1e-6)


@FEW
@given(inference=arriving, router=st.sampled_from(list(ROUTERS)))
def test_a_router_of_one_replica_is_none(inference: dict[str, Any], router: str) -> None:
    alone, routed = served(inference, 1), served({**inference, "router": router}, 1)
    assert [s.finish_s for s in routed.sequences] == [s.finish_s for s in alone.sequences]
