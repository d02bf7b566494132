"""Selective recomputation of parts of a layer: what is lost, what stays, what runs again."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import LLAMA, make, saved_by_part, saved_bytes

from sim.core.errors import InputError
from sim.core.program import Block, Compute, ModelPart
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from tests.sim.cases import scenario_with

TOKENS, H, FFN = 2 * 512, 1024, 2816
PARALLEL = LLAMA | {"parallel_block": True}
EXPERTS = LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn": 512, "shared_experts": 1}}
LATENT = {
    **{k: v for k, v in LLAMA.items() if k != "kv_heads"},
    "mla": {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}


def block(model: Any, *modules: str, framework: str = "megatron") -> Block:
    recompute = {"mode": "selective", "modules": list(modules)} if modules else "none"
    return layer_block(make(model, {"framework": framework, "recompute": recompute}), 0)


def lost(model: Any, *modules: str, framework: str = "megatron") -> float:
    """16-bit numbers a token that the modules spare, of what is kept without recomputation."""
    both = (block(model, framework=framework), block(model, *modules, framework=framework))
    kept = [sum(s.bytes for s in b.saved) for b in both]
    return (kept[0] - kept[1]) / 2 / TOKENS


@pytest.mark.parametrize(
    ("model", "modules", "numbers"),
    [
        (LLAMA, ["layernorm"], 0),  # both norms are part of the matmuls behind them
        (LLAMA, ["mlp"], 3 * FFN),  # gate, up, their product
        (LLAMA, ["layernorm", "mlp"], 3 * FFN),
        (EXPERTS, ["layernorm"], H),  # the norm before experts alone
        (LATENT, ["layernorm"], H),  # that before latent attention
        (LATENT | {"moe": EXPERTS["moe"]}, ["layernorm"], 2 * H),
        (PARALLEL, ["layernorm"], H),  # both branches have one input
        (PARALLEL, ["mlp"], 3 * FFN),
        (EXPERTS, ["moe_act"], 2 * 512),  # the second input of two experts
        (EXPERTS, ["shared_experts"], 3 * 512),
        (LATENT, ["mla_up_proj"], 16 * (96 + 96 + 64)),  # queries, keys, values
    ],
)
def test_each_module_loses_its_tensors(model: Any, modules: list[str], numbers: float) -> None:
    assert lost(model, *modules) == numbers


def test_norms_of_plain_modules_lose_their_outputs() -> None:
    """Inputs of query-key-value and of gate-up, where each norm is a module of its own."""
    assert lost(LLAMA, "layernorm", framework="compiled") == 2 * H


def test_a_warning_says_that_joined_norms_stay() -> None:
    asked = {"framework": "megatron", "recompute": {"mode": "selective", "modules": ["layernorm"]}}
    said = [any("of no effect on layernorm" in w for w in make(m, asked).warnings) for m in (LLAMA, EXPERTS, LATENT)]
    assert said == [True, False, False]


def test_the_whole_of_moe_keeps_its_input_alone() -> None:
    whole = saved_by_part(make(EXPERTS, {"framework": "megatron"}))
    others = sum(size for part, size in whole.items() if part is not ModelPart.EXPERTS)
    assert saved_bytes(block(EXPERTS, "moe").saved) - others == 2 * TOKENS * H


@pytest.mark.parametrize(
    ("model", "module", "kinds"),
    [
        (LLAMA, "layernorm", {"norm": 0}),
        (EXPERTS, "layernorm", {"norm": 1}),
        (LLAMA, "mlp", {"gemm": 2, "elementwise": 1}),
        (PARALLEL, "layernorm", {"norm": 1}),
        (PARALLEL, "mlp", {"gemm": 2, "elementwise": 1}),
        (EXPERTS, "moe_act", {"elementwise": 1}),
        (LATENT, "mla_up_proj", {"gemm": 2}),
    ],
)
def test_what_runs_again(model: Any, module: str, kinds: dict[str, int]) -> None:
    again = [i for i in block(model, module).recompute if isinstance(i, Compute)]
    for kind, number in kinds.items():
        assert sum(i.kind == kind for i in again) == number


def test_the_core_alone_is_plain_selective() -> None:
    plain = layer_block(make(LLAMA, {"recompute": "selective"}), 0)
    named = layer_block(make(LLAMA, {"recompute": {"mode": "selective", "modules": ["core_attn"]}}), 0)
    assert plain == named


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"mode": "selective", "modules": ["moe_act"]}, "found 'moe_act'; needs model.moe"),
        ({"mode": "selective", "modules": ["mla_up_proj"]}, "found 'mla_up_proj'; needs model.mla"),
        ({"mode": "full", "modules": ["mlp"]}, "cannot be given with mode full"),
        ({"mode": "selective", "modules": ["mlp", "mlp"]}, "each at most once"),
        ({"mode": "selective", "modules": ["attention"]}, "recompute.modules"),
    ],
)
def test_what_does_not_go_together_is_named(recompute: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(LLAMA, {"recompute": recompute})


def test_a_resolved_scenario_can_be_read_again() -> None:
    """With every default written out, the usual modules beside each mode too."""
    for mode in ("none", "full", "selective_op"):
        written = scenario_with(
            {"seq_len": 64, "global_batch_size": 1, "recompute": mode}, cluster="dgx-a100"
        ).model_dump(mode="json")
        assert parse_scenario(written).for_training.recompute.mode == mode
