"""Scales that a kernel brings into a matmul's order: which operands of which matmul, by release and by gathers."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Compute, Program
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.linear import linear
from sim.models.operators import Linear, Operator
from tests.sim.cases import scenario_with

M, K, N = 2048, 4096, 512
EXPERTS = 96


def scenario(layout: dict[str, Any] | None = None, model: Any = "llama3-8b", **training: Any) -> Scenario:
    training = {"seq_len": M, "global_batch_size": 8, "precision": "mxfp8", "framework": "megatron", **training}
    return scenario_with(training, layout, model=model, cluster="dgx-b200")


def layer(mode: str = "row", layout: dict[str, Any] | None = None, **training: Any) -> Operator:
    return linear(dims(scenario(layout, **training)), Linear("x", M, K, (N,), mode=mode))


def swizzled(part: Operator) -> list[Compute]:
    both: Program = (*part.forward, *part.backward)
    return [i for i in both if isinstance(i, Compute) and "swizzle" in i.name]


@pytest.mark.parametrize(
    ("precision", "date", "elements"),
    [
        ("mxfp8", "2026-01", [M * K, K * N, M * N, K * N, M * K, M * N]),  # all operands of three matmuls
        ("mxfp8", "2026-07", [K * N, K * N]),  # weights: forward and input's gradient
        ("mxfp8", "2026-08", []),
        ("nvfp4", "2026-06", [M * K, K * N, M * N, K * N, M * K, M * N]),
        ("nvfp4", "2026-07", [K * N, K * N]),
        ("nvfp4", None, []),
        ("fp8", "2026-01", []),
    ],
)
def test_which_operands_are_swizzled_before_a_matmul(precision: str, date: str | None, elements: list[int]) -> None:
    """Transformer Engine 2.12, 2.17 and 2.18; a scale of 32 or 16 numbers is a byte, read and written."""
    found = swizzled(layer(precision=precision, software_date=date))
    numbers = {"mxfp8": 32, "nvfp4": 16, "fp8": 1}[precision]
    assert [i.bytes for i in found] == [2 * n / numbers for n in elements]
    assert all(i.kernels == 1 and i.within_call for i in found)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}])
def test_torchao_swizzles_every_operand(layout: dict[str, Any]) -> None:
    """torchao 0.18, prototype/mx_formats/mx_tensor.py: `_addmm_mx_dispatch` calls `to_blocked` for both."""
    found = swizzled(layer(layout=layout, framework="compiled"))
    assert [i.bytes for i in found] == [2 * n / 32 for n in (M * K, K * N, M * N, K * N, M * K, M * N)]


@pytest.mark.parametrize(("mode", "gathered"), [("column", M * K), ("row", M * N)])
def test_what_was_gathered_is_swizzled_in_all_releases(mode: str, gathered: int) -> None:
    """Its matmuls are two: those of a column's input are the forward and the weight gradient, those of a row's gradient
    of the output both gradients."""
    found = swizzled(layer(mode, {"tp": 2, "sp": True}, software_date=None))
    assert [i.bytes for i in found] == [2 * gathered / 32] * 2
    assert not swizzled(layer(mode, {"tp": 2, "sp": False}, software_date=None))


def test_parameters_in_the_format_are_swizzled_in_all_releases() -> None:
    found = swizzled(layer(layout={"dp": 2, "zero": 1}, fp8_param_gather=True, software_date=None))
    assert [i.bytes for i in found] == [2 * K * N / 32] * 2


@pytest.mark.parametrize(("date", "kernels"), [("2025-08", EXPERTS), ("2025-09", 2), ("2026-07", 2), (None, 0)])
def test_groups_share_kernels_of_64(date: str | None, kernels: int) -> None:
    """Since Transformer Engine 2.7 one kernel takes up to 64 tensors (common/swizzle/swizzle.cu: kMaxTensorsPerKernel);
    before, each expert's have their own."""
    model = {"preset": "qwen3-30b-a3b", "moe": {"experts": EXPERTS}}
    s = scenario(model=model, software_date=date)
    block = layer_block(s, 0)
    found = [i for i in block.forward if isinstance(i, Compute) and i.name.startswith("experts_up") and "sw" in i.name]
    assert {i.kernels for i in found} == ({kernels} if kernels else set())
    assert len(found) == (0 if date is None else 1 if date > "2026-02" else 2)


def test_fused_experts_swizzle_their_weights() -> None:
    """ops/fused/grouped_mlp.py: weights of both forwards and of both gradients of inputs."""
    s = scenario(model="qwen3-30b-a3b", fused_experts=True, software_date=None)
    block = layer_block(s, 0)
    both = (*block.forward, *block.backward)
    found = [i.name for i in both if isinstance(i, Compute) and "swizzle" in i.name]
    assert len(found) == 4
