"""Prompts that TensorRT-LLM lets wait for others (_torch/pyexecutor/py_executor.py: _waiting_requests,
_balance_adp_requests)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.serve.replicas.replica import Replica
from sim.serve.requests import Request
from sim.serve.scheduling.prompt_waits import BalancedPrompts, BatchWait, Prospect
from sim.serve.simulation import simulate_serving
from tests.sim.cases import llama_like
from tests.sim.serve.serving_cases import every_way, serving

MOE = {
    **llama_like(layers=2, hidden=256, heads=8, kv_heads=2, ffn=512, vocab=1024),
    "moe": {"experts": 8, "top_k": 2, "ffn": 256},
}
FIRST = Request(0.0, 64, 100)
LATER = tuple(Request(0.001 * n, 100, 4) for n in range(1, 9))


def with_prompts(replica: Replica) -> list[tuple[int, int]]:
    """The number and the prompts' tokens of each iteration that has any."""
    found, number = [], 0
    for iteration in replica.iterations:
        if iteration.load.prefills:
            found.append((number, sum([q * alike for q, _, alike in iteration.load.prefills])))
        number += iteration.steps
    return found


def test_prompts_wait_for_tokens_or_iterations() -> None:
    """Of prompts that come by themselves many are computed at once, with 256 of 512 tokens, or 5 iterations later."""
    common: dict[str, Any] = {"engine": "trtllm-1.2", "max_batch_tokens": 512}
    alone = every_way(serving(common), (FIRST, *LATER))[0]
    waited = every_way(serving({**common, "batch_wait": {"iterations": 40, "tokens_ratio": 0.5}}), (FIRST, *LATER))[0]
    assert len(with_prompts(alone.replicas[0])) > len(with_prompts(waited.replicas[0]))
    assert all(256 <= tokens + 1 <= 512 for _, tokens in with_prompts(waited.replicas[0])[1:-1])
    late = every_way(serving({**common, "batch_wait": {"iterations": 5, "tokens_ratio": 1.0}}), (FIRST, *LATER[:1]))[0]
    soon = every_way(serving(common), (FIRST, *LATER[:1]))[0]
    assert with_prompts(late.replicas[0])[1][0] - with_prompts(soon.replicas[0])[1][0] == 5
    for iterations, ratio in ((0, 1.0), (9, 0.0)):  # py_executor.py: both are needed
        wait = {"iterations": iterations, "tokens_ratio": ratio}
        same = every_way(serving({**common, "batch_wait": wait}), (FIRST, *LATER))[0]
        assert [s.finish_s for s in same.sequences] == [s.finish_s for s in alone.sequences]


@pytest.mark.parametrize(("engine", "between"), [("trtllm-1.2", [1, 1]), ("trtllm-1.3", [1, 4])])
def test_chunks_wait_too(engine: str, between: list[int]) -> None:
    """Before 1.3 the whole prompt counts, of which a chunk is computed: here it has more tokens than an iteration."""
    requests = (FIRST, Request(0.001, 600, 4))
    common: dict[str, Any] = {"engine": engine, "max_batch_tokens": 257, "chunked_prefill": True}
    plain = every_way(serving(common), requests)[0]
    waited = every_way(serving({**common, "batch_wait": {"iterations": 3, "tokens_ratio": 1.0}}), requests)[0]
    numbers = [[n for n, _ in with_prompts(sim.replicas[0])] for sim in (plain, waited)]
    assert [b - a for a, b in zip(numbers[0][1:], numbers[0][2:], strict=False)] == [1, 1]
    assert [b - a for a, b in zip(numbers[1][1:], numbers[1][2:], strict=False)] == between


def test_how_iterations_are_counted() -> None:
    wait, one = BatchWait(2, 0.5), Prospect(1, 100, 3, 3)
    assert [wait.holds(one, 1000) for _ in range(4)] == [True, True, False, True]
    assert not wait.holds(Prospect(1, 497, 3, 3), 1000)
    assert not wait.holds(Prospect(0, 0, 3, 3), 1000)
    assert not wait.holds(Prospect(1, 100, 0, 0), 1000)


def test_how_replicas_wait_for_each_other() -> None:
    adds, both, new, idle = Prospect(0, 0, 4, 4), Prospect(1, 9, 4, 4), Prospect(1, 9, 0, 0), Prospect(0, 0, 0, 0)
    balance = BalancedPrompts(3, 2)
    assert [balance.holds((adds, both), 8) for _ in range(4)] == [True, True, False, True]
    assert [balance.holds((both, both), 8) for _ in range(4)] == [True, True, False, True]
    assert not balance.holds((both, new), 8)  # who has nothing to add does not wait
    assert balance.holds((idle, both), 8)  # a replica without requests adds a token for nobody
    assert balance.holds((both, both), 4)  # one without a place is waited for


def test_replicas_that_share_experts_compute_prompts_together() -> None:
    """Requests come to one replica, then to the other, while both add tokens."""
    requests = (*[Request(0.0, 64, 100)] * 2, *[Request(0.01 + 0.004 * n, 200, 8) for n in range(8)])
    section = {"engine": "trtllm-1.2", "max_batch_tokens": 512}
    shared = {"dp": 2, "ep": 2}
    sims = [
        simulate_serving(serving({**section, **own}, model=MOE, parallelism=shared), requests=requests)
        for own in ({}, {"balanced_prompts": {"timeout_iterations": 20, "wait_iterations": 0}})
    ]
    together = []
    for sim in sims:
        ends = [{i.spans[0][0] for i in r.iterations if i.load.prefills} for r in sim.replicas]
        together.append(len(ends[0] & ends[1]) / len(ends[0] | ends[1]))
        assert all(s.generated == s.request.output_tokens for s in sim.sequences)
    assert together == [pytest.approx(0.0, abs=0.2), 1.0]


@pytest.mark.parametrize(
    ("inference", "parallelism", "why"),
    [
        (
            {"engine": "vllm-0.14", "batch_wait": {}},
            {},
            "engine vllm-0.14 lets no prompts wait; allowed with: trtllm-1.0",
        ),
        ({"engine": "trtllm-1.0", "balanced_prompts": {}}, {}, "needs replicas that share experts"),
        ({"engine": "trtllm-1.0", "batch_wait": {}}, {"dp": 2, "ep": 2}, "needs replicas that share no experts"),
        ({"engine": "trtllm-1.0", "batch_wait": {}}, {"pp": 2}, "is not simulated with pipeline stages"),
    ],
)
def test_where_prompts_cannot_wait(inference: dict[str, Any], parallelism: dict[str, int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        serving(inference, model=MOE, parallelism=parallelism)


@pytest.mark.parametrize(
    ("inference", "said"),
    [
        ({"batch_wait": {"iterations": 5}}, "batch_wait: of no effect unless iterations and tokens_ratio are both"),
        (
            {"batching": "static", "batch_wait": {"iterations": 5, "tokens_ratio": 0.5}},
            "batch_wait: of no effect with batching static",
        ),
        (
            {"batching": "static", "capacity_policy": "max_utilization"},
            "capacity_policy: of no effect with batching static",
        ),
    ],
)
def test_what_has_no_effect_is_said(inference: dict[str, Any], said: str) -> None:
    assert any(said in text for text in serving({"engine": "trtllm-1.2", **inference}).warnings)
    plain = {key: value for key, value in inference.items() if key == "batching"}
    assert not any(said in text for text in serving({"engine": "trtllm-1.2", **plain}).warnings)
