"""LoRA adapters on one base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.models.layers import layer_specs
from sim.models.serving.adapters import adapter_elements
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request, read_trace
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, finished, requests_of, serving, settings_of

SCENARIO = Path(__file__).parents[3] / "scenarios" / "serve_lora.yaml"
ALL = ("qkv", "attention_out", "mlp_up", "mlp_down")


def served(inference: dict[str, Any], requests: tuple[Request, ...] | None = None, **options: Any) -> ServingSimulation:
    sim = simulate_serving(serving(inference, **options), requests=requests)
    finished(sim)
    return sim


def test_an_adapters_parameters_are_pefts() -> None:
    """PEFT prints 39,976,960 trainable parameters for rank 16 on all linear layers of Llama 2 7B."""
    specs = layer_specs(serving(model="llama2-7b").model)
    assert sum(adapter_elements(spec, 1, ALL, 16) for spec in specs) == 39_976_960


def test_one_adapter_is_the_merged_models_time_and_its_own_operators() -> None:
    """Merged weights are the base model's in number. Beside the first copy, every layer's four pairs of kernels move
    what Punica's formula says."""
    batch = {"batching": "static", "requests": {"prompt_len": 100, "output_len": 9, "count": 6}}
    merged, sim = served(batch), served({**batch, "lora": {"adapters": 1, "rank": 8}})
    d, bandwidth = sim.costs.dims, sim.scenario.cluster.gpu.memory_bandwidth_bytes_per_s

    def moved(t: int) -> float:
        total = 0.0
        for k, widths in ((256, (256, 64, 64)), (256, (256,)), (256, (1024, 1024)), (1024, (256,))):
            s, n, r = len(widths), sum(widths), 8
            total += 2 * t * k + 2 * s * r * k + 4 * t * s * r + 4 * t * s * r + 2 * r * n + 2 * 2 * t * n
        return 4 * total

    copy = sim.replicas[0].scheduler.adapters.copy_s
    own = sim.end_s - copy - merged.end_s
    launches = 8 * 4 * 9 * sim.costs.prices.pricing.costs.launch_overhead_s
    assert moved(600) / bandwidth + 8 * moved(6) / bandwidth <= own
    assert own == pytest.approx((moved(600) + 8 * moved(6)) / bandwidth + launches, rel=0.2)
    assert d.act_bytes == 2
    assert sim.outcome.lora is not None
    assert (sim.outcome.lora.loads, sim.outcome.lora.distinct_mean) == (1, 1.0)


def test_more_adapters_in_a_batch_cost_the_reading_of_their_weights() -> None:
    costs = iteration_costs(serving({"lora": {"adapters": 64}}, model="llama3-8b"), load_profile("h100-sxm"))
    seconds = [costs.stage_seconds(Load(64, 64, 64 * 512, (), 64, 1, 0, 64, n))[0] for n in (1, 8, 64)]
    assert seconds == sorted(seconds)
    each = sum(adapter_elements(spec, 1, ALL, 16) for spec in layer_specs(serving(model="llama3-8b").model)) * 2
    bound = 63 * each / 3.35e12
    assert bound < seconds[2] - seconds[0] < 2 * bound


def test_places_are_taken_from_the_cache() -> None:
    requests = {"requests": {"prompt_len": 100, "output_len": 9, "count": 6}}
    base, lora = served(requests), served({**requests, "lora": {"adapters": 40, "max_loras": 10}})
    size = lora.outcome.lora.adapter_bytes
    assert size == 2 * sum(adapter_elements(spec, 1, ALL, 16) for spec in layer_specs(base.scenario.model))
    assert lora.capacity.weight_bytes[0] - base.capacity.weight_bytes[0] == 10 * size


def test_who_has_no_place_waits_and_is_passed_over() -> None:
    """One place: the second adapter's request waits until both of the first's are done; the later one overtakes it."""
    requests = tuple([Request(0.0001 * i, 50, 20, "", 0, (), name) for i, name in enumerate("aba")])
    sim = served({"lora": {"adapters": 2, "max_loras": 1}}, requests)
    a, b, c = sorted(sim.sequences, key=lambda s: s.index)
    assert c.admitted_s < b.admitted_s
    assert b.admitted_s >= max(a.finish_s, c.finish_s)
    assert b.first_token_s >= b.admitted_s + sim.replicas[0].scheduler.adapters.copy_s
    assert all(i.load.adapters == 1 for i in sim.replicas[0].iterations)
    assert sim.outcome.lora.loads == 2


@settings(max_examples=30, deadline=None)
@given(
    requests_of,
    settings_of,
    st.floats(1e5, 3e6),
    st.sampled_from([{}, {"pp": 2}, {"dp": 2}]),
    st.fixed_dictionaries(
        {"adapters": st.integers(1, 6), "max_loras": st.none() | st.integers(1, 6), "zipf": st.floats(0, 2)}
    ),
)
def test_any_workload_is_served_alike_on_both_clocks(
    requests: tuple[Request, ...],
    inference: dict[str, Any],
    cache_bytes: float,
    parallelism: dict[str, int],
    lora: dict[str, Any],
) -> None:
    own = {**inference, "lora": lora, "router": "round_robin"}  # the quick pass knows no other
    scenario = serving(own, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    quick, simpy = (simulate_serving(scenario, requests=requests, engine=e) for e in ("static", "simpy"))
    places = scenario.for_serving.lora.places
    for sim in (quick, simpy):
        finished(sim)
        assert all(i.load.adapters <= places for r in sim.replicas for i in r.iterations)
        assert not any(r.scheduler.adapters.users for r in sim.replicas)
    for a, b in zip(quick.sequences, simpy.sequences, strict=True):
        assert a.finish_s == pytest.approx(b.finish_s, rel=1e-9)
    assert quick.outcome.lora.loads == simpy.outcome.lora.loads


def test_prefixes_are_an_adapters_own() -> None:
    requests = tuple([Request(float(i), 160, 4, "system", 128, (), name) for i, name in enumerate("aabb")])
    sim = served({"prefix_cache": "gpu", "lora": {"adapters": 2}}, requests)
    assert sim.outcome.kv_cache.prefix_hit_tokens == 2 * 128


def test_a_trace_names_adapters(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,adapter_id\n0,10,2,legal\n0,10,2,\n")
    assert [r.adapter for r in read_trace(file)] == ["legal", ""]
    sim = served({"lora": {"adapters": 3}}, read_trace(file))
    assert {i.load.adapted for i in sim.replicas[0].iterations} >= {1}
    assert sim.outcome.lora.adapters == 1
    with pytest.raises(InputError, match=r"names LoRA adapters \(adapter_id\); inference.lora says their rank"):
        simulate_serving(serving(), requests=read_trace(file))


@pytest.mark.parametrize("max_loras", [None, 3, 8])
def test_a_trace_that_names_more_adapters_than_the_scenario_is_as_one_that_says_their_number(
    max_loras: int | None,
) -> None:
    requests = tuple([Request(0.001 * i, 50, 20, "", 0, (), name) for i, name in enumerate("abcdeabcde")])
    silent, said = (served({"lora": {**n, "max_loras": max_loras}}, requests) for n in ({}, {"adapters": 5}))
    assert silent.outcome.lora == said.outcome.lora
    assert silent.outcome.lora.places == min(5, max_loras or 5)
    assert silent.capacity == said.capacity
    assert silent.end_s == said.end_s


def test_the_shipped_scenario_swaps() -> None:
    swapping = simulate_serving(load_scenario(SCENARIO)).outcome
    room = simulate_serving(load_scenario(SCENARIO, ("inference.lora.max_loras=null",))).outcome
    assert swapping.lora.loads > room.lora.loads
    assert swapping.time_to_first_token_s.p99 > room.time_to_first_token_s.p99


@pytest.mark.parametrize(
    ("inference", "model", "message"),
    [
        (
            {"lora": {}},
            "mixtral-8x7b",
            "targets: left out, so 'mlp_up' is one; adapters of this model are on qkv, attention_out",
        ),
        (
            {"lora": {"adapters": 2, "max_loras": 1}, "batching": "static"},
            None,
            "max_loras: found 1; a static batch starts all requests at once",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(inference: dict[str, Any], model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        serving(inference, model=model)
