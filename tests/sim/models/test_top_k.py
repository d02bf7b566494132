"""A top-k and a sort take as long as their instructions, which few bytes do not show."""

from __future__ import annotations

import pytest
from model_programs import MOE, make, named

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block
from sim.models.top_k import top_k_clocks
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS


def captured_us(name: str, taken: Tensor, *made: Tensor) -> float:
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
    op = CapturedOperator(name, "forward", "", (taken,), made, 1, False)
    return 1e6 * sum(costs.compute(c).seconds for c in computes_of(op))


@pytest.mark.parametrize(
    ("rows", "row", "chosen", "dtype", "measured_us"),
    [(8192, 60, 4, "fp32", 37.7), (8192, 8, 1, "bf16", 11.8), (4096, 8, 2, "fp32", 18.2)],
)
def test_a_top_k_takes_as_long_as_on_an_h200(rows: int, row: int, chosen: int, dtype: str, measured_us: float):
    """The constants come from an H100; these are Qwen2-MoE, Llama 4 and Mixtral (measured/gpu_programs_h200)."""
    made = (Tensor(dtype, (rows, chosen), ()), Tensor("int64", (rows, chosen), ()))
    assert captured_us("aten.topk", Tensor(dtype, (rows, row), ()), *made) == pytest.approx(measured_us, rel=0.35)


def test_a_sort_takes_as_long_as_its_passes():
    """59 us on an H200 for 32,768 int64; the passes of a short row are one kernel."""
    numbers, few = Tensor("int64", (32768,), ()), Tensor("int64", (64, 512), ())
    assert captured_us("aten.sort", numbers, numbers, numbers) == pytest.approx(59, rel=0.25)
    assert captured_us("aten.sort", few, few, few) < 15


def test_a_described_router_chooses_as_a_captured_one():
    """One rule for both; Transformer Engine's fused router has a kernel of its own."""
    dims = MOE["moe"]["experts"], MOE["moe"]["top_k"]
    for framework, grouped in (("eager", {}), ("megatron", {}), ("megatron", {"groups": 4, "top_groups": 2})):
        block = layer_block(make(MOE | {"moe": MOE["moe"] | grouped}, {"framework": framework}), 0)
        (last,) = named(block.forward, "router_top_k")
        rows = last.shape[0]
        assert last.clocks == top_k_clocks(rows, *dims, narrow=False) > 0
        before = [named(block.forward, n) for n in ("best_of_groups", "top_groups")]
        assert [len(x) for x in before] == ([1, 1] if grouped else [0, 0])
        if grouped:
            assert before[0][0].clocks == top_k_clocks(4 * rows, dims[0] // 4, 2, narrow=False)
    fused = layer_block(make(MOE, {"framework": "megatron_bridge"}), 0)
    assert not named(fused.forward, "router_top_k")
