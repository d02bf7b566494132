"""A gate of one number a head and token on attention's result (LFM3): parameters, FLOPs and bytes."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.emit import emit
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import model_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims
from sim.simulation import simulate

LAYERS, HIDDEN, HEADS, SEQ = 4, 512, 8, 256
MODEL = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 2, "vocab": 1024, "norm": "rmsnorm"}


def scenario(gate: bool | str, framework: str = "eager", tp: int = 1, **keys: Any) -> Scenario:
    training = {"seq_len": SEQ, "global_batch_size": 1, "micro_batch_size": 1, "framework": framework}
    return parse_scenario(
        {
            "model": {**MODEL, "mlp": "swiglu", "bias": False, "positions": "rope", "attention_gate": gate},
            "cluster": "dgx-h100",
            "parallelism": {"tp": tp},
            **(keys or {"training": training}),
        }
    )


def test_a_number_a_head_is_projected() -> None:
    plain, gated = (scenario(gate).model for gate in (False, "per_head"))
    assert count_parameters(gated).total - count_parameters(plain).total == LAYERS * HIDDEN * HEADS
    more = model_flops_per_token(gated, SEQ) - model_flops_per_token(plain, SEQ)
    assert more == pytest.approx(LAYERS * 6 * HIDDEN * HEADS)


@pytest.mark.parametrize("framework", ["eager", "megatron"])
def test_kept_for_backward_are_the_result_and_one_number_a_head(framework: str) -> None:
    def kept(gate: bool | str) -> float:
        return sum(s.bytes for s in layer_block(scenario(gate, framework), 0).saved)

    assert kept("per_head") - kept(False) == SEQ * (HIDDEN + HEADS) * 2
    assert kept(True) - kept(False) == SEQ * 2 * HIDDEN * 2


def test_the_product_reads_and_writes_the_result_and_reads_the_gates() -> None:
    def moved(framework: str) -> list[tuple[float, int]]:
        block = layer_block(scenario("per_head", framework), 0)
        items = [*block.forward, *block.backward]
        return [(i.bytes / 2 / SEQ, i.kernels) for i in items if isinstance(i, Compute) and "attention_gate" in i.name]

    assert moved("megatron") == [(2 * HIDDEN + HEADS, 1), (3 * HIDDEN + 2 * HEADS, 1)]
    assert moved("eager") == [(2 * HIDDEN + 3 * HEADS, 2), (6 * HIDDEN + 5 * HEADS, 4)]


def test_ranks_have_their_heads_gates() -> None:
    attention = layer_specs(scenario("per_head").model)[0].attention
    assert attention is not None
    assert [attention.matrices(tp)[0].outputs[-1] for tp in (1, 2)] == [HEADS, HEADS // 2]
    assert simulate(scenario("per_head", tp=2)).result["step_time_s"] > 0


def test_serving_reads_less_than_with_a_gate_of_every_number() -> None:
    inference = {"requests": {"prompt_len": 8, "output_len": 8}}
    found = []
    for gate in ("per_head", True):
        s = scenario(gate, inference=inference)
        attention = layer_specs(s.model)[0].attention
        assert attention is not None
        program = attention.serve(serving_dims(s), 16)
        found += [i.bytes for i in program if isinstance(i, Compute) and i.name == "attention_gate"]
    assert found == [16 * (2 * HIDDEN + HEADS) * 2, 16 * 3 * HIDDEN * 2]


def test_megatron_has_no_flag_for_it() -> None:
    with pytest.raises(InputError, match="attention_gate"):
        emit(scenario("per_head", "megatron"), "megatron")


MLA = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT = MODEL | {"kv_heads": HEADS, "mlp": "swiglu", "bias": False, "positions": "rope", "mla": MLA}


def latent(**change: Any) -> Scenario:
    training = {"seq_len": SEQ, "global_batch_size": 1, "micro_batch_size": 1, "framework": "eager"}
    model = LATENT | {"attention_gate": "per_head"} | change
    return parse_scenario({"model": model, "cluster": "dgx-h100", "training": training})


def test_latent_attention_has_the_same_gate() -> None:
    plain, gated = latent(attention_gate=False), latent()
    assert count_parameters(gated.model).total - count_parameters(plain.model).total == LAYERS * HIDDEN * HEADS
    kept = [sum(s.bytes for s in layer_block(s, 0).saved) for s in (plain, gated)]
    assert kept[1] - kept[0] == SEQ * (HEADS * 32 + HEADS) * 2
    inference = {"requests": {"prompt_len": 8, "output_len": 8}}
    served = parse_scenario(
        {"model": LATENT | {"attention_gate": "per_head"}, "cluster": "dgx-h100", "inference": inference}
    )
    attention = layer_specs(served.model)[0].attention
    assert attention is not None
    program = attention.serve(serving_dims(served), 16)
    (gate,) = (i.bytes for i in program if isinstance(i, Compute) and i.name == "attention_gate")
    assert gate == 16 * (2 * HEADS * 32 + HEADS) * 2
    assert sum(i.kind == "gemm" and i.name == "head_gate" for i in program if isinstance(i, Compute)) == 1


def test_latent_attention_has_a_gate_of_every_number() -> None:
    """From the hidden state (Hunyuan 4), or with the query from both of its latents (A.X K2)."""
    ranked = MLA | {"q_lora_rank": 64}
    plain, own, joined = (latent(mla=ranked, attention_gate=gate) for gate in (False, True, "latent"))
    count = [count_parameters(s.model).total for s in (plain, own, joined)]
    assert count[1] - count[0] == LAYERS * HIDDEN * HEADS * 32
    assert count[2] - count[0] == LAYERS * 64 * (HEADS * 64 + 2 * HEADS * 32)
    for s in (own, joined):
        assert layer_block(s, 0).params == layer_specs(s.model)[0].parameters
    indexed = latent(mla=ranked, indexer={"heads": 4, "head_dim": 32, "top_k": 64}, attention_gate=True)
    assert layer_block(indexed, 0).params + layer_block(indexed, 0).frozen_params == (
        layer_specs(indexed.model)[0].parameters
    )


def test_gates_from_a_latent_need_one() -> None:
    with pytest.raises(InputError, match="attention_gate: found 'latent'"):
        latent(attention_gate="latent")
    with pytest.raises(InputError, match="attention_gate: found 'latent'"):
        scenario("latent")
