"""A top-k and a sort take as long as their instructions, which few bytes do not show."""

from __future__ import annotations

import pytest
from model_programs import MOE, make, named

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of, known
from sim.models.layer import layer_block
from sim.models.torch_kernels.top_k import top_k_clocks
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


def captured(name: str, taken: Tensor, *made: Tensor) -> tuple[int, float]:
    """Return how many kernels an operator starts, and their bytes for each number taken."""
    found = computes_of(CapturedOperator(name, "forward", "", (taken,), made, 1, False))
    return sum(c.kernels for c in found), found[0].bytes / taken.elements


def test_several_blocks_choose_out_of_a_vocabulary():
    """TensorTopK.cu, mbtopk::launch: 20 kernels for fp32, which read a row five times; 14 and three for 16 bits."""
    for dtype, kernels, read in (("fp32", 20, 5 * 4), ("bf16", 14, 3 * 2)):
        logits, chosen, places = Tensor(dtype, (4, 128256), ()), Tensor(dtype, (4, 1), ()), Tensor("int64", (4, 1), ())
        found = captured("aten.topk", logits, chosen, places)
        assert found == (kernels, pytest.approx(read, rel=0.001))
    assert captured_us("aten.topk", Tensor("fp32", (4, 32000), ()), chosen, places) > 20 * 1.9
    # one block reads a row of 10,000 by itself: the other multiprocessors wait
    one = captured_us("aten.topk", Tensor("fp32", (4, 10000), ()), chosen, places)
    assert one == pytest.approx(captured_us("aten.topk", Tensor("fp32", (1, 10000), ()), chosen, places), rel=0.02)


@pytest.mark.parametrize(("rows", "kernels", "moved"), [(1, 7, 104.0), (4, 11, 156.0), (128, 7, 176.0)])
def test_a_sort_of_logits_moves_what_its_way_moves(rows: int, kernels: int, moved: float):
    """By itself, as one array with others, or by segments (SortStable.cu: launch_stable_sort_kernel)."""
    logits, places = Tensor("fp32", (rows, 32000), ()), Tensor("int64", (rows, 32000), ())
    assert captured("aten.sort", logits, logits, places) == (kernels, moved)


def test_a_sum_so_far_takes_a_blocks_turns():
    """8,192 rows as on an H200 (measured/gpu_kernels); 32 turns for a row of 32,000 numbers; one row is cub's."""
    for name in ("cumsum", "cumprod"):
        many, few, one = (Tensor("fp32", shape, ()) for shape in ((8192, 8192), (4, 32000), (1, 32000)))
        assert captured_us(f"aten.{name}", many, many) == pytest.approx(409.6, rel=0.1)
        assert captured_us(f"aten.{name}", few, few) == pytest.approx(32 * 410 / 256, rel=0.15)
        assert captured_us(f"aten.{name}", one, one) < 5


def test_a_median_is_found_as_the_last_of_a_top_k_is():
    rows, values, places = (
        Tensor(d, s, ()) for d, s in (("fp32", (4096, 1024)), ("fp32", (4096,)), ("int64", (4096,)))
    )
    assert known("aten.median")
    found = captured_us("aten.median", rows, values, places)
    one = Tensor("fp32", (4096, 1), ()), Tensor("int64", (4096, 1), ())
    assert found == captured_us("aten.kthvalue", rows, values, places)
    assert found == pytest.approx(captured_us("aten.topk", Tensor("fp32", (4096, 1024), ()), *one), rel=0.05)


def test_a_draw_starts_thirteen_kernels():
    """torch 2.14, Distributions.cpp: multinomial_out; the host does not wait."""
    assert captured("aten.multinomial", Tensor("fp32", (4, 32000), ()), Tensor("int64", (4, 1), ()))[0] == 13


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
