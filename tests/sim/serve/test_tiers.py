"""Tiers of the KV cache below the GPU: host memory and disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.core.units import percent
from sim.inputs.scenario import load_scenario
from sim.inputs.serving_keys import HASHED_TOKENS
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.views.serving_summary import cache_lines
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, every_way, finished, requests_of, serving, times
from tests.sim.serve.test_hashes import trees

SCENARIO = Path(__file__).parents[3] / "scenarios" / "serve_tiers.yaml"
FREE = {"bandwidth_bytes_per_s": 1e18, "latency_s": 0.0}
ROOM = 5.5e6  # bytes for a cache of some 1,300 tokens
tiers_of = st.fixed_dictionaries(
    {
        "host": st.fixed_dictionaries(
            {"capacity_bytes": st.floats(0, 2e7), "bandwidth_bytes_per_s": st.floats(1e7, 1e12)}
        ),
        "disk": st.none() | st.fixed_dictionaries({"capacity_bytes": st.floats(0, 4e7)}),
        "write_policy": st.sampled_from(["write_back", "write_through"]),
    }
)


def served(
    requests: tuple[Request, ...], tiers: dict[str, Any] | None, cache_bytes: float = ROOM, **options: Any
) -> ServingSimulation:
    cache = {"block_tokens": 128, "tiers": tiers}
    scenario = serving(
        {"prefix_cache": "gpu", "kv_cache": cache}, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}
    )
    sim = simulate_serving(scenario, requests=requests, **options)
    finished(sim)
    return sim


def moved(sim: ServingSimulation) -> list[tuple[str, int, int, float]]:
    return [(t.name, t.hit_tokens, t.evicted_tokens, t.stored_bytes) for t in sim.outcome.kv_cache.tiers or ()]


def in_turn(*names: str, blocks: int = 2) -> tuple[Request, ...]:
    """One request after another: prompts of whole hashed blocks, which share what has one name."""
    each = ((tuple([f"{name}{i}" for i in range(blocks)])) for name in names)
    size = blocks * HASHED_TOKENS
    return tuple([Request(float(i), size + 7, 3, "", size, hashes) for i, hashes in enumerate(each)])


@settings(max_examples=30, deadline=None)
@given(trees | requests_of, tiers_of, st.floats(3e6, 2e7), st.sampled_from([{}, {"pp": 2}, {"dp": 2}]))
def test_any_workload_is_served_alike_on_both_clocks(
    requests: tuple[Request, ...], tiers: dict[str, Any], cache_bytes: float, parallelism: dict[str, int]
) -> None:
    """All tokens come out, no tier holds more than it has room for, both engines and every grouping say the same."""
    inference = {"prefix_cache": "gpu", "kv_cache": {"block_tokens": 16, "tiers": tiers}}
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    sims = every_way(scenario, requests)
    for sim in sims:
        assert moved(sim) == moved(sims[0])
        for replica in sim.replicas:
            below = replica.scheduler.tiers
            assert below is not None
            assert all(len(t.kept) * below.key_tokens <= t.capacity for t in below.tiers)


@settings(max_examples=30, deadline=None)
@given(trees, st.floats(3e6, 2e7), st.sampled_from(["write_back", "write_through"]))
def test_tiers_of_no_size_change_nothing(requests: tuple[Request, ...], cache_bytes: float, policy: str) -> None:
    none = served(requests, None, cache_bytes)
    empty = served(
        requests, {"host": {"capacity_bytes": 0}, "disk": {"capacity_bytes": 0}, "write_policy": policy}, cache_bytes
    )
    assert times(none) == times(empty)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_a_host_of_endless_room_and_speed_finds_what_a_larger_gpu_would(policy: str) -> None:
    requests = in_turn("a", "b", "c", "a", "c", "b", "a")
    host = {"host": {"capacity_bytes": 1e15, **FREE}, "write_policy": policy}
    large, tiered, plain = served(requests, None, 1e9), served(requests, host), served(requests, None)
    hits = [s.outcome.kv_cache.prefix_hit_tokens for s in (plain, tiered, large)]
    assert hits[0] < hits[1] == hits[2] == 4 * 2 * HASHED_TOKENS
    for a, b in zip(times(tiered), times(large), strict=True):
        assert a == pytest.approx(b, rel=1e-9)


@pytest.mark.parametrize(("tier", "seconds_per_byte", "latency_s"), [("host", 1e-9, 2e-3), ("disk", 2e-9, 2e-3 + 5e-3)])
def test_what_comes_back_waits_for_its_copy(tier: str, seconds_per_byte: float, latency_s: float) -> None:
    """The third prompt's beginning lies in one tier: its first token comes later than with a larger GPU by latency +
    bytes / bandwidth, of the slower link where it passes two."""
    host = {"capacity_bytes": 1e9 if tier == "host" else 0, "bandwidth_bytes_per_s": 1e9, "latency_s": 2e-3}
    disk = {"capacity_bytes": 1e9, "bandwidth_bytes_per_s": 0.5e9, "latency_s": 5e-3}
    requests = in_turn("a", "b", "a")
    sim, large = served(requests, {"host": host, "disk": disk}), served(requests, None, 1e9)
    moved = 2 * HASHED_TOKENS * sim.capacity.stage_token_bytes
    wait = sim.sequences[2].first_token_s - large.sequences[2].first_token_s
    assert wait == pytest.approx(latency_s + moved * seconds_per_byte, rel=1e-9)
    used = {t.name: t for t in sim.outcome.kv_cache.tiers or ()}
    assert used[tier].loaded_bytes == moved
    assert sum(t.hit_tokens for t in used.values()) == 2 * HASHED_TOKENS


def test_writing_back_delays_who_takes_the_blocks_and_writing_through_nobody() -> None:
    requests = in_turn("a", "b", "c")
    host = {"capacity_bytes": 1e9, "bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}
    none = served(requests, None)
    back, through = (served(requests, {"host": host, "write_policy": p}) for p in ("write_back", "write_through"))
    late = [b[0] - a[0] for a, b in zip(times(none), times(back), strict=True)]
    assert late[0] == 0.0
    copied = [c for c in back.replicas[0].scheduler.copies if not c.up]
    assert late[1] == pytest.approx(sum(c.end_s - c.start_s for c in copied if c.end_s < 1.9), rel=1e-9)
    assert late[1] > 1e-4
    assert times(through) == times(none)
    assert through.outcome.kv_cache.stored_bytes > back.outcome.kv_cache.stored_bytes


def test_each_tier_gives_up_what_was_used_least_recently_to_the_next() -> None:
    sim = served(
        in_turn("a", "b", "c", "d"), {"host": {"capacity_bytes": 2 * 512 * 1024.0}, "disk": {"capacity_bytes": 1e9}}
    )
    assert sim.capacity.stage_token_bytes == 1024
    tiers = sim.replicas[0].scheduler.tiers
    assert tiers is not None
    host, disk = tiers.tiers
    on_gpu = sim.replicas[0].scheduler.cache.idle
    assert list(on_gpu) == ["d1", "d0"]
    assert set(host.kept) == {"c0", "c1"}
    assert set(disk.kept) == {"a0", "a1", "b0", "b1"}


def test_tiers_raise_the_shipped_scenarios_hit_rate() -> None:
    with_tiers = simulate_serving(load_scenario(SCENARIO)).outcome.kv_cache
    host = simulate_serving(load_scenario(SCENARIO, ("inference.kv_cache.tiers.disk=null",))).outcome.kv_cache
    none = simulate_serving(load_scenario(SCENARIO, ("inference.kv_cache.tiers=null",))).outcome.kv_cache
    assert none.prefix_hit_rate < host.prefix_hit_rate < with_tiers.prefix_hit_rate
    assert none.tiers is None


def test_the_summary_shows_the_prefixes_of_the_pool_that_computes_prompts() -> None:
    """Each tier's tokens have one line, with pools and without; the pool that adds tokens has no tiers."""
    pools = ("inference.disaggregated={prefill: {replicas: 1}, decode: {replicas: 1}}",)
    one, two = (simulate_serving(load_scenario(SCENARIO, more)).outcome for more in ((), pools))
    assert two.pools is not None
    assert two.kv_cache.tiers is None
    for found, lines in ((one.kv_cache, dict(cache_lines(one))), (two.pools[0].kv_cache, dict(cache_lines(two)))):
        assert [t.name for t in found.tiers or ()] == ["host", "disk"]
        for t in found.tiers or ():
            assert t.hit_tokens > 0
            assert lines[f"tier {t.name}"].startswith(f"{t.hit_tokens:,} tokens came back")
        assert lines["prefix cache"] == f"{percent(found.prefix_hit_rate)} of prompt tokens found"


def test_tiers_need_a_cache_of_prefixes_on_the_gpu() -> None:
    with pytest.raises(InputError, match=r"inference.kv_cache.tiers: .*prefix_cache gpu"):
        serving({"kv_cache": {"tiers": {"host": {"capacity_bytes": 1e9}}}})
