"""Routers of Megatron-Core that are fused, or not, against what their framework has (`training.moe_router_fusion`)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.emit import emit
from sim.models.layer import layer_block
from tests.sim.cases import case

MOE = {"moe": {"experts": 16, "top_k": 2, "ffn": 512}}


def launches(framework: str, fusion: bool | None) -> tuple[int, int]:
    """Kernels that choose experts, forward and backward."""
    block = layer_block(case({"dp": 4, "ep": 4}, {"framework": framework, "moe_router_fusion": fusion}, MOE), 0)
    found = [
        [i for i in p if isinstance(i, Compute) and i.name.startswith("router_")]
        for p in (block.forward, block.backward)
    ]
    forward, backward = (sum(i.kernels for i in items if i.kind == "softmax") for items in found)
    return forward, backward


def test_each_framework_can_have_the_others_router() -> None:
    fused, apart = (9, 6), (28, 14)
    assert launches("megatron", None) == launches("megatron_bridge", False) == apart
    assert launches("megatron_bridge", None) == launches("megatron", True) == fused


@pytest.mark.parametrize(
    ("framework", "model", "what"),
    [("eager", MOE, "framework megatron, megatron_bridge or nemo"), ("megatron", {}, "model.moe")],
)
def test_what_it_needs(framework: str, model: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=rf"training\.moe_router_fusion: found true; needs {what}"):
        case({}, {"framework": framework, "moe_router_fusion": True}, model)


def test_what_a_framework_has_anyhow_is_named() -> None:
    s = case({}, {"framework": "megatron", "moe_router_fusion": False}, MOE)
    assert any("moe_router_fusion: of no effect with framework megatron" in text for text in s.warnings)


@pytest.mark.parametrize(("fusion", "written"), [(None, False), (True, True), (False, False)])
def test_flags_of_megatron_say_it(fusion: bool | None, written: bool) -> None:
    s = case({"dp": 4, "ep": 4}, {"framework": "megatron", "moe_router_fusion": fusion}, {**MOE, "bias": False})
    assert ("--moe-router-fusion" in emit(s, "megatron")) == written
