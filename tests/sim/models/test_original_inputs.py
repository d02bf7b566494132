"""Linear layers that keep their 16-bit input beside 8-bit matmuls (`Framework.saves_originals`): bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Block, Compute
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from tests.sim.cases import case

MOE: dict[str, Any] = {"moe": {"experts": 8, "top_k": 2, "ffn": 512, "shared_experts": 1}, "bias": False}
FORMATS = {"tensorwise": "fp8", "delayed": "fp8", "blockwise": "fp8", "mxfp8": "mxfp8"}


def scenario(recipe: str, date: str | None = None, **training: Any) -> Scenario:
    keys = {"framework": "megatron", "precision": FORMATS[recipe], "fp8_recipe": recipe, "software_date": date}
    cluster = "dgx-b200" if recipe == "mxfp8" else "dgx-h100"
    return case({"dp": 4, "ep": 4}, keys | training, {**MOE, "mlp": "swiglu"}, cluster=cluster)


def moved(block: Block, name: str) -> float:
    return sum(i.bytes for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.name == name)


def saved(block: Block, *names: str) -> float:
    return sum(x.bytes for x in block.saved if x.name in names)


@pytest.mark.parametrize(
    ("recipe", "ahead", "again"),
    [
        ("tensorwise", 2 + 2 + 1, 2 + 2 + 2),  # largest value and cast by rows; both once more, in both orders
        ("blockwise", 2 + 1, 2 + 1),  # rows; columns
        ("mxfp8", 2 + 1, 2 + 1),
    ],
)
def test_the_output_projection_quantizes_its_input_twice(recipe: str, ahead: int, again: int) -> None:
    """core/transformer/attention.py: fused attention keeps its result anyway, so that 8 bits of it are not kept."""
    s = scenario(recipe)
    block, n = layer_block(s, 0), dims(s).tokens * 1024
    assert moved(block, "attention_out_cast") == pytest.approx(ahead * n, rel=0.1)  # scales besides
    assert moved(block, "attention_out_cast_again") == pytest.approx(again * n, rel=0.1)
    assert saved(block, "output", "attention_out input") == 2 * n


@pytest.mark.parametrize(("recipe", "date"), [("tensorwise", "2025-08"), ("delayed", None)])
def test_older_releases_and_delayed_scaling_keep_8_bits(recipe: str, date: str | None) -> None:
    s = scenario(recipe, date)
    block, n = layer_block(s, 0), dims(s).tokens * 1024
    assert moved(block, "attention_out_cast_again") == 0
    assert saved(block, "output", "attention_out input") == 3 * n


def test_shared_experts_quantize_what_the_router_keeps() -> None:
    """Their norm is a module of its own, so that it finds no largest value for them."""
    then, now = (layer_block(scenario("tensorwise", date), 0) for date in ("2025-08", None))
    n = dims(scenario("tensorwise")).tokens * 1024
    assert (moved(then, "shared_mlp_up_cast"), moved(then, "shared_mlp_up_cast_again")) == (6 * n, 0)
    assert (moved(now, "shared_mlp_up_cast"), moved(now, "shared_mlp_up_cast_again")) == (5 * n, 6 * n)
    whole = {"mode": "selective", "modules": ["shared_experts"]}
    assert moved(layer_block(scenario("tensorwise", recompute=whole), 0), "shared_mlp_up_cast") == 6 * n


def test_experts_whose_activation_runs_again_quantize_it_again() -> None:
    again = {"mode": "selective", "modules": ["moe_act"]}
    plain, rerun = (layer_block(scenario("mxfp8", recompute=mode), 0) for mode in ("none", again))
    rows = moved(plain, "experts_down_cast") / (2 + 2)  # read, and written in both orders
    assert (
        moved(rerun, "experts_down_cast")
        == moved(rerun, "experts_down_cast_again")
        == pytest.approx(3 * rows, rel=0.02)
    )  # a scale of 8 bits for 32
    assert moved(plain, "experts_down_cast_again") == 0


def test_experts_whose_input_goes_to_the_host_keep_16_bits() -> None:
    plain, host = (
        layer_block(scenario("mxfp8", activation_offload=x), 0) for x in (False, {"modules": ["expert_fc1"]})
    )
    assert saved(host, "experts_up input") == pytest.approx(2 * saved(plain, "experts_up input"), rel=0.04)
    assert moved(host, "experts_up_cast_again") > 0


def test_adapters_keep_no_input_of_frozen_weights() -> None:
    block = layer_block(
        case({}, {"framework": "megatron", "precision": "fp8", "lora": {"rank": 4}}, {"bias": False}), 0
    )
    assert moved(block, "attention_out_cast_again") == 0
