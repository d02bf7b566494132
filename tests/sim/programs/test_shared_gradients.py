"""Gradients of what all tensor-parallel ranks hold whole, which Megatron-Core sums over them once a step."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm
from sim.programs.step_end import epilogue
from sim.simulation import simulate
from tests.sim.cases import llama_like, scenario_with

HIDDEN, LAYERS, EXPERTS = 256, 2, 4
LLAMA = llama_like(LAYERS, HIDDEN, 4, 8192)
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
NORMS = (2 * LAYERS + 1) * HIDDEN


def summed(model: Any, **layout: Any) -> list[float]:
    """Elements of each such message of the step's first rank."""
    training = {"seq_len": 64, "global_batch_size": 4, "framework": layout.pop("framework", "megatron")}
    step = simulate(scenario_with(training, {"dp": 2, "tp": 2, "sp": True} | layout, model=model))
    program = epilogue(tuple(step.stages[0].values()), step.plan, False)
    ends = [i for i in program if isinstance(i, Comm) and i.name == "shared gradients"]
    assert {(i.kind, i.group, i.blocking) for i in ends} <= {("all_reduce", "tp", True)}
    return [i.bytes / FP32_BYTES for i in ends]


@pytest.mark.parametrize(
    ("more", "elements"),
    [
        ({}, NORMS),
        ({"bias": True}, NORMS + LAYERS * 2 * HIDDEN),  # of both layers behind a sum over tp
        (
            {"moe": {"experts": EXPERTS, "top_k": 2, "ffn": 64, "shared_experts": 1, "shared_gate": True}},
            NORMS + LAYERS * (EXPERTS + 1) * HIDDEN,
        ),
        (
            {"mla": LATENT, "kv_heads": None, "head_dim": None},
            NORMS + LAYERS * ((64 + 32 + 32) * HIDDEN + 64 + 32),  # both down-projections, norms of both latents
        ),
    ],
)
def test_norms_biases_routers_and_whole_matrices(more: dict[str, Any], elements: int) -> None:
    assert summed({**LLAMA, **more}) == [elements]


def test_where_no_rank_has_a_part_of_a_gradient() -> None:
    assert summed(LLAMA, sp=False) == []
    assert summed(LLAMA, tp=1, sp=False) == []
    assert summed(LLAMA, framework="eager") == []


def test_fsdp_sums_its_shards() -> None:
    assert summed(LLAMA, zero=3) == [NORMS / 2]
