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
