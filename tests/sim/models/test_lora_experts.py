"""Adapters on attention beside frozen experts: nothing is trained, kept or reduced for the experts."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import LLAMA, comms, make

from sim.core.errors import InputError
from sim.core.program import Compute, Phase
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
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


@pytest.mark.parametrize(
    ("training", "parallelism", "message"),
    [
        ({"lora": {"rank": 8}}, {}, "experts' matrices.*leave experts frozen"),
        (LORA, {"dp": 2, "zero": 3}, "frozen experts are simulated whole"),
    ],
)
def test_what_is_not_simulated_is_named(training: Any, parallelism: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(MOE, training, **parallelism)
