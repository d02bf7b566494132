"""Kernels that torch does not vectorize: strided halves of an activation, heads put in order, sums of unlike dtypes."""

from __future__ import annotations

import pytest

from sim.core.program import STRIDED, Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile


def scenario(framework: str) -> Scenario:
    training = {"seq_len": 4096, "global_batch_size": 16, "framework": framework, "grad_dtype": "fp32"}
    return parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"dp": 8}, "training": training})


def computed(framework: str) -> list[Compute]:
    layer = layer_block(scenario(framework), 1)
    return [op for op in (*layer.forward, *layer.backward) if isinstance(op, Compute)]


def test_nanotron_reads_halves_where_they_lie() -> None:
    """Forward all five accesses; backward three each of the product's and the activation's kernels, of thirteen."""
    gate = [(op.bytes, op.kernels, op.kernel) for op in computed("nanotron") if op.name.startswith("swiglu")]
    width = 2 * 4096 * 14336
    assert gate == [(5 * width, 2, STRIDED), (6 * width, 2, STRIDED), (7 * width, 2, "")]


def test_sums_of_unlike_dtypes_and_ordered_heads_are_strided_too() -> None:
    names = {op.name for op in computed("nanotron") if op.kernel == STRIDED}
    assert {"mlp_up_wgrad_accumulate", "attention_copies", "attention_copies_backward"} < names
    assert not [op for op in computed("eager") if op.kernel == STRIDED]


def test_a_hopper_moves_less_in_such_a_kernel() -> None:
    """1.448 of an H100 PCIe's 2.04 TB/s, where streaming kernels reach 0.85."""
    s = scenario("nanotron")
    costs = Costs(load_profile("h100-sxm"), s.cluster.gpu)
    op = next(op for op in computed("nanotron") if op.name == "mlp_up_wgrad_accumulate")
    assert costs.compute(op).seconds == pytest.approx(op.bytes / (0.71 * 3.35e12), rel=0.03)


def test_a_norm_s_backward_is_four_kernels_of_nanotron_s() -> None:
    """The fused one, partial sums of the weight's gradient added and cast, and its sum in fp32."""
    assert [op.kernels for op in computed("nanotron") if op.name == "mlp_norm_backward"] == [4]
