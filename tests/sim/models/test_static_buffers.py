"""Experts' buffers of a fixed size, and what they keep in pages (`sim/models/moe/static_buffers.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.models.dims import Shard, dims
from sim.models.moe.matmuls import expert_matmuls
from sim.models.moe.routing import routing
from tests.sim.cases import scenario_with

CAPACITY, STASH = "moe_expert_rank_capacity_factor", "moe_paged_stash_buffer_size_factor_cuda"


def scenario(fused: bool = True, dispatcher: str = "hybridep", **training: Any) -> Scenario:
    keys = {"seq_len": 4096, "global_batch_size": 8, "precision": "mxfp8", "framework": "megatron_bridge", **training}
    layout = {"dp": 8, "ep": 8, "ep_dispatcher": dispatcher}
    return scenario_with({**keys, "fused_experts": fused}, layout, model="qwen3-30b-a3b", cluster="gb200-nvl72")


def kept_and_held(s: Scenario) -> tuple[float, float, float]:
    """Bytes that a layer's experts keep, and the most that a part of them holds forward and backward."""
    d = dims(s)
    parts = expert_matmuls(s, d.of_experts, routing(s, d, 0, Shard()))
    kept = sum(saved.bytes for part in parts for saved in part.saved)
    return kept, max(p.forward_bytes for p in parts), max(p.backward_bytes for p in parts)


def test_without_a_stash_all_has_the_buffers_size() -> None:
    """token_dispatcher.py: `num_permuted_tokens` is the number of copies times the factor."""
    usual, wide = kept_and_held(scenario()), kept_and_held(scenario(**{CAPACITY: 1.5}))
    assert wide == pytest.approx(tuple(1.5 * size for size in usual))


def test_pages_hold_what_came_and_the_buffers_are_there_while_it_is_copied() -> None:
    """paged_stash.py: `allocate_stash_buffers` takes the factor times what the mean number of copies keeps."""
    kept, ahead, back = kept_and_held(scenario())
    stash = kept_and_held(scenario(**{CAPACITY: 1.5, STASH: 1.2}))
    assert stash == pytest.approx((1.2 * kept, 1.5 * (ahead + kept), 1.5 * (back + kept)))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({CAPACITY: 1.5, "fused": False}, rf"{CAPACITY}: found 1\.5; needs training\.fused_experts true"),
        (
            {CAPACITY: 1.5, "dispatcher": "deepep"},
            rf"{CAPACITY}: found 1\.5; needs parallelism\.ep_dispatcher hybridep",
        ),
        ({STASH: 1.2}, rf"{STASH}: found 1\.2; needs training\.{CAPACITY}"),
    ],
)
def test_what_they_need(changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=needed):
        scenario(**changes)
