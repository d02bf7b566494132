"""Routers that fill up each expert's rows for 8-bit matmuls (`training.moe_router_padding_for_quantization`)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Program
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.models.dims import Shard, layer_dims
from sim.models.layer import layer_block
from sim.models.moe.routing import routing
from sim.simulation import simulate
from tests.sim.cases import case

MOE: dict[str, Any] = {"moe": {"experts": 16, "top_k": 2, "ffn": 512}, "bias": False, "mlp": "swiglu"}
PADDING = {"experts_padding", "experts_unpadding", "experts_padding_backward", "experts_unpadding_backward"}


def scenario(fills: bool, model: dict[str, Any] | None = None, dispatcher: str = "all_to_all", **own: Any) -> Scenario:
    training = {"framework": "megatron", "precision": "fp8", "fp8_recipe": "tensorwise"} | own
    training["moe_router_padding_for_quantization"] = fills
    return case({"dp": 4, "ep": 4, "ep_dispatcher": dispatcher}, training, model or MOE)


def names(program: Program) -> set[str]:
    return {i.name for i in program if isinstance(i, (Compute, Comm))}


def in_order(program: Program, *found: str) -> list[str]:
    return [i.name for i in program if isinstance(i, (Compute, Comm)) and i.name in found]


@pytest.mark.parametrize(("dispatcher", "sent", "received"), [("all_to_all", 16, 16), ("deepep", 0, 4)])
def test_half_a_tile_of_copies_more_for_each_expert(dispatcher: str, sent: int, received: int) -> None:
    """moe_utils.py, `pad_routing_map`: the tokens to the next multiple of 16, by chance 7.5, which each rank sends to
    each of 16 experts; with DeepEP each rank fills up its own four."""
    plain, filled = (
        routing(s, layer_dims(s, 0), 0, Shard()) for s in (scenario(on, dispatcher=dispatcher) for on in (False, True))
    )
    assert filled.sent - plain.sent == pytest.approx(7.5 * sent)
    assert filled.received - plain.received == filled.fullest - plain.fullest == pytest.approx(7.5 * received)


def test_a_map_is_filled_in_place_of_rows() -> None:
    plain, filled = (layer_block(scenario(on), 0) for on in (False, True))
    assert names(plain.forward) | names(plain.backward) >= PADDING
    assert not (names(filled.forward) | names(filled.backward)) & PADDING
    made = next(i for i in filled.forward if isinstance(i, Compute) and i.name == "filled_map")
    assert (made.kernels, made.bytes) == (8, 31 * 512 * 16)
    order = in_order(filled.forward, "filled_map", "gather_counts", "copies_in_all", "permute")
    assert order == ["filled_map", "gather_counts", "copies_in_all", "permute"]  # the host reads the number of copies


def test_deepep_fills_the_map_of_what_arrived() -> None:
    filled = layer_block(scenario(True, dispatcher="deepep"), 0)
    assert not names(filled.forward) & {"copies_in_all", "experts_padding"}
    order = in_order(filled.forward, "dispatch", "filled_map", "sort_chunks")
    assert order == ["dispatch", "filled_map", "sort_chunks"]


def test_hybridep_fills_rows_up_anyhow() -> None:
    filled, plain = (scenario(on, dispatcher="hybridep") for on in (True, False))
    assert any("of no effect with ep_dispatcher hybridep" in text for text in filled.warnings)
    assert simulate(filled).outcome.step_time_s == simulate(plain).outcome.step_time_s


@pytest.mark.parametrize(
    ("model", "training", "what"),
    [
        ({"bias": False}, {}, r"model\.moe"),
        (MOE, {"framework": "eager", "fp8_recipe": None}, "framework megatron"),
        (MOE, {"precision": "bf16", "fp8_recipe": None}, r"training\.precision fp8"),
        ({**MOE, "moe": {**MOE["moe"], "capacity_factor": 1.0}}, {}, r"model\.moe\.capacity_factor null"),
    ],
)
def test_what_it_needs(model: dict[str, Any], training: dict[str, Any], what: str) -> None:
    layout = {"dp": 4, "ep": 4} if "moe" in model else {"dp": 4}
    keys = {"framework": "megatron", "precision": "fp8", "fp8_recipe": "tensorwise"} | training
    with pytest.raises(InputError, match=rf"moe_router_padding_for_quantization: found true; needs {what}"):
        case(layout, {**keys, "moe_router_padding_for_quantization": True}, model)


def test_flags_of_megatron_say_it() -> None:
    assert "--moe-router-padding-for-quantization" in emit(scenario(True, fp8_recipe="delayed"), "megatron")
    assert "--moe-router-padding-for-quantization" not in emit(scenario(False, fp8_recipe="delayed"), "megatron")
