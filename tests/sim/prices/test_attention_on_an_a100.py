"""Which of torch's attention kernels runs on an A100, where cuDNN's is not preferred."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

COSTS = Costs(load_profile("a100-sxm"), GPUS["a100-sxm"])


def attention(kernel: str, *more: Tensor, backward: bool = False) -> float:
    """Return the seconds of an attention with 16 heads of 64 over 4,096 tokens; `more`: a mask."""
    x = Tensor("bf16", (4, 16, 4096, 64), ())
    name = f"aten._scaled_dot_product_{kernel}_attention{'_backward' if backward else ''}"
    first = (x,) * (4 if backward else 3)
    op = CapturedOperator(name, "backward" if backward else "forward", "", (*first, *more), (x,), 1, False)
    return COSTS.compute(compute_of(op)).seconds


@pytest.mark.parametrize("backward", [False, True])
def test_a_mask_takes_the_memory_efficient_kernel(backward: bool) -> None:
    """FlashAttention-2 has no masks (sdp_utils.cpp: check_for_attn_mask). A captured program names cuDNN's kernel."""
    mask = Tensor("bf16", (4, 1, 4096, 4096), ())
    masked = attention("cudnn", mask, backward=backward)
    assert masked > 2.0 * attention("cudnn", backward=backward)
    assert masked == pytest.approx(attention("efficient", mask, backward=backward), rel=0.12)


def test_the_memory_efficient_kernel_is_slower_than_flash_attention_2() -> None:
    assert attention("efficient") > 2.0 * attention("flash") == 2.0 * attention("cudnn")


def test_fp32_has_the_efficiencies_of_16_bits() -> None:
    x = Tensor("fp32", (4, 16, 4096, 64), ())
    efficient = "aten._scaled_dot_product_efficient_attention"
    op = compute_of(CapturedOperator(efficient, "forward", "", (x, x, x), (x,), 1, False))
    assert COSTS.compute(op).seconds == COSTS.compute(replace(op, kernel="")).seconds
