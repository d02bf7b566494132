"""Adapters on attention beside frozen experts: nothing is trained, kept or reduced for the experts."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import LLAMA, comms, make

from sim.core.errors import InputError
from sim.core.program import Compute, Phase
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.programs.data_parallel import make_data_parallel
from sim.ranks.plan import make_plan
from sim.simulation import simulate

MOE = LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn": 512}}
LORA = {"lora": {"rank": 8, "targets": ["qkv", "attention_out"]}}
ADAPTERS = 8 * ((1024 + 1024) + 2 * (1024 + 256) + (1024 + 1024))  # query, key and value, output


def test_adapters_alone_are_trained() -> None:
    block, plain = layer_block(make(MOE, LORA), 1), layer_block(make(MOE), 1)
    assert (block.params, block.expert_params) == (ADAPTERS, 0)
    assert block.frozen_params == plain.params + plain.expert_params == layer_specs(make(MOE).model)[1].parameters
    grouped = [i for i in block.backward if isinstance(i, Compute) and i.kind == "grouped_gemm"]
    assert {i.phase for i in grouped} == {Phase.INPUT_GRAD}
    assert sum(s.bytes for s in block.saved) < sum(s.bytes for s in plain.saved)


def test_experts_are_exchanged_and_their_gradients_never_reduced() -> None:
    scenario = make(MOE, LORA, dp=4, ep=4)
    exchanges = comms(layer_block(scenario, 1).forward, "ep")
    assert exchanges["all_to_all"] == 2
    result = simulate(scenario).result
    assert result["memory"][0]["gradients"] == 4 * 4 * ADAPTERS


def test_fsdp_shards_and_gathers_frozen_experts() -> None:
    """As the same parameters without adapters: FSDP does not ask whether a parameter is trained."""
    layout = {"dp": 4, "zero": 3}
    plain, frozen = make(MOE, **layout), make(MOE, LORA, **layout)
    held = [simulate(s).result["memory"][0]["parameters"] for s in (plain, frozen)]
    adapters = ADAPTERS * plain.model.layers
    assert held[1] - held[0] == pytest.approx(2 * adapters / 4)
    dp = make_data_parallel(make_plan(frozen))
    trained, kept = layer_block(plain, 1), layer_block(frozen, 1)
    assert dp.gathered_params(kept) == trained.params + trained.expert_params + ADAPTERS


@pytest.mark.parametrize(
    ("training", "parallelism", "message"),
    [
        ({"lora": {"rank": 8}}, {}, "experts' matrices.*leaves experts frozen"),
        (LORA, {"dp": 2, "ep": 2, "zero": 3}, "frozen experts are simulated sharded as other parameters"),
    ],
)
def test_what_is_not_simulated_is_named(training: Any, parallelism: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(MOE, training, **parallelism)
