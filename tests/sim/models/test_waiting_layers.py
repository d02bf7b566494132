"""Column layers that do not overlap their input's gather (`parallelism.tp_overlap_except`)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm
from sim.inputs.scenario import Scenario
from sim.models.layer import layer_block
from tests.sim.cases import case

TOKENS, HIDDEN = 512, 1024


def scenario(*names: str, lora: bool = False, **layout: Any) -> Scenario:
    training: dict[str, Any] = {"framework": "megatron"}
    training |= {"lora": {"rank": 16, "targets": ["qkv", "mlp_up"]}} if lora else {}
    layout = {"tp": 4, "sp": True, "tp_overlap": "full", "tp_overlap_except": [*names], **layout}
    return case(layout, training)


def messages(s: Scenario, part: str, *, backward: bool = False) -> list[Comm]:
    block = layer_block(s, 0)
    program = block.backward if backward else block.forward
    return [i for i in program if isinstance(i, Comm) and i.name.startswith(part)]


@pytest.mark.parametrize(("name", "layer", "other"), [("qkv", "qkv", "mlp_up"), ("fc1", "mlp_up", "qkv")])
def test_the_forward_waits_for_the_whole_input(name: str, layer: str, other: str) -> None:
    """One blocking gather in place of three sends round a ring; the other layer and the backward are as before."""
    (gather,) = messages(scenario(name), f"{layer}_gather")
    assert (gather.kind, gather.blocking, gather.bytes) == ("all_gather", True, 2 * TOKENS * HIDDEN)
    ring = messages(scenario(), f"{layer}_gather")
    assert [m.kind for m in ring] == ["send_recv"] * 3
    assert messages(scenario(name), f"{other}_gather") == messages(scenario(), f"{other}_gather")
    assert layer_block(scenario(name), 0).backward == layer_block(scenario(), 0).backward
    assert layer_block(scenario(name), 0).key != layer_block(scenario(), 0).key


def test_an_adapter_reads_what_the_layer_gathered() -> None:
    """NeMo: `return_layernorm_output_gathered` where the layer does not gather within its matmul."""
    assert len(messages(scenario(lora=True), "qkv_lora_gather")) == 1
    assert not messages(scenario("qkv", lora=True), "qkv_lora_gather")
    assert len(messages(scenario("qkv", lora=True), "mlp_up_lora_gather")) == 1
    assert not messages(scenario("qkv", lora=True), "qkv_lora_a_dgrad_reduce_scatter", backward=True)


@pytest.mark.parametrize(
    ("training", "layout", "what"),
    [
        ({"framework": "megatron"}, {"tp_overlap": "wgrad"}, "parallelism.tp_overlap full"),
        ({"framework": "eager"}, {"tp_overlap": "full"}, "framework megatron, megatron_bridge or nemo"),
    ],
)
def test_what_it_needs(training: dict[str, Any], layout: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=rf"parallelism\.tp_overlap_except: found qkv; needs {what}"):
        case({"tp": 4, "sp": True, "tp_overlap_except": ["qkv"], **layout}, training)
