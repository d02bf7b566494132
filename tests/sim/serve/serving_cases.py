"""Serving workloads that tests share: a small model, strategies of requests and settings, and what always holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

from sim.commands.search import main
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.cases import llama_like, scenario_with

SMALL = llama_like(layers=4, hidden=256, heads=8, kv_heads=2, ffn=1024, vocab=1024)
WEIGHTS_AND_BUFFERS = 1.5e7  # of SMALL, roughly: what a test leaves beside its cache
ONE = {"prompt_len": 128, "output_len": 33, "count": 4}


def engine_scenario(engine: str, tp: int = 1, model: str = "llama3-8b", **inference: Any) -> Scenario:
    """Serving on H100s by an engine, four equal requests at once unless said otherwise."""
    section = {"engine": engine, "batching": "static", "requests": ONE, **inference}
    return parse_scenario({"model": model, "cluster": "dgx-h100", "parallelism": {"tp": tp}, "inference": section})


def costs_of(scenario: Scenario) -> IterationCosts:
    return iteration_costs(scenario, load_profile(scenario.calibration))


def serving(
    inference: dict[str, Any] | None = None,
    model: Any = None,
    gpu: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    calibration: str = "roofline",
) -> Scenario:
    """A small Llama on an H100 whose memory a test may shrink; CUDA then shows all of it, and what the engine's process
    takes beside its tensors comes on top."""
    own = {"memory_shown": 1.0, **gpu} if gpu else {}
    requested = {"requests": {"prompt_len": 64, "output_len": 16, "count": 8}, **(inference or {})}
    if "memory_bytes" in own:
        own["memory_bytes"], cache = _with_outside(own["memory_bytes"], requested, parallelism or {})
        requested |= {"kv_cache": cache} if cache else {}
    return scenario_with(
        parallelism=parallelism,
        model=model or SMALL,
        cluster={"preset": "dgx-h100", "gpu": {"preset": "h100-sxm", **own}},
        calibration=calibration,
        inference=requested,
    )


def _with_outside(
    memory_bytes: float, inference: dict[str, Any], parallelism: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """The memory with what an engine's process takes beside tensors, and `kv_cache` with the share of this that leaves
    the engine as much as its share of the memory alone."""
    engine = ENGINES.get(inference.get("engine", "bundled"), ENGINES["bundled"])
    pools = [p for p in (inference.get("disaggregated") or {}).values() if isinstance(p, dict)] or [parallelism]
    ranks = max([p.get("tp", 1) * p.get("pp", 1) * p.get("cp", 1) * p.get("ep", 1) for p in pools])
    outside, cache = engine.outside, inference.get("kv_cache", {})
    whole = memory_bytes + outside.bytes(ranks, False)
    share = cache.get("memory_fraction", engine.defaults.memory_fraction)
    if engine.activations_outside or share == 1.0 or whole == memory_bytes:
        return whole, cache
    return whole, cache | {"memory_fraction": (memory_bytes * share + outside.counted_bytes(ranks, False)) / whole}


def searched(file: Path, slo: str, *more: str) -> dict[str, Any]:
    """The JSON of a search of a scenario's file for the highest rate within promised latencies."""
    done = CliRunner().invoke(main, [str(file), "--slo", slo, "--json", "-", *more], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def finished(sim: ServingSimulation) -> None:
    """Every request got its tokens in order of time, and nothing of it is left in the cache."""
    for replica in sim.replicas:
        for s in replica.sequences:
            assert s.generated == s.request.output_tokens
            assert s.request.arrival_s <= s.first_token_s <= s.finish_s
            assert s.private == s.shared == 0
        cache = replica.scheduler.cache
        assert cache.private == cache.tokens == replica.scheduler.reserved == 0
        kept = cache.kept
        assert cache.free + kept == cache.blocks
        assert cache.unused == kept
        room = sim.capacity.host_tokens if sim.scenario.inference.preemption == "swap" else 0
        assert replica.scheduler.swap_tokens == room  # everything has come back from the host


def times(sim: ServingSimulation) -> list[tuple[float, float]]:
    """First and last token of each request, in order."""
    return [(s.first_token_s, s.finish_s) for s in sorted(sim.sequences, key=lambda s: s.index)]


def every_way(scenario: Scenario, requests: tuple[Request, ...] | None = None) -> list[ServingSimulation]:
    """The workload on the quick clock with iterations grouped, and one by one, and on SimPy's: all sequences finish, at
    the same times. Replicas get requests in turn where nobody says how: the quick clock knows no other."""
    if scenario.for_serving.router is None:
        in_turn = scenario.for_serving.model_copy(update={"router": "round_robin"})
        scenario = scenario.unchecked_copy(update={"inference": in_turn})
    ways: tuple[tuple[Any, bool], ...] = (("static", True), ("static", False), ("simpy", True))
    sims = [simulate_serving(scenario, requests=requests, engine=engine, group=group) for engine, group in ways]
    for sim in sims:
        finished(sim)
        for a, b in zip(sim.sequences, sims[0].sequences, strict=True):
            assert (a.first_token_s, a.finish_s) == pytest.approx((b.first_token_s, b.finish_s), rel=1e-9)
    return sims


requests_of = st.lists(
    st.builds(
        Request,
        st.floats(0, 0.05),
        st.integers(1, 300),
        st.integers(1, 60),
        st.sampled_from(["", "a", "b"]),
        st.just(0),
        hashes=st.just(()),
        adapter=st.just(""),
    ).map(lambda r: r._replace(prefix_tokens=r.prompt_tokens if r.prefix_id else 0)),
    min_size=1,
    max_size=24,
).map(lambda rs: tuple(sorted(rs)))


def beside(engine: tuple[str, bool], **settings: Any) -> dict[str, Any]:
    """The settings of an engine, which swaps if it can; SGLang's chunks beside tokens have room for these."""
    name, chunked = engine
    if ENGINES[name].prompts_lead and chunked:
        settings["max_batch_tokens"] += 2 * settings["max_running_requests"]
    if ENGINES[name].budget_for_all:  # else the engine does not start
        settings["max_batch_tokens"] = max(settings["max_batch_tokens"], settings["max_running_requests"])
    if not ENGINES[name].swaps:
        settings["preemption"] = "recompute"
    return {"engine": name, "chunked_prefill": chunked, **settings}


# Engines, of which all but the first are an iteration behind, and whether they compute tokens beside prompts.
BESIDE = (("bundled", True), ("vllm-0.6", True), ("vllm-0.19", True), ("sglang-0.5", False), ("sglang-0.5", True))
settings_of = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(BESIDE),
        "max_running_requests": st.integers(1, 12),
        "max_batch_tokens": st.integers(1, 300),
        "prefix_cache": st.sampled_from(["none", "gpu", "cpu"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "kv_cache": st.fixed_dictionaries({"block_tokens": st.sampled_from([1, 7, 16])}),
    }
).map(lambda found: beside(**found))
