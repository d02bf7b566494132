"""The host's time of captured operators: one call of torch issues several kernels faster than Python issues calls."""

from __future__ import annotations

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

IMAGES, CHANNELS = Tensor("bf16", (8, 64, 32, 32), ()), Tensor("bf16", (64,), ())
FILTER = Tensor("bf16", (64, 64, 3, 3), ())


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "kernels"),
    [
        ("aten.relu", (IMAGES,), (IMAGES,), 1),
        ("aten.native_group_norm", (IMAGES, CHANNELS, CHANNELS), (IMAGES,), 3),
        ("aten.native_group_norm_backward", (IMAGES, IMAGES, CHANNELS), (IMAGES, CHANNELS, CHANNELS), 5),
        ("aten.convolution_backward", (IMAGES, IMAGES, FILTER), (IMAGES, FILTER), 2),
    ],
)
def test_the_host_calls_an_operator_once_however_many_kernels_it_starts(
    name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], kernels: int
) -> None:
    op = CapturedOperator(name, "forward", "", inputs, outputs, 1, False)
    made = computes_of(op)
    assert sum(c.kernels for c in made) == kernels
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
    c = costs.coefficients
    assert c.host_operator_eager_s
    assert c.group_launch_s < c.host_operator_eager_s
    issued_s = sum(costs.host_s(x, plain=True) for x in made)
    assert issued_s == pytest.approx(c.host_operator_eager_s + (kernels - 1) * c.group_launch_s)


def test_a_kernel_that_a_cuda_graph_launches_says_so() -> None:
    """Then steps and replays take no host time for it (`prices.rank_prices`, `traces.program_prices`)."""
    op = CapturedOperator("aten.native_group_norm", "forward", "", (IMAGES, CHANNELS, CHANNELS), (IMAGES,), 1, False)
    assert not any(c.graphed for c in computes_of(op))
    assert all(c.graphed for c in computes_of(op._replace(graphed=True)))
