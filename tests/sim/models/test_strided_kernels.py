"""Kernels that torch does not vectorize: strided halves of an activation, heads put in order, sums of unlike dtypes."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from sim.core.program import EAGER_NORM, Compute, Phase
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.prices.coefficients import Coefficients
from sim.prices.operator_prices import Costs
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from sim.variants.frameworks.records import FRAMEWORKS
from topology.presets import GPUS


def scenario(framework: str) -> Scenario:
    training = {"seq_len": 4096, "global_batch_size": 16, "framework": framework, "grad_dtype": "fp32"}
    return parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"dp": 8}, "training": training})


def computed(framework: str) -> list[Compute]:
    layer = layer_block(scenario(framework), 1)
    return [op for op in (*layer.forward, *layer.backward) if isinstance(op, Compute)]


def test_nanotron_reads_halves_where_they_lie() -> None:
    """Forward all five accesses; backward three each of the product's and the activation's kernels, of thirteen."""
    gate = [
        (op.bytes, op.kernels, op.kernel, op.strided) for op in computed("nanotron") if op.name.startswith("swiglu")
    ]
    width = 2 * 4096 * 14336
    back = "swiglu_backward"
    assert gate == [(5 * width, 2, "swiglu", True), (6 * width, 2, back, True), (7 * width, 2, back, False)]


def test_a_fused_kernel_reads_halves_where_they_lie_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel forward, of three accesses, and one backward, of five: nothing is left over for others."""
    fused = replace(FRAMEWORKS["nanotron"], fuses_activation=True)
    monkeypatch.setitem(FRAMEWORKS, "nanotron", fused)
    gate = [(op.bytes, op.kernels, op.strided) for op in computed("nanotron") if op.name.startswith("swiglu")]
    width = 2 * 4096 * 14336
    assert gate == [(3 * width, 1, True), (5 * width, 1, True)]


def test_sums_of_unlike_dtypes_and_ordered_heads_are_strided_too() -> None:
    names = {op.name for op in computed("nanotron") if op.strided}
    assert {"mlp_up_wgrad_accumulate", "attention_copies", "attention_copies_backward"} < names
    assert not [op for op in computed("eager") if op.strided]


def test_a_hopper_moves_less_in_such_a_kernel() -> None:
    """A cast of 2^29 numbers took 2.225 ms where a vectorized one, which reaches 0.85 here, took 1.736."""
    s = scenario("nanotron")
    costs = Costs(load_profile("h100-sxm"), s.cluster.gpu)
    op = next(op for op in computed("nanotron") if op.name == "mlp_up_wgrad_accumulate")
    assert costs.compute(op).seconds == pytest.approx(op.bytes / (0.85 * 1.736 / 2.225 * 3.35e12), rel=0.03)


def test_points_of_vectorized_kernels_do_not_stand_for_others() -> None:
    """Where points price a kernel it loses as much to striding as by the bandwidth; unless nobody says how much."""
    sizes = np.array([[2**n] for n in range(20, 32)])
    points = PointTable("elementwise", "bf16", sizes, sizes[:, 0] / 3e12, np.full(12, 0.01), np.full(12, 9))
    op = Compute("gate", "elementwise", (2**20,), "bf16", 1.0, 2.0**24, Phase.FORWARD)
    efficiency = Coefficients(memory_efficiency=0.8, memory_efficiency_of={"strided": 0.6})
    for coefficients, slower in ((efficiency, 0.8 / 0.6), (Coefficients(), 1.0)):
        costs = Costs(Profile("x", "", coefficients=coefficients, points=(points,)), GPUS["h100-sxm"])
        plain, strided = costs.compute(op), costs.compute(structs.replace(op, strided=True))
        assert strided.seconds == pytest.approx(slower * plain.seconds)
        assert strided.uncertainty > plain.uncertainty
        assert (plain.source, strided.source) == ("measured", "interpolated")


def test_a_norm_s_backward_is_four_kernels_of_nanotron_s() -> None:
    """The fused one, partial sums of the weight's gradient added and cast, and its sum in fp32."""
    assert [op.kernels for op in computed("nanotron") if op.name == "mlp_norm_backward"] == [4]


def test_a_chain_of_operators_is_told_from_a_norm_of_several_kernels() -> None:
    kernels = {name: {op.kernel for op in computed(name) if op.kind == "norm"} for name in ("nanotron", "eager")}
    assert kernels == {"nanotron": {""}, "eager": {EAGER_NORM}}
