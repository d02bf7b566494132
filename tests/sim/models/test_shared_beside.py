"""Shared experts beside the exchanges of routed ones (`training.moe_shared_expert_overlap`)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Program, Wait
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.models.layer import layer_block
from sim.simulation import simulate
from tests.sim.cases import case

MOE = {"moe": {"experts": 16, "top_k": 2, "ffn": 512, "shared_experts": 1}, "bias": False}


def scenario(beside: bool, **layout: Any) -> Scenario:
    training = {"framework": "megatron", "moe_shared_expert_overlap": beside}
    return case({"dp": 4, "ep": 4, **layout}, training, MOE)


def between(program: Program, handle: str) -> list[str]:
    """Computations between the start of a message and the wait for it."""
    start = next(n for n, i in enumerate(program) if isinstance(i, Comm) and i.handle == handle)
    end = next(n for n, i in enumerate(program) if isinstance(i, Wait) and i.handle == handle)
    return [i.name for i in program[start:end] if isinstance(i, Compute)]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep", "hybridep"])
def test_each_matmul_runs_beside_its_exchange(dispatcher: str) -> None:
    """The first and the activation while tokens travel there, the second while they travel home; backwards likewise."""
    block = layer_block(scenario(True, ep_dispatcher=dispatcher), 0)
    there, home = between(block.forward, "dispatch_beside"), between(block.forward, "combine_beside")
    assert there[0] == "shared_mlp_up"
    assert len(there) == 2
    assert home == ["shared_mlp_down"]
    assert between(block.backward, "combine_backward_beside") == ["shared_mlp_down_dgrad", "shared_mlp_down_wgrad"]
    first = between(block.backward, "dispatch_backward_beside")
    assert first[1:] == ["shared_mlp_up_dgrad", "shared_mlp_up_wgrad"]


def test_nothing_is_computed_sent_or_kept_otherwise() -> None:
    beside, behind = (layer_block(scenario(on), 0) for on in (True, False))
    for name in ("forward", "backward"):
        one, other = (
            sorted((i.name, i.bytes) for i in getattr(b, name) if not isinstance(i, Wait)) for b in (beside, behind)
        )
        assert one == other
    assert (beside.saved, beside.params, beside.expert_params) == (behind.saved, behind.params, behind.expert_params)


def test_it_hides_time() -> None:
    beside, behind = (simulate(scenario(on)).outcome.step_time_s for on in (True, False))
    assert beside < behind


@pytest.mark.parametrize(
    ("layout", "model", "framework", "what"),
    [
        ({}, {}, "megatron", "model.moe with shared experts"),
        ({"ep_overlap": True}, MOE, "megatron", "parallelism.ep_overlap false"),
        ({}, MOE, "eager", "framework megatron, megatron_bridge or nemo"),
    ],
)
def test_what_it_needs(layout: dict[str, Any], model: dict[str, Any], framework: str, what: str) -> None:
    keys = {"framework": framework, "moe_shared_expert_overlap": True}
    layout = {"dp": 4, "ep": 4, **layout} if model else {"dp": 4}
    with pytest.raises(InputError, match=rf"training\.moe_shared_expert_overlap: found true; needs {what}"):
        case(layout, keys, model)


def test_before_megatron_core_0_18_it_needs_exchanges_of_nccl() -> None:
    """transformer_config.py of 0.17.1: "moe_shared_expert_overlap only works with alltoall token dispatcher"."""
    keys = {"framework": "megatron", "moe_shared_expert_overlap": True, "software_date": "2026-05"}
    layout = {"dp": 4, "ep": 4, "ep_dispatcher": "deepep"}
    with pytest.raises(InputError, match=r"needs parallelism\.ep_dispatcher all_to_all before Megatron-Core 0\.18"):
        case(layout, keys, MOE)
    case(layout, {**keys, "software_date": "2026-06"}, MOE)
    case({**layout, "ep_dispatcher": "all_to_all"}, keys, MOE)


@pytest.mark.parametrize("beside", [False, True])
def test_flags_of_megatron_say_it(beside: bool) -> None:
    assert ("--moe-shared-expert-overlap" in emit(scenario(beside), "megatron")) == beside
