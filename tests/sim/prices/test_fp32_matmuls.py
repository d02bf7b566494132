"""Matmuls of fp32 numbers beside single operators of measured steps (scenarios/measured)."""

from __future__ import annotations

import pytest

from sim.core.program import Compute, Phase
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of
from sim.prices.fp32_matmuls import fp32_seconds
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS


def seconds(gpu: str, batch: int, m: int, k: int, n: int) -> float:
    left, right, out = (Tensor("fp32", (batch, *shape), ()) for shape in ((m, k), (k, n), (m, n)))
    op = CapturedOperator("aten.bmm", "forward", "", (left, right), (out,), 1, False)
    return Costs(load_profile(gpu), GPUS[gpu]).compute(compute_of(op)).seconds


@pytest.mark.parametrize(
    ("gpu", "shape", "measured_us"),
    [
        ("h200-sxm", (32, 64, 128, 128), 7.6),  # qwen3_next_4l: chunks of a delta rule
        ("h200-sxm", (32, 128, 64, 128), 6.0),
        ("h200-sxm", (32, 64, 64, 128), 5.2),
        ("h200-sxm", (1, 16384, 16, 2048), 57.5),  # llama1b_lora_checkpoint: adapters of rank 16
        ("h200-sxm", (1, 16384, 16, 8192), 244.1),
        ("h100-sxm", (1, 8192, 16, 12288), 211.5),  # qwen3_8b_8l_lora
    ],
)
def test_few_products_take_as_long_as_measured(gpu: str, shape: tuple[int, int, int, int], measured_us: float) -> None:
    assert seconds(gpu, *shape) == pytest.approx(measured_us * 1e-6, rel=0.2)


@pytest.mark.parametrize(("m", "n", "measured_us"), [(8192, 16, 239.5), (16, 8192, 233.1), (16, 2048, 81.0)])
def test_gradients_of_adapters_take_as_long_as_measured(m: int, n: int, measured_us: float) -> None:
    """Of 16,384 tokens on an H200 (llama1b_lora_checkpoint); the constant is from an H100."""
    left, right, out = Tensor("fp32", (m, 16384), (1, m)), Tensor("fp32", (16384, n), ()), Tensor("fp32", (m, n), ())
    op = CapturedOperator("aten.mm", "backward", "", (left, right), (out,), 1, False)
    found = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"]).compute(compute_of(op)).seconds
    assert found == pytest.approx(measured_us * 1e-6, rel=0.15)


def test_results_take_clocks_of_multiprocessors_whose_vector_units_are_wider_or_not() -> None:
    """An A100's multiprocessor has half the fp32 units of an H100's, and computes places as fast at one clock."""
    by_clocks = {}
    for gpu in ("a100-sxm", "h100-sxm"):
        own = GPUS[gpu]
        assert own.sm_flops_per_clock is not None
        clocks_per_s = own.peak_flops_per_s["bf16"] / own.sm_flops_per_clock
        matmul = Compute("", "gemm", (1, 8192, 12288, 2), "fp32", 2.0, 1.0, Phase.FORWARD)
        found = fp32_seconds(matmul, 0.0, own.peak_flops_per_s["fp32"], own.sm_count, clocks_per_s)
        by_clocks[gpu] = (found - 2.0 * 64 * 64 * 2 * own.sm_count / own.peak_flops_per_s["fp32"]) * clocks_per_s
    assert by_clocks["a100-sxm"] == pytest.approx(by_clocks["h100-sxm"])


def test_an_outer_product_streams() -> None:
    """Angles of rotary embeddings, and einsum's outer products: torch 2.14 has a Triton kernel for them."""
    bytes_s = 4 * 4096 * 64 * 128 / GPUS["h200-sxm"].memory_bandwidth_bytes_per_s
    assert seconds("h200-sxm", 4096, 64, 1, 128) < 1.4 * bytes_s
    assert seconds("h200-sxm", 1, 64, 1, 4096) < 4e-6  # measured before that: 3 us
