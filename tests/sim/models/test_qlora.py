"""QLoRA: frozen matrices in 4 bits, made 16-bit for each matmul."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario
from sim.models.frozen_weights import FORMATS
from sim.models.layer import layer_block
from sim.programs.data_parallel import make_data_parallel
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from tests.sim.cases import scenario_with
from tests.sim.models.test_lora import MATRICES, SMALL

NF4_BYTES, NF4_DATA_BYTES = FORMATS["nf4"].total, FORMATS["nf4"].data
ELEMENTS = sum(n * k for n, k in MATRICES)


def scenario(weights: str | None, parallelism: dict[str, Any] | None = None, **training: Any) -> Scenario:
    lora = {"rank": 8, "weights": weights}
    return scenario_with(
        {"seq_len": 128, "global_batch_size": 2, "lora": lora, **training},
        parallelism,
        model=SMALL,
        calibration="roofline",
    )


def test_matrices_of_layers_take_half_a_byte_a_number() -> None:
    """0.127 bits a parameter beside the four (arXiv 2305.14314, section 3)."""
    bits = 8 * NF4_BYTES
    assert bits == pytest.approx(4.127, abs=1e-3)
    held = [simulate(scenario(w)).result["memory"][0]["parameters"] for w in (None, "nf4")]
    assert held[0] - held[1] == pytest.approx(3 * ELEMENTS * (2 - NF4_BYTES))


@pytest.mark.parametrize(("layer", "recompute", "again"), [(1, "none", 1), (1, "full", 2), (0, "none", 0)])
def test_every_matmul_s_matrix_is_made_anew(layer: int, recompute: str, again: int) -> None:
    """In the backward once more, with full recomputation twice; the first layer's backward ends at its adapters."""
    block = layer_block(scenario("nf4", recompute=recompute), layer)

    def made(items: Any) -> float:
        return sum(i.bytes for i in items if isinstance(i, Compute) and i.kind == "cast")

    once = ELEMENTS * (NF4_BYTES + 2)
    assert made(block.forward) == pytest.approx(once)
    backward = made(block.backward) + made(block.recompute)
    assert backward == pytest.approx(again * once) if layer else backward < once


def test_tensor_and_pipeline_parallel_ranks_have_their_parts() -> None:
    whole, half = (simulate(scenario("nf4", {"tp": tp})).result["memory"][0]["parameters"] for tp in (1, 2))
    assert half < whole
    assert simulate(scenario("nf4", {"pp": 3})).result["step_time_s"] > 0


def test_fsdp_shards_and_gathers_four_bits() -> None:
    """bitsandbytes' `quant_storage`: FSDP sees the packed numbers as a parameter of the others' dtype; the scales are
    attributes of the module, whole on each rank."""
    layout = {"dp": 4, "zero": 3}
    cases = [scenario(w, layout, global_batch_size=4) for w in (None, "nf4")]
    wide, packed = (simulate(case).result["memory"][0]["parameters"] for case in cases)
    scales = NF4_BYTES - NF4_DATA_BYTES
    assert wide - packed == pytest.approx(3 * ELEMENTS * ((2 - NF4_DATA_BYTES) / 4 - scales))
    dp = make_data_parallel(make_plan(cases[1]))
    gathered = [dp.gathered_params(layer_block(case, 0)) for case in cases]
    assert 2 * (gathered[0] - gathered[1]) == pytest.approx(ELEMENTS * (2 - NF4_DATA_BYTES))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"precision": "fp8"}, "precision fp8"),
    ],
)
def test_what_is_not_simulated_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"lora\.weights: found 'nf4'; .*{message}"):
        scenario("nf4", **more)


def test_eight_bits_take_a_byte_a_number_and_quantize_each_input() -> None:
    """bitsandbytes, autograd/_functions.py: `MatMul8bitLt`. The backward makes each matrix 16-bit."""
    held = [simulate(scenario(w)).result["memory"][0]["parameters"] for w in (None, "int8")]
    assert held[0] - held[1] == pytest.approx(3 * ELEMENTS)
    plain, eight = (layer_block(scenario(w), 1) for w in (None, "int8"))
    casts = [
        [i.name for i in p if isinstance(i, Compute) and i.kind == "cast"] for p in (eight.forward, eight.backward)
    ]
    assert [len(names) for names in casts] == [2 * 4, 4]
    assert eight.forward_peak_bytes > plain.forward_peak_bytes


def test_an_eight_bit_layer_keeps_its_input() -> None:
    """`ctx.tensors = (CAt, subA, A)`, whether A is needed or not: of a layer without adapters, too."""
    kept = [
        sum(s.bytes for s in layer_block(scenario_of({"rank": 8, "targets": ["qkv"], "weights": w}), 1).saved)
        for w in ("nf4", "int8")
    ]
    assert kept[1] > kept[0]


def scenario_of(lora: dict[str, Any], model: Any = SMALL) -> Scenario:
    training = {"seq_len": 128, "global_batch_size": 2, "lora": lora}
    return scenario_with(training, model=model, calibration="roofline")


EXPERTS = {**SMALL, "moe": {"experts": 8, "top_k": 2, "ffn": 64}}


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_experts_are_kept_in_few_bits_where_that_is_said(weights: str) -> None:
    """Axolotl's `quantize_moe_experts`: all of a layer's are made 16-bit at once, and kept for the backward."""
    lora = {"rank": 8, "targets": ["qkv"], "weights": weights}
    plain, few = (layer_block(scenario_of(lora | {"quantized_experts": q}, EXPERTS), 1) for q in (False, True))
    elements = 8 * 64 * SMALL["hidden"] * 3  # gate, up, down
    assert few.few_bit_params - plain.few_bit_params == elements
    assert sum(s.bytes for s in few.saved) - sum(s.bytes for s in plain.saved) == 2 * elements
    held = [
        simulate(scenario_of(lora | {"quantized_experts": q}, EXPERTS)).result["memory"][0]["parameters"]
        for q in (False, True)
    ]
    assert held[0] - held[1] == pytest.approx(3 * elements * (2 - FORMATS[weights].total))


def test_quantized_experts_need_a_format() -> None:
    with pytest.raises(InputError, match=r"quantized_experts: found true; needs training\.lora\.weights"):
        scenario_of({"rank": 8, "targets": ["qkv"], "quantized_experts": True}, EXPERTS)
