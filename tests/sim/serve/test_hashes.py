"""Prefixes known block by block: traces in Mooncake's format, what is found of them, and what goes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.serving_keys import HASHED_TOKENS
from sim.serve.cache.hashed_prefixes import HashedHostCache, HashedKvCache
from sim.serve.requests import Request, read_trace
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, every_way, finished, serving


def hashed(arrival_s: float, path: list[int], rest: int, output: int) -> Request:
    """A prompt down a tree: each block's hash stands for the way to it."""
    hashes = tuple(["/".join(map(str, path[: i + 1])) for i in range(len(path))])
    return Request(arrival_s, len(path) * HASHED_TOKENS + rest, output, "", len(path) * HASHED_TOKENS, hashes)


trees = st.lists(
    st.builds(
        hashed, st.floats(0, 0.05), st.lists(st.integers(0, 1), max_size=4), st.integers(1, 600), st.integers(1, 40)
    ),
    min_size=1,
    max_size=20,
).map(lambda rs: tuple(sorted(rs)))


@settings(max_examples=60, deadline=None)
@given(
    trees,
    st.sampled_from(["gpu", "cpu"]),
    st.sampled_from([16, 128, 512]),
    st.floats(3e6, 2e7),
    st.integers(100, 3000),
    st.sampled_from([{}, {"pp": 2}, {"dp": 2}]),
)
def test_any_tree_is_served(
    requests: tuple[Request, ...],
    prefix_cache: str,
    block: int,
    cache_bytes: float,
    budget: int,
    parallelism: dict[str, int],
) -> None:
    """All tokens come out, no block is lost or used twice, and both engines and every grouping say the same."""
    inference = {"prefix_cache": prefix_cache, "kv_cache": {"block_tokens": block}, "max_batch_tokens": budget}
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    first, *others = every_way(scenario, requests)
    assert all(sim.replicas[0].counts == first.replicas[0].counts for sim in others)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12),
    st.sampled_from(["gpu", "cpu"]),
)
def test_one_after_another_finds_every_block_seen_before(paths: list[list[int]], prefix_cache: str) -> None:
    """With room for all: of each prompt the longest beginning that some earlier one had."""
    requests = tuple([hashed(float(i), path, 7, 3) for i, path in enumerate(paths)])
    sim = simulate_serving(serving({"prefix_cache": prefix_cache}), requests=requests)
    seen: set[int | str] = set()
    found = 0
    for r in requests:
        found += HASHED_TOKENS * sum(h in seen for h in r.hashes)
        seen.update(r.hashes)
    assert sim.outcome.kv_cache.prefix_hit_tokens == found
    finished(sim)


def test_the_least_recently_used_goes_first_and_of_a_prompt_its_end() -> None:
    cache = HashedKvCache(blocks=8, block_tokens=256)
    for name in (("a", "a1"), ("b", "b1")):
        assert cache.take(4)
        cache.tokens += 4 * 256
        assert cache.share(name, 0, 4) == 4
    cache.release(("a", "a1"), 4)
    cache.release(("b", "b1"), 4)
    cache.use(("a",), 2)
    cache.release(("a",), 2)
    assert (cache.free, cache.unused, cache.kept) == (0, 8, 8)
    assert cache.take(2)
    assert [cache.cached_tokens(name, 1024) for name in (("a", "a1"), ("b", "b1"))] == [512, 1024]
    assert cache.take(2)
    assert [cache.cached_tokens(name, 1024) for name in (("a", "a1"), ("b", "b1"))] == [512, 512]


def test_what_two_computed_at_once_is_kept_once() -> None:
    cache = HashedKvCache(blocks=8, block_tokens=256)
    assert cache.take(8)
    cache.tokens = 8 * 256
    assert cache.share(("a", "x"), 0, 4) == cache.share(("a", "y"), 0, 4) == 4
    assert (cache.private, cache.free, cache.kept, cache.tokens) == (0, 2, 6, 0)


def test_the_host_keeps_what_was_used_last() -> None:
    host = HashedHostCache(tokens=1024)
    assert host.store(("a", "a1"), 1024) == 1024
    assert host.store(("a", "b1"), 1024) == 512
    assert [host.cached_tokens(n, 1024, 16) for n in (("a", "a1"), ("a", "b1"))] == [512, 1024]


def line(**changes: Any) -> str:
    return json.dumps({"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9], **changes})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncakes_format(tmp_path: Path) -> None:
    """Milliseconds, and a last hash for tokens that fill no block."""
    trace = written(tmp_path, line(), "", line(timestamp=0, hash_ids=[]))
    assert read_trace(trace) == (Request(0.0, 1100, 5), Request(1.5, 1100, 5, "", 1024, (7, 8)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "jsonl:1: is not JSON"),
        ("[" * 100_000, "jsonl:1: nested too deeply"),
        ("[1]", "found a list of 1"),
        ("{}", "timestamp is missing"),
        (line(timestamp=-1), "timestamp: found -1"),
        (line(timestamp=True), "timestamp: found true"),
        (line(input_length=0), "input_length: found 0"),
        (line(output_length=1.5), "output_length: found 1.5"),
        (line(hash_ids="x"), "hash_ids: found 'x'"),
        (line(hash_ids=[[1]]), "hash_ids: found"),
        (line(hash_ids=[1, 1]), "holds one twice"),
        (
            line(input_length=1000, hash_ids=[*range(63)]),  # blocks of 16 tokens
            "hash_ids: found 63 for a prompt of 1,000 tokens; each stands for 512 tokens, so at most 2",
        ),
        ("", "holds no requests"),
    ],
)
def test_hostile_lines(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, text))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_blocks_that_do_not_make_up_a_hash_are_refused(tmp_path: Path) -> None:
    trace = {"requests": {"trace": str(written(tmp_path, line()))}, "kv_cache": {"block_tokens": 48}}
    serving(trace)
    with pytest.raises(InputError, match="must divide 512, the tokens for each hash"):
        serving({**trace, "prefix_cache": "gpu"})
    scenario = serving({"kv_cache": {"block_tokens": 48}, "prefix_cache": "gpu"})
    with pytest.raises(InputError, match="must divide 512, the tokens for each hash of the requests"):
        simulate_serving(scenario, requests=(Request(0.0, 600, 2, "", 512, (1,)),))


def test_the_router_sends_a_conversation_where_it_was() -> None:
    """Turns of seven users, each a block longer than the one before."""
    turns = [hashed(t * 0.1 + u * 0.01, [u, *[0] * t], 9, 4) for t in range(5) for u in range(7)]
    rates = {}
    for router in ("round_robin", "prefix_aware"):
        scenario = serving({"router": router, "prefix_cache": "gpu"}, parallelism={"dp": 4})
        rates[router] = simulate_serving(scenario, requests=tuple(turns)).outcome.kv_cache.prefix_hit_tokens
    assert rates["prefix_aware"] == 7 * HASHED_TOKENS * sum(range(5))
    assert rates["prefix_aware"] > rates["round_robin"]
