"""Routed experts of narrower tokens (`model.moe.latent`), as Megatron-Core builds them. Counts in closed form."""

from __future__ import annotations

from typing import Any

import pytest
from model_programs import MOE, TOKENS, comm_bytes, flops, make, named, saved_bytes

from sim.core.errors import InputError
from sim.core.program import Phase
from sim.inputs.scenario import parse_scenario
from sim.models.flops import matmul_params_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.output.mtp import mtp_block
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims

HIDDEN, FFN, EXPERTS, TOP_K, LATENT = 1024, 512, 16, 2, 256
NARROW: dict[str, Any] = MOE | {"moe": MOE["moe"] | {"latent": LATENT}}
MEGATRON = {"framework": "megatron_bridge"}
LAYERS = 4


def test_parameters_are_narrower_experts_and_two_projections() -> None:
    wide, narrow = (count_parameters(make(model).model) for model in (MOE, NARROW))
    assert wide.experts - narrow.experts == LAYERS * EXPERTS * 3 * (HIDDEN - LATENT) * FFN
    assert narrow.router - wide.router == LAYERS * 2 * HIDDEN * LATENT
    saved = LAYERS * (TOP_K * 3 * (HIDDEN - LATENT) * FFN - 2 * HIDDEN * LATENT)
    assert wide.active - narrow.active == saved
    of_matmuls = [matmul_params_per_token(make(model).model) for model in (MOE, NARROW)]
    assert of_matmuls[0] - of_matmuls[1] == saved


@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep", "hybridep"])
def test_narrow_tokens_are_sent_and_computed(dispatcher: str) -> None:
    p = {"dp": 4, "ep": 4, "ep_dispatcher": dispatcher}
    wide, narrow = (layer_block(make(model, MEGATRON, **p), 0) for model in (MOE, NARROW))
    for found in (wide.forward, narrow.forward):
        assert len(named(found, "dispatch")) == len(named(found, "combine")) == 1
    for name in ("dispatch", "combine"):
        (before,), (after,) = (named(block.forward, name) for block in (wide, narrow))
        beside = 0.0 if name == "combine" or dispatcher == "all_to_all" else None  # weights and numbers go along
        share = after.bytes / before.bytes
        assert share == LATENT / HIDDEN if beside == 0.0 or dispatcher == "all_to_all" else share < 0.3
    assert flops(narrow.forward, ("grouped_gemm",)) * HIDDEN == flops(wide.forward, ("grouped_gemm",)) * LATENT
    assert comm_bytes(narrow.forward, "ep") < 0.35 * comm_bytes(wide.forward, "ep")


def test_projections_are_of_a_rank_s_own_tokens() -> None:
    for tp, rows in ((1, TOKENS), (2, TOKENS // 2)):
        block = layer_block(make(NARROW, MEGATRON, tp=tp, sp=tp > 1), 0)
        for name, (n, k) in (("latent_down", (LATENT, HIDDEN)), ("latent_up", (HIDDEN, LATENT))):
            (forward,) = named(block.forward, name)
            assert forward.flops == 2 * rows * n * k
            assert flops(named(block.backward, f"{name}_dgrad"), phase=Phase.INPUT_GRAD) == forward.flops
            assert [i.flops for i in named(block.backward, f"{name}_wgrad")] == [forward.flops]


def test_the_router_s_input_is_kept_once_and_the_narrow_result_besides() -> None:
    kept = {name: layer_block(make(model, MEGATRON), 0).saved for name, model in (("wide", MOE), ("narrow", NARROW))}
    by_name = {item.name: item.bytes for item in kept["narrow"]}
    assert "latent_down input" not in by_name
    assert by_name["latent_up input"] == 2 * TOKENS * LATENT
    copies = 2 * TOP_K * TOKENS * (HIDDEN - LATENT)  # inputs of experts
    assert saved_bytes(kept["wide"]) - saved_bytes(kept["narrow"]) == copies - 2 * TOKENS * LATENT


def test_a_graph_with_the_preparation_holds_narrow_tokens() -> None:
    scope = {"cuda_graphs": "layers", "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"]}
    p = {"dp": 4, "ep": 4, "ep_dispatcher": "hybridep"}
    held = {}
    for name, model in (("wide", MOE), ("narrow", NARROW)):
        block = layer_block(make(model, MEGATRON | scope, **p), 0)
        held[name] = sum(item.bytes for item in block.saved if item.name == "graph's tokens")
        (down,) = named(block.forward, "latent_down") or [None]
        assert down is None or down.graphed
    assert held == {"wide": 0, "narrow": 2 * TOKENS * LATENT}


def test_serving_projects_around_the_experts() -> None:
    items = {}
    for name, model in (("wide", MOE), ("narrow", NARROW)):
        inference = {"requests": {"prompt_len": 8, "output_len": 8}}
        s = parse_scenario({"model": model, "inference": inference, "cluster": "dgx-h100", "calibration": "roofline"})
        mlp = layer_specs(s.model)[0].mlp
        assert mlp is not None
        items[name] = mlp.serve(serving_dims(s), 4096)
    names = [getattr(i, "name", "") for i in items["narrow"]]
    assert names.index("latent_down") < names.index("latent_up")
    assert flops(named(items["narrow"], "latent_up")) == 2 * 4096 * HIDDEN * LATENT
    assert not named(items["wide"], "latent_up")


def test_a_module_of_a_model_of_single_layers_has_the_last_of_each() -> None:
    states = {"heads": 16, "head_dim": 64, "state": 64}
    own = {
        "state_space": states,
        "attention_pattern": ["state_space", "none", "full", "none"],
        "mlp_pattern": ["none", "experts", "none", "experts"],
        "mtp_layers": 1,
    }
    block = mtp_block(make(NARROW | own, MEGATRON))
    assert named(block.forward, "router")
    assert named(block.forward, "attention_out")
    assert not named(block.forward, "state_scan")


def test_shared_experts_beside_exchanges_are_refused() -> None:
    """transformer/moe/moe_layer.py, `preprocess`: "Shared expert overlap with MoE latent projections is not supported
    during training"."""
    model = NARROW | {"moe": NARROW["moe"] | {"shared_experts": 1}}
    with pytest.raises(InputError, match=r"moe_shared_expert_overlap: found true; needs model\.moe without latent"):
        make(model, MEGATRON | {"moe_shared_expert_overlap": True}, dp=4, ep=4)
