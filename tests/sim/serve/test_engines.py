"""Engines as records: what a fact changes, and that none is asked for by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import parse_scenario
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.host import host_of
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.iteration_shares import HOST, priced_together
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from sim.variants.engines.defaults import Defaults
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.record import Engine
from sim.views.summary import SHARES
from tests.sim.cases import scenario_with
from tests.sim.serve.serving_cases import (
    ONE,
    WEIGHTS_AND_BUFFERS,
    costs_of,
    engine_scenario,
    every_way,
    requests_of,
    serving,
    settings_of,
)


def costs(engine: str, **more: Any) -> IterationCosts:
    return costs_of(engine_scenario(engine, **more))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add an engine of one's own: no more than a record is needed."""

    def add(**facts: Any) -> str:
        host = {"hopper": facts.pop("host", HostTimes())}
        monkeypatch.setitem(ENGINES, "own", Engine("own", "own", (), "2026-01", "a test", host=host, **facts))
        return "own"

    return add


def decode(n: int = 4, kv: int = 128) -> Load:
    return Load(n, n, n * kv, (), n)


def test_the_bundled_engine_is_what_is_simulated_without_one() -> None:
    data = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": ONE}}
    plain = simulate_serving(parse_scenario(data)).result
    named = simulate_serving(parse_scenario({**data, "inference": {"requests": ONE, "engine": "bundled"}})).result
    assert plain["duration_s"] == named["duration_s"]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_is_faster_than_its_weights_are_read(engine: str) -> None:
    result = simulate_serving(engine_scenario(engine)).result
    assert result["time_per_output_token_s"]["p50"] > 16.06e9 / 3.35e12


def test_what_lies_between_iterations_is_added_to_the_gpu(made: Any) -> None:
    host = HostTimes(iteration_s=1e-3, rank_s=2e-3, sequence_s=3e-4, prompt_s=5e-3)
    own, bare = costs(made(host=host), tp=2), costs("bundled", tp=2)
    more = own.stage_seconds(decode())[0] - bare.stage_seconds(decode())[0]
    assert more == pytest.approx(1e-3 + 2e-3 + 4 * 3e-4)
    prompts = Load(256, 0, 0, ((128, 128, 2),), 2)
    assert own.stage_seconds(prompts)[0] - bare.stage_seconds(prompts)[0] == pytest.approx(8e-3 + 2 * 3e-4)


def test_a_run_of_steps_is_the_sum_of_its_steps(made: Any) -> None:
    own = costs(made(host=HostTimes(iteration_s=1e-3, sequence_s=1e-5, launch_s=1e-5), defaults=Defaults(graphs_to=8)))
    run = own.decode_run(16, 16 * 100, 5)
    each = [own.stage_seconds(Load(16, 16, 16 * (100 + i), (), 16))[0] for i in range(5)]
    np.testing.assert_allclose(run, each, rtol=1e-12)


def test_an_overlapped_host_is_hidden_until_it_is_slower(made: Any) -> None:
    bare = costs("bundled").stage_seconds(decode())[0]
    hidden = costs(made(host=HostTimes(iteration_s=bare / 2), overlaps=True))
    assert hidden.stage_seconds(decode())[0] == bare
    slow = costs(made(host=HostTimes(iteration_s=3 * bare), overlaps=True))
    assert slow.stage_seconds(decode())[0] == 3 * bare


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("times", [0.5, 1.1, 4.0])
def test_an_overlapping_host_works_while_the_gpu_drafts(made: Any, overlaps: bool, times: float) -> None:
    """max(GPU + draft, host), or all three in turn; the host takes so many times what the GPU takes without a draft."""
    check = Load(20, 4, 4 * 133, (), 20, 5)
    steps = [Load(20, 4, 4 * 133, (), 4, 5), *[Load(4, 4, 4 * (129 + i), (), 4) for i in range(1, 4)]]
    gpu_s = costs("bundled").stage_seconds(check)[0]
    draft_s = sum(costs("bundled", model="llama3.2-1b").stage_seconds(step)[0] for step in steps)
    host_s = times * gpu_s
    engine = made(host=HostTimes(iteration_s=host_s), overlaps=overlaps)
    own = costs(engine, speculative={"draft": "llama3.2-1b", "tokens": 4})
    expected = max(gpu_s + draft_s, host_s) if overlaps else gpu_s + draft_s + host_s
    assert own.stage_seconds(check)[0] == pytest.approx(expected, rel=1e-12)
    waits_s = priced_together(own, [(check, 1)]).shares.get((HOST, "host", 0.0), 0.0)
    assert waits_s == pytest.approx(expected - gpu_s - draft_s, abs=1e-12)


def test_graphs_hide_launches_and_pad_the_batch(made: Any) -> None:
    bare = costs("bundled")
    own = costs(made(host=HostTimes(launch_s=1e-3), defaults=Defaults(graphs_to=16)))
    assert own.stage_seconds(Load(8, 8, 800, (), 8)) == bare.stage_seconds(Load(8, 8, 800, (), 8))
    padded = own.stage_seconds(Load(9, 9, 900, (), 9))[0] - bare.stage_seconds(Load(9, 9, 900, (), 9))[0]
    layers = bare.stage_seconds(Load(16))[0] - bare.stage_seconds(Load(9))[0]
    assert 0 < padded <= layers * 1.001  # the embedding of nine
    assert own.stage_seconds(Load(17, 17, 1700, (), 17))[0] > own.host.kernels[0] * 1e-3


@pytest.mark.parametrize(
    ("engine", "ep", "choosing"),
    [
        *[("vllm-0.6", 1, 10), ("vllm-v1", 1, 16), ("vllm-0.28", 1, 16), ("vllm-0.29", 1, 9), ("vllm-0.29", 2, 9)],
        *[("sglang-0.5", 1, 12), ("sglang-0.5", 2, 9), ("trtllm-1.0", 1, 10)],
    ],
)
def test_tokens_that_pad_a_batch_choose_experts_as_the_engine_lets_them(engine: str, ep: int, choosing: int) -> None:
    """Nine sequences in a graph for 12 or 16: all else is computed for so many, experts for those that choose."""
    section = {"engine": engine, "requests": ONE}
    layout = {"tp": ep, "ep": ep}
    data = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "parallelism": layout, "inference": section}
    s = parse_scenario(data)
    own = costs_of(s)
    padded = own.host.padded(9)
    found = own.device_seconds(Load(9, 0, 0, (), 9))[0]  # without attention
    every, experts = (
        [own.priced(Key(work, 0, n)).seconds for n in (padded, choosing)] for work in (Work.LAYER, Work.ROUTED)
    )
    embedding = own.priced(Key(Work.EMBEDDING, 0, 9)).seconds + own.priced(Key(Work.HEAD, 0, 9)).seconds
    assert found == pytest.approx(48 * (every[0] - experts[0] + experts[1]) + embedding)
    assert (choosing == padded) == (experts[0] == experts[1])


@pytest.mark.parametrize(("model", "choosing"), [("deepseek-v3", 16), ("qwen3-235b-a22b", 9)])
def test_a_router_of_groups_lets_padding_choose(model: str, choosing: int) -> None:
    """vLLM's grouped router has no mask of padding."""
    section = {"engine": "vllm-0.29", "requests": ONE}
    data = {"model": model, "cluster": "dgx-h200", "parallelism": {"tp": 8, "ep": 8}, "inference": section}
    s = parse_scenario(data)
    assert costs_of(s).host.routed(9, False, True) == choosing


@pytest.mark.parametrize(("model", "group"), [("llama3-8b", 4), ("llama2-7b", 1)])
def test_a_group_of_query_heads_reads_part_of_its_kv_head_from_memory(made: Any, model: str, group: int) -> None:
    """(1 + g · (group - 1)) / group of the bytes, and of the time, where launches are nothing beside them."""
    key = Key(Work.DECODE, 0, 256, 8192, 1)

    def attention_s(reads: float) -> float:
        return costs(made(decode_attention="per_head", group_reads=reads), model=model).priced(key).seconds

    assert attention_s(0.5) / attention_s(1.0) == pytest.approx((1 + 0.5 * (group - 1)) / group, rel=0.02)


@pytest.mark.parametrize("engine", ["vllm-v1", "vllm-0.6"])
def test_seconds_by_kind_are_those_of_all_iterations(engine: str) -> None:
    """Of nine sequences in graphs for sixteen, whose padding chooses experts."""
    requests = {"prompt_len": 8, "output_len": 200, "count": 9}
    section = {"engine": engine, "requests": requests}
    sim = simulate_serving(parse_scenario({"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "inference": section}))
    busy = sum(end - start for r in sim.replicas for i in r.iterations for start, end in i.spans)
    assert sum(sim.shares.values()) == pytest.approx(busy, rel=0.01)


def test_an_iteration_with_prompts_is_padded_where_graphs_serve_it() -> None:
    own, before = costs("vllm-v1"), costs("vllm-0.6")
    assert (own.host.padded(300, True), before.host.padded(300, True), before.host.padded(250)) == (304, 300, 256)


def test_without_graphs_all_kernels_are_launched_and_nothing_is_padded(made: Any) -> None:
    record = made(host=HostTimes(launch_s=1e-3), defaults=Defaults(graphs_to=16))
    own, none = costs(record, cuda_graphs=False), costs(made(host=HostTimes(launch_s=1e-3)))
    for tokens in (8, 9, 17):
        load = Load(tokens, tokens, 100 * tokens, (), tokens)
        assert own.stage_seconds(load) == none.stage_seconds(load)
    assert own.stage_seconds(Load(8, 8, 800, (), 8))[0] > own.host.kernels[0] * 1e-3


@pytest.mark.parametrize(("engine", "warned"), [("vllm-v1", False), ("vllm-0.2", True)])
def test_an_engine_that_keeps_no_graphs_is_told_so(engine: str, warned: bool) -> None:
    warnings = engine_scenario(engine, cuda_graphs=False).warnings
    assert any("cuda_graphs: of no effect" in text for text in warnings) == warned


def test_per_head_kernels_read_the_cache_for_every_query_head() -> None:
    grouped, each = (costs("bundled", decode_attention=kind) for kind in ("grouped", "per_head"))
    batch = Load(64, 64, 64 * 8192, (), 64)
    ratio = (each.stage_seconds(batch)[0] - each.stage_seconds(Load(64, 0, 0, (), 64))[0]) / (
        grouped.stage_seconds(batch)[0] - grouped.stage_seconds(Load(64, 0, 0, (), 64))[0]
    )
    assert 3.5 < ratio < 4.5  # 32 query heads, 8 KV heads


def test_keys_left_out_are_the_engines_and_keys_given_stay(made: Any) -> None:
    made(defaults=Defaults(max_running_requests=7, max_batch_tokens=77, block_tokens=5, memory_fraction=0.5))
    left_out = engine_scenario("own").for_serving
    assert (left_out.max_running_requests, left_out.max_batch_tokens) == (7, 77)
    assert (left_out.kv_cache.block_tokens, left_out.kv_cache.memory_fraction) == (5, 0.5)
    given = engine_scenario("own", max_running_requests=9, kv_cache={"block_tokens": 3}).for_serving
    assert (given.max_running_requests, given.kv_cache.block_tokens, given.kv_cache.memory_fraction) == (9, 3, 0.5)


@pytest.mark.parametrize(
    ("engine", "cluster", "inference", "dtype"),
    [
        ("trtllm", "dgx-h100", {"quantization": "fp8"}, "fp8"),
        ("trtllm-1.0", "dgx-b200", {"precision": "nvfp4"}, "fp8"),
        ("trtllm-1.0", "dgx-h100", {"quantization": "int4_weight_only"}, "bf16"),
        ("trtllm", "dgx-h100", {"quantization": "fp8", "kv_cache": {"dtype": "bf16"}}, "bf16"),
        ("trtllm", "dgx-h100", {}, "bf16"),
        ("trtllm", "dgx-a100", {"quantization": "fp8"}, "bf16"),  # its matmuls are in 16 bits
        ("trtllm", "dgx-h100", {"quantization": "fp8", "attention": "unfused"}, "bf16"),
        ("vllm-v1", "dgx-h100", {"quantization": "fp8"}, "bf16"),
    ],
)
def test_an_engine_that_keeps_the_cache_in_fp8_beside_fp8_weights(
    engine: str, cluster: str, inference: dict[str, Any], dtype: str
) -> None:
    section = {"engine": engine, "requests": ONE, **inference}
    s = parse_scenario({"model": "llama3-8b", "cluster": cluster, "inference": section})
    assert s.for_serving.kv_cache.dtype == dtype
    assert serving_dims(s).kv_bytes == {"fp8": 1.0, "bf16": 2.0}[dtype]
    assert parse_scenario(s.model_dump(mode="json")).for_serving == s.for_serving


def test_requests_wait_for_the_front_end_before_they_reach_the_engine(made: Any) -> None:
    host = HostTimes(request_s=0.25)
    bare, own = (
        simulate_serving(engine_scenario("bundled")).result,
        simulate_serving(engine_scenario(made(host=host))).result,
    )
    for key, more in (("time_to_first_token_s", 0.25), ("request_latency_s", 0.25), ("time_per_output_token_s", 0.0)):
        assert own[key]["p50"] - bare[key]["p50"] == pytest.approx(more, abs=1e-9)


def test_host_seconds_are_those_of_the_architecture_or_of_the_last_known() -> None:
    engine = replace(ENGINES["bundled"], host={"ampere": HostTimes(1.0), "hopper": HostTimes(2.0)})
    assert [engine.host_on(a).iteration_s for a in ("ampere", "hopper", "blackwell")] == [1.0, 2.0, 2.0]


def test_reserved_output_lets_in_what_can_be_finished(made: Any) -> None:
    """As many run as have room with all their tokens; without it more enter, and some are preempted."""
    requests = tuple([Request(0.0, 64, 64)] * 12)
    for engine, reserves in ((made(reserved_output=1.0), True), ("bundled", False)):
        s = serving({"engine": engine}, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + 1.2e6})
        for sim in every_way(s, requests):
            whole = sim.capacity.blocks // (128 // s.for_serving.kv_cache.block_tokens)
            assert 1 < whole < 12
            assert (sim.outcome.kv_cache.running_max == whole) == reserves
            assert (sim.replicas[0].counts.preemptions == 0) == reserves


@settings(max_examples=25, deadline=None)
@given(requests_of, st.floats(1e5, 1e6), st.sampled_from(["none", "gpu"]), st.integers(20, 300))
def test_whoever_reserves_is_never_preempted(
    requests: tuple[Request, ...], cache_bytes: float, prefix_cache: str, budget: int
) -> None:
    inference = {"engine": "trtllm", "prefix_cache": prefix_cache, "max_batch_tokens": budget}
    for sim in every_way(serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}), requests):
        assert sim.replicas[0].counts.preemptions == 0


@settings(max_examples=30, deadline=None)
@given(requests_of, settings_of, st.floats(1e5, 3e6), st.sampled_from([{}, {"pp": 2}]))
def test_prompts_first_is_alike_in_every_way(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, parallelism: dict[str, int]
) -> None:
    """Grouped, one by one, on SimPy; no iteration has prompts and tokens, unless the cache had no room for a prompt."""
    memory = {"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}
    scenario = serving({**inference, "chunked_prefill": False}, gpu=memory, parallelism=parallelism)
    first = not ENGINES[inference["engine"]].prompts_beside and inference["prefix_cache"] == "none"
    for sim in every_way(scenario, requests):
        if sim.replicas[0].counts.preemptions == 0 and first:
            loads = [i.load for i in sim.replicas[0].iterations]
            assert not any(
                load.prefills and load.decodes > sum(r.prompt_tokens == 1 for r in requests) for load in loads
            )


def test_each_source_of_prices_has_words_in_the_summary(made: Any) -> None:
    shares = simulate_serving(engine_scenario(made(host=HostTimes(iteration_s=1e-3)))).outcome.provenance.shares
    assert shares["host"] > 0
    assert shares.keys() <= SHARES.keys()


def test_an_overlapped_host_that_is_slower_gives_all_of_its_uncertainty(made: Any) -> None:
    """Where the host decides when iterations end, seconds of which it is 10 % uncertain are 10 % uncertain."""
    host = HostTimes(iteration_s=0.1, uncertainty=0.1)
    slow = simulate_serving(engine_scenario(made(host=host, overlaps=True), batching="continuous"))
    assert slow.host_uncertainty == pytest.approx(0.1, rel=1e-3)
    quick = made(host=HostTimes(iteration_s=1e-6, uncertainty=0.1), overlaps=True)
    assert simulate_serving(engine_scenario(quick, batching="continuous")).host_uncertainty == 0.0


@pytest.mark.parametrize(
    ("engine", "running", "has", "lacks"),
    [
        ("vllm-0.5", 1024, {8, 248, 256}, {264}),
        ("vllm-0.6", 1024, {8, 256, 264, 1024}, {12}),
        ("vllm-0.6", 20, {16, 24}, {32}),
        ("vllm-v1", 20, {264, 512}, {520}),
        ("vllm-0.14", 1024, {248, 256, 272, 512}, {264}),
        ("vllm-0.14", 20, {24, 40}, {48}),
        ("sglang", 4096, {8, 160}, {12, 168}),
        ("sglang-0.5", 4096, {12, 16, 248, 256}, {20, 272}),
        ("trtllm-1.0", 2048, {1, 4, 24, 128, 256, 2048}, {3, 136, 192, 384}),
        ("trtllm-1.0", 400, {256, 400}, {512}),
        ("trtllm-1.3", 400, {128, 192, 384, 400}, {136, 448}),
    ],
)
def test_each_engine_keeps_graphs_of_its_own_sizes(engine: str, running: int, has: set[int], lacks: set[int]) -> None:
    sizes = set(costs(engine, max_running_requests=running).host.graph_sizes)
    assert has <= sizes
    assert not lacks & sizes


@pytest.mark.parametrize("engine", [e.name for e in ENGINES.values() if e.defaults.graphs_to and e.date >= "2025"])
def test_one_more_sequence_never_costs_the_launches_of_all_kernels(engine: str) -> None:
    """Engines since 2025 have a graph for every batch that a server runs as a rule: a token's time has no steps but
    those of padding."""
    own = costs(engine)
    seconds = [own.stage_seconds(decode(n))[0] for n in (31, 33, 63, 65, 96, 128)]
    assert all(later < 1.25 * earlier for earlier, later in pairwise(seconds))


@pytest.mark.parametrize(("engine", "overlaps"), [("vllm-0.14", False), ("vllm-0.19", True), ("sglang-0.5", False)])
def test_a_host_beside_pipeline_stages(engine: str, overlaps: bool) -> None:
    """vLLM since 0.16 (config/vllm.py) and not SGLang (srt/server_args.py, _handle_pipeline_parallelism)."""
    for pp in (1, 2):
        s = scenario_with(parallelism={"pp": pp}, inference={"engine": engine, "requests": ONE})
        assert host_of(s, ENGINES[engine], (10,) * pp, (4,) * pp).overlaps == (overlaps or pp == 1)


@pytest.mark.parametrize(
    ("engine", "tp", "vocab", "padded"),
    [
        ("vllm-v1", 1, 50257, 50304),  # 64 entries: 786 times
        ("vllm-v1", 8, 128256, 128256),
        ("sglang-0.5", 4, 32001, 32064),
        ("sglang", 3, 32000, 32064),  # also a multiple of the ranks
        ("trtllm", 8, 128256, 128256),
        ("trtllm-1.0", 2, 50257, 50258),
        ("bundled", 8, 128256, 129024),  # split as Megatron-LM splits it: 126 times 1,024
    ],
)
def test_each_engine_pads_the_vocabulary_its_own_way(engine: str, tp: int, vocab: int, padded: int) -> None:
    model = {"layers": 2, "hidden": 768, "heads": 24, "ffn": 3072, "vocab": vocab}
    data = {"model": model, "cluster": "dgx-h100", "parallelism": {"tp": tp}}
    requests = {"prompt_len": 8, "output_len": 4}
    scenario = parse_scenario({**data, "inference": {"engine": engine, "requests": requests}})
    assert serving_dims(scenario).vocab == padded // tp
    noted = [text for text in scenario.warnings if text.startswith("model.vocab")]
    assert [f"is padded to {padded}" in text and f"engine {engine}" in text for text in noted] == [True] * (
        padded != vocab
    )


def test_pools_of_unlike_tp_pad_the_vocabulary_each_by_its_own() -> None:
    pools = {"prefill": {"tp": 4}, "decode": {"tp": 2}}
    inference = {"requests": {"prompt_len": 8, "output_len": 4}, "disaggregated": pools}
    noted = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "inference": inference}).warnings
    assert [text for text in noted if text.startswith("model.vocab")] == [
        "model.vocab: 128256 is padded to 128512, a multiple of 512, by engine bundled with tp 4"
    ]
