"""Zero experts (LongCat-Flash): choices of the router that give a token itself. Counts in closed form."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import MOE, TOKENS, comm_bytes, flops, make, named

from sim.core.errors import InputError
from sim.emit import emit
from sim.inputs.scenario import parse_scenario
from sim.models.dims import Shard
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.moe.chance import copies_beyond
from sim.models.moe.fullest import fullest_rank
from sim.models.moe.routing import expert_load
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims
from sim.simulation import simulate

HIDDEN, FFN, EXPERTS, ZERO, TOP_K = 1024, 512, 16, 16, 2  # half of the choices compute nothing: one copy a token
ZEROS: dict[str, Any] = MOE | {"moe": MOE["moe"] | {"zero_experts": ZERO}}


def test_parameters_are_the_router_s_and_a_token_uses_fewer() -> None:
    plain, zeros = (count_parameters(make(model).model) for model in (MOE, ZEROS))
    assert zeros.total - plain.total == 4 * HIDDEN * ZERO
    assert plain.active - zeros.active == 4 * (3 * HIDDEN * FFN - HIDDEN * ZERO)


def test_half_of_the_copies_are_computed_and_sent() -> None:
    plain, zeros = (layer_block(make(model, dp=4, ep=4), 0) for model in (MOE, ZEROS))
    assert flops(zeros.forward, ("grouped_gemm",)) == flops(plain.forward, ("grouped_gemm",)) / 2
    assert comm_bytes(zeros.forward, "ep") == comm_bytes(plain.forward, "ep") / 2
    (router,) = named(zeros.forward, "router")
    assert router.flops == 2 * TOKENS * HIDDEN * (EXPERTS + ZERO)


def test_a_token_is_added_to_what_experts_give() -> None:
    block = layer_block(make(ZEROS), 0)
    assert [i.bytes for i in named(block.forward, "zero_experts")] == [3 * TOKENS * HIDDEN * 2]
    assert [(i.bytes, i.kernels) for i in named(block.backward, "zero_experts_backward")] == [
        (5 * TOKENS * HIDDEN * 2, 2)
    ]
    assert not named(layer_block(make(MOE), 0).forward, "zero_experts")


@pytest.mark.parametrize("imbalance", ["balanced", {"zipf": 1.0, "seed": 3}])
def test_loads_add_up_to_the_copies(imbalance: Any) -> None:
    moe = make(MOE | {"moe": ZEROS["moe"] | {"imbalance": imbalance}}).model.moe
    assert moe is not None
    assert moe.copies == TOP_K * EXPERTS / (EXPERTS + ZERO)
    assert sum(expert_load(moe, 100, 0)) == pytest.approx(100 * moe.copies)


def test_chance_is_that_of_draws_from_all_choices() -> None:
    """Ranks' copies vary as draws of two from 32, of which a rank of four holds 4."""
    plain, zeros = (make(model).model.moe for model in (MOE, ZEROS))
    assert plain is not None
    assert zeros is not None
    found = copies_beyond(zeros, 100, 4) / copies_beyond(plain, 100, 4)
    assert found**2 == pytest.approx((1 / 8 * 7 / 8 * 30 / 31) / (1 / 4 * 3 / 4 * 14 / 15))
    assert fullest_rank(zeros, 10_000, 1) == (10_000, EXPERTS)
    assert fullest_rank(zeros, 1, 1)[1] <= fullest_rank(plain, 1, 1)[1]


def test_serving_computes_half_and_adds_the_token() -> None:
    items = {}
    for name, model in (("plain", MOE), ("zeros", ZEROS)):
        inference = {"requests": {"prompt_len": 8, "output_len": 8}}
        s = parse_scenario({"model": model, "inference": inference, "cluster": "dgx-h100", "calibration": "roofline"})
        mlp = layer_specs(s.model)[0].mlp
        assert mlp is not None
        items[name] = mlp.serve(serving_dims(s), 4096)
    assert [i.bytes for i in named(items["zeros"], "zero_experts")] == [3 * 4096 * HIDDEN * 2]
    assert not named(items["plain"], "zero_experts")
    (few,), (many,) = (named(items[name], "experts") or named(items[name], "experts_up") for name in ("zeros", "plain"))
    assert few.flops == many.flops / 2


def test_a_step_runs_and_each_rank_has_its_experts() -> None:
    assert (
        simulate(make(ZEROS, dp=4, ep=4)).result["step_time_s"] < simulate(make(MOE, dp=4, ep=4)).result["step_time_s"]
    )
    first, last = (layer_block(make(ZEROS, dp=4, ep=4), 0, Shard(ep_rank=r)) for r in (0, 3))
    assert first.expert_params == last.expert_params == EXPERTS // 4 * 3 * HIDDEN * FFN


def test_megatron_has_no_flag_for_them() -> None:
    with pytest.raises(InputError, match=r"moe\.zero_experts"):
        emit(make(ZEROS, {"framework": "megatron"}), "megatron")
