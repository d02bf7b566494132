"""Iterations are put together as the schedulers of vLLM and SGLang put them together, one by one.

`tools/record_vllm.py`, `record_vllm_v0.py` and `record_sglang.py` ran these schedulers with their KV caches, and wrote
`tests/sim/serve/data/vllm_*.json` and `sglang_*.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sim.prices.profiles import load_profile
from sim.serve.replicas.pools import whole_pool
from sim.serve.replicas.replica import Work, Worker
from sim.serve.requests import Request
from sim.serve.scheduling.sequences import Sequence
from sim.variants.engines.names import engine_named
from sim.variants.engines.record import Engine
from tests.sim.serve.serving_cases import SMALL, serving

RECORDED = [f for kind in ("vllm", "sglang") for f in sorted((Path(__file__).parent / "data").glob(f"{kind}_*.json"))]
DRAFT = {**SMALL, "layers": 1}


class Case(NamedTuple):
    product: str
    version: str
    block_tokens: int
    keys: list[str]
    given: dict[str, Any]

    @property
    def v1(self) -> bool:
        """Whether `tools/record_vllm.py` recorded it: prompts in chunks, tokens in the engine's order."""
        return "asynchronous" in self.given


def recorded() -> Iterator[Any]:
    for file in RECORDED:
        found = json.loads(file.read_text())
        for given in found["cases"]:
            product = "vllm" if "vllm" in found else "sglang"
            name = f"{product} {found[product]}: {given['name']}"
            name += ", asynchronous" * given.get("asynchronous", False) + ", chunked" * given.get("chunked", False)
            case = Case(product, found[product], found["block_tokens"], found["request"], given)
            yield pytest.param(case, id=name)


class Accepted:
    """As `accepted` of the tool."""

    def accepted(self, request: int, position: int, drafted: int) -> int:
        return (5 * request + 3 * position) % (drafted + 1)


def worker(case: Case, group: bool) -> Worker:
    """A replica of the engine's record with the case's settings."""
    given = case.given
    inference: dict[str, Any] = {
        "engine": record(case).name,
        "max_running_requests": given["running"],
        "max_batch_tokens": given["batch_tokens"],
        "chunked_prefill": given.get("chunked", case.v1),
        "prefix_cache": "gpu" if given.get("prefix_cache", case.product == "sglang") else "none",
        "kv_cache": {"block_tokens": case.block_tokens},
    }
    if given.get("drafted"):
        inference["speculative"] = {"draft": DRAFT, "tokens": given["drafted"], "acceptance": 0.5}
    scenario = serving(inference)
    pool = whole_pool(scenario, load_profile(scenario.calibration), sequences(case))
    scheduler = pool.replicas[0].scheduler
    if case.v1:
        assert scheduler.one_behind
        scheduler.one_behind = given["asynchronous"]
    scheduler.cache.blocks = scheduler.cache.free = given["blocks"]
    scheduler.acceptance = Accepted()
    scheduler.lookahead = 0  # n-grams, which were recorded, write no cache
    return Worker(pool.replicas[0], pool.costs, group)


def record(case: Case) -> Engine:
    found = engine_named((f"{case.product} {case.version}",))
    assert found is not None
    return found


def sequences(case: Case) -> list[Sequence]:
    rows = [dict(zip(case.keys, row, strict=True)) for row in case.given["requests"]]
    own = [(float(r["arrives"]), r["prompt_tokens"], r["output_tokens"], r["prefix"], r["prefix_tokens"]) for r in rows]
    return [Sequence(Request(*row), i) for i, row in enumerate(own)]


def iterations(case: Case, group: bool) -> list[dict[str, Any]]:
    """What the simulator does where every iteration takes a second."""
    own = worker(case, group)
    everybody = own.replica.sequences
    s, now, left, pending, found = own.scheduler, 0.0, list(everybody), list(everybody), []
    while left:
        while pending and pending[0].request.arrival_s <= now:
            s.waiting.append(pending.pop(0))
        before = [x.preemptions for x in everybody]
        started = s.started
        work = own.begin(now)
        if work is None:
            now = pending[0].request.arrival_s
            continue
        new = [x for x in s.running if x.order > started and x.computed]
        row = {
            "tokens": work.load.tokens if group else pieces(work, by_request=not case.v1),
            "blocks": s.cache.blocks - s.cache.available,
            "found": {str(x.index): x.computed for x in new},
            "preempted": [x.index for x, was in zip(everybody, before, strict=True) if x.preemptions > was],
        }
        found.append({key: value for key, value in row.items() if value})
        now += 1.0
        done = own.end(work, now)
        left = [x for x in left if x not in done]
    return found


def pieces(work: Work, by_request: bool) -> list[Any]:
    """As the file has them: a request that computes one token as its number alone."""
    found = [(p.sequence.index, p.tokens) for p in work.batch.pieces]
    return [i if n == 1 else [i, n] for i, n in (sorted(found) if by_request else found)]


def tokens(row: dict[str, Any], padded: bool = False) -> dict[str, Any]:
    """A row of the file with the sum of its tokens, where prompts may be padded to the longest."""
    sizes = [1 if isinstance(x, int) else x[1] for x in row["tokens"]]
    return {**row, "tokens": len(sizes) * max(sizes) if padded else sum(sizes)}


@pytest.mark.parametrize("case", list(recorded()))
def test_every_iteration_is_the_engines(case: Case) -> None:
    """Tokens of each request (with vLLM V1 in its order), blocks in use, tokens found in the cache, who is preempted;
    with sequences that advance together the sum of the tokens."""
    wanted, padded = case.given["iterations"], record(case).paddings is not None
    assert iterations(case, group=False) == wanted
    assert iterations(case, group=True) == [tokens(row, padded) for row in wanted]


def test_who_is_put_out_when_it_is_done_and_nobody_knows_leaves_nothing_behind() -> None:
    """A long request lets the reserved share fall; the last block is the other's, for its last token."""
    keys = ["prompt_tokens", "output_tokens", "arrives", "prefix", "prefix_tokens"]
    requests = [[30, 700, 0, "", 0], [30, 28, 620, "", 0]]
    given = {"running": 4, "batch_tokens": 512, "blocks": 735, "requests": requests}
    own = worker(Case("sglang", "0.5.3", 1, keys, given), group=False)
    s, now, pending, put_out = own.scheduler, 0.0, list(own.replica.sequences), 0
    while s.running or s.waiting or pending:
        while pending and pending[0].request.arrival_s <= now:
            s.waiting.append(pending.pop(0))
        done = [x for x in s.leaving if len(s.running) > 1]
        work = own.begin(now)
        put_out += any(x not in [p.sequence for p in work.batch.pieces] for x in done) if work else 0
        now += 1.0
        if work is not None:
            own.end(work, now)
        assert now < 800.0
    assert put_out
    assert s.cache.private == s.cache.tokens == s.reserved == 0


def test_the_recorded_runs_preempt_split_prompts_and_find_prefixes() -> None:
    rows = [row for parameters in recorded() for row in parameters.values[0].given["iterations"]]
    parts = [x for row in rows for x in row["tokens"] if not isinstance(x, int)]
    assert sum("preempted" in row for row in rows) > 10
    assert sum("found" in row for row in rows) > 5
    assert len(parts) > 500
