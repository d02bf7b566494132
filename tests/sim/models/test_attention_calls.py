"""The host's calls of fused attention, described and captured."""

from __future__ import annotations

from sim.core.program import Compute
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from tests.sim.models.model_programs import make
from topology.presets import GPUS

COSTS = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])


def backward_captured(name: str) -> Compute:
    x = Tensor("bf16", (2, 16, 1024, 64), ())
    op = CapturedOperator(f"aten._scaled_dot_product_{name}_backward", "backward", "", (x,) * 5, (x,) * 3, 1, False)
    return computes_of(op)[0]


def test_the_backward_of_attention_is_one_call() -> None:
    """Its three kernels are issued in C++, so both forms pay one call of Python and two launches of a library."""
    block = layer_block(make(training={"framework": "eager", "attention": "fused"}), 0)
    (described,) = (x for x in block.backward if isinstance(x, Compute) and x.kind == "attention_backward")
    captured = backward_captured("flash_attention")
    assert described.kernels == captured.kernels == 3
    assert COSTS.host_s(described, plain=True) == COSTS.host_s(captured, plain=True) > 0
    c = COSTS.coefficients
    assert COSTS.host_s(captured, plain=True) < 2 * max(c.host_operator_s, c.host_operator_eager_s or 0.0)


def test_a_cpu_runs_the_backward_of_attention_as_one_kernel() -> None:
    assert backward_captured("flash_attention_for_cpu").kernels == 1
