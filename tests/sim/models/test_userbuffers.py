"""Multiprocessors that messages of Transformer Engine's userbuffers take, and rings of low precision."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import GPT, make

from sim.core.program import Comm, Compute, Program, Wait
from sim.models.layer import layer_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.ranks.plan import make_plan
from topology.network import Network
from topology.presets import GPUS
from topology.protocols import NODE_CHANNELS

SBH = 512 * 2 * 1024 * 2  # bytes of one [s, b, h] in 16 bits


def of(framework: str, precision: str = "bf16") -> Any:
    return make(GPT, {"framework": framework, "precision": precision}, tp=4, sp=True, tp_overlap="full")


def sms(program: Program) -> dict[str, int | None]:
    """By name, without the number of the chunk."""
    return {i.name.rstrip("0123456789"): i.sms for i in program if isinstance(i, Comm) and i.group == "tp"}


@pytest.mark.parametrize(
    ("framework", "attention", "mlp"),
    [("megatron", (16, 16, 16), (16, 16, 16)), ("megatron_bridge", (4, 24, 24), (2, 4, 16))],
)
def test_who_takes_how_many(framework: str, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """TE module/base.py: get_default_config; training/comm_overlap.py: userbuffers_bf16_h100_h8192_tp4_*."""
    block = layer_block(of(framework), 0)
    forward, backward = sms(block.forward), sms(block.backward)
    rings = {"qkv_gather", "mlp_up_gather"}
    assert forward == {
        **dict.fromkeys(rings, 0),
        "attention_out_reduce_scatter": attention[2],
        "mlp_down_reduce_scatter": mlp[2],
    }
    assert backward == {
        "mlp_down_grad_gather": 0,
        "attention_out_grad_gather": 0,
        "qkv_regather": attention[0],
        "mlp_up_regather": mlp[0],
        "qkv_dgrad_reduce_scatter": attention[1],
        "mlp_up_dgrad_reduce_scatter": mlp[1],
    }


def test_what_a_matmul_beside_them_loses() -> None:
    scenario = of("megatron")
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
    pricing = Pricing(make_plan(scenario), costs, Network(scenario.cluster))
    sent = {i.name: i for i in layer_block(scenario, 0).forward if isinstance(i, Comm)}
    assert pricing.comm(sent["qkv_gather1"], 0).slows == 0
    lost = costs.coefficients.collective_sm_share * 16 / NODE_CHANNELS
    assert pricing.comm(sent["mlp_down_reduce_scatter0"], 0).slows == pytest.approx(lost)


@pytest.mark.parametrize(("framework", "precision"), [("megatron_bridge", "fp8"), ("nemo", "fp8")])
def test_rows_of_low_precision_go_round_a_ring(framework: str, precision: str) -> None:
    """comm_gemm_overlap.cpp: split_overlap_rs. Each other rank's rows are sent when they are made; its own come last,
    and a kernel reads what all ranks made of them."""
    forward = layer_block(of(framework, precision), 0).forward
    last = [
        i
        for i in forward
        if (i.handle if isinstance(i, Wait) else i.name).startswith("mlp_down")
        and not (isinstance(i, Compute) and i.kind == "cast")
    ]
    kinds = [i.kind if isinstance(i, Compute) else type(i).__name__ for i in last]
    assert kinds == ["gemm", "Comm"] * 3 + ["gemm"] + ["Wait"] * 3 + ["elementwise"]
    messages = [i for i in last if isinstance(i, Comm)]
    assert [(i.kind, i.bytes, i.sms) for i in messages] == [("send_recv", SBH / 4, 0)] * 3
    summed = last[-1]
    assert isinstance(summed, Compute)
    assert summed.bytes == SBH + SBH / 4


def test_others_keep_their_chunks() -> None:
    """Transformer Engine's default is a pipeline in every precision."""
    for framework, precision in (("megatron", "fp8"), ("megatron_bridge", "bf16")):
        sent = [i for i in layer_block(of(framework, precision), 0).forward if isinstance(i, Comm)]
        assert [i.kind for i in sent if i.name.startswith("mlp_down")] == ["reduce_scatter"] * 4
