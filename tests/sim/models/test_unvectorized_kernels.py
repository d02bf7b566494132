"""Kernels of captured programs that handle one element at a time, against published times of eager torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.program import Compute, Phase
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.kernels import moved_bytes
from sim.models.captured.layout import is_vectorized, single_elements
from sim.models.captured.operators import compute_of
from sim.prices.operator_prices import Costs
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from topology.presets import GPUS


def made(name: str, out: Tensor, *inputs: Tensor) -> CapturedOperator:
    return CapturedOperator(f"aten.{name}", "forward", "", inputs, (out,), 1, False)


def seconds(gpu: str, *operators: CapturedOperator) -> float:
    costs = Costs(load_profile(gpu), GPUS[gpu])
    return sum(costs.compute(compute_of(op)).seconds for op in operators)


def rope(tokens: int, heads: int, d: int) -> list[CapturedOperator]:
    """Transformers' apply_rotary_pos_emb of one tensor, as a projection leaves it."""
    x = Tensor("bf16", (1, heads, tokens, d), (heads * tokens * d, d, heads * d, 1))
    half = Tensor("bf16", (1, heads, tokens, d // 2), x.strides)
    negated = Tensor("bf16", half.shape, (heads * tokens * d // 2, d // 2, heads * d // 2, 1))
    whole, angles = Tensor("bf16", x.shape, ()), Tensor("bf16", (1, 1, tokens, d), ())
    return [
        made("mul", x, x, angles),
        made("neg", negated, half),
        made("cat", whole, negated, half),
        made("mul", whole, whole, angles),
        made("add", x, x, whole),
    ]


@pytest.mark.parametrize(("tokens", "measured_s"), [(4096, 995e-6), (8192, 1933e-6), (16384, 3817e-6)])
def test_rope_takes_as_long_as_on_an_a100(tokens: int, measured_s: float) -> None:
    """Liger 0.2.1, huggingface, forward, hidden 8192, 32 query and 8 KV heads; these rows are in no fit."""
    operators = [*rope(tokens, 32, 256), *rope(tokens, 8, 256)]
    bytes_alone = sum(compute_of(op).bytes for op in operators) / (0.85 * 2.039e12)
    assert seconds("a100-sxm", *operators) == pytest.approx(measured_s, rel=0.15)
    assert bytes_alone < 0.7 * measured_s


@pytest.mark.parametrize(("ffn", "measured_s"), [(8192, 383e-6), (16384, 750e-6), (32768, 1495e-6)])
def test_halves_of_a_merged_projection_take_as_long_as_on_an_h100(ffn: int, measured_s: float) -> None:
    """Liger 0.8.1, megatron_swiglu by torch, forward: neither kernel is vectorized, and each takes as long."""
    half = Tensor("bf16", (2048, 4, ffn), (8 * ffn, 2 * ffn, 1))
    whole = Tensor("bf16", (2048, 4, ffn), ())
    silu, product = made("silu", whole, half), made("mul", whole, whole, half)
    assert seconds("h100-sxm", silu, product) == pytest.approx(measured_s, rel=0.08)
    assert seconds("h100-sxm", silu) == pytest.approx(seconds("h100-sxm", product), rel=0.02)


def test_a_gpu_with_more_bandwidth_and_the_same_chip_is_no_faster() -> None:
    x, row = Tensor("bf16", (32768, 4096), ()), Tensor("bf16", (4096,), ())
    slow, fast = (seconds(gpu, made("add", x, x, row)) for gpu in ("h100-sxm", "h200-sxm"))
    assert slow == pytest.approx(fast)
    assert fast == pytest.approx(2**27 * 0.70 * 4096 / 989.4e12, rel=1e-3)
    assert seconds("h200-sxm", made("add", x, x, x)) < 0.8 * seconds("h100-sxm", made("add", x, x, x))


def test_each_operand_of_unlike_dtype_adds_a_cast() -> None:
    wide, narrow = Tensor("fp32", (1 << 24, 4), ()), Tensor("bf16", (1 << 24, 4), ())
    cast, total = made("_to_copy", wide, narrow), made("add", wide, wide, narrow)
    chained = made("where", wide, wide, narrow, wide)
    for less, more in pairwise((cast, total, chained)):
        operands = len(more.inputs) + 1
        assert seconds("h200-sxm", more) == pytest.approx(
            seconds("h200-sxm", less) * operands / (operands - 1), rel=0.01
        )
    assert single_elements(made("_to_copy", narrow, wide)) == 0


def test_what_torch_vectorizes() -> None:
    x = Tensor("fp32", (4, 8, 16), ())
    swapped = Tensor("fp32", (4, 8, 16), (128, 1, 8))
    expanded = Tensor("fp32", (4, 8, 16), (128, 16, 0))
    scalar = Tensor("fp32", (), ())
    assert [is_vectorized(made("add", y, y, z)) for y, z in ((x, x), (swapped, swapped))] == [True, True]
    assert not any(is_vectorized(made("add", x, x, y)) for y in (swapped, expanded, scalar))
    assert is_vectorized(made("sum", scalar, swapped))
    part = Tensor("fp32", (4, 2, 16), ())
    assert single_elements(made("slice_backward", x, part)) == 4 * 2 * 16


def test_a_gradient_of_a_part_writes_zeros_once() -> None:
    """One of 64 rows, whose loop's gradients Qwen3-Next takes 1,000 times: the rest of the result is zeros alone."""
    part, whole = Tensor("fp32", (32, 64, 128), ()), Tensor("fp32", (32, 64, 64, 128), ())
    assert moved_bytes(made("select_backward", whole, part)) == whole.bytes + 2 * part.bytes


def test_points_of_such_kernels_have_their_instructions() -> None:
    """A profile that measured sums with a row is used as it is; points of sums of two tensors are a lower limit."""
    sizes = np.array([[2**n] for n in range(20, 32)])
    plain, own = (
        PointTable(op, "bf16", sizes, sizes[:, 0] / 4e12, np.full(12, 0.01), np.full(12, 9))
        for op in ("elementwise", "elementwise:broadcast")
    )
    x, row = Tensor("bf16", (32768, 4096), ()), Tensor("bf16", (4096,), ())
    op = compute_of(made("add", x, x, row))
    without = Costs(Profile("x", "", points=(plain,)), GPUS["h200-sxm"]).compute(op).seconds
    assert without == pytest.approx(2**27 * 0.70 * 4096 / 989.4e12, rel=1e-3)
    measured = Costs(Profile("x", "", points=(plain, own)), GPUS["h200-sxm"]).compute(op).seconds
    assert measured == pytest.approx(op.bytes / 4e12, rel=0.01)
    unknown = GPUS["h200-sxm"].model_copy(update={"sm_flops_per_clock": 0})
    assert Costs(Profile("x", "", points=(plain,)), unknown).compute(op).seconds == pytest.approx(measured, rel=0.01)


def points(op: str, *measured: tuple[int, float]) -> PointTable:
    sizes, seconds = np.array([[n] for n, _ in measured]), np.array([s for _, s in measured])
    return PointTable(op, "fp32", sizes, seconds, np.full(len(seconds), 0.01), np.full(len(seconds), 9))


def test_a_backward_s_own_points_price_it_where_they_show_its_speed() -> None:
    """Softmax as `calibrate.run` timed it on an H200; the smallest backward shows autograd's call."""
    forward = points("softmax", (8388608, 8.28e-6), (134217728, 57.67e-6), (1073741824, 423.34e-6))
    backward = points("softmax_input_grad", (12582912, 79.77e-6), (201326592, 112.26e-6), (1610612736, 851.52e-6))
    costs = Costs(Profile("x", "", points=(forward, backward)), GPUS["h200-sxm"])
    x = Tensor("fp32", (131072, 2048), ())
    op = replace(compute_of(made("_softmax_backward_data", x, x, x)), phase=Phase.INPUT_GRAD)
    assert costs.compute(op).seconds == pytest.approx(op.bytes / 1.89e12, rel=0.05)


def test_groups_that_run_one_after_another_each_end_with_a_wave() -> None:
    """512 x 1536 are 192 tiles of 64 x 64, two waves of 108 multiprocessors; together the groups fill all waves."""
    costs = Costs(load_profile("a100-sxm"), GPUS["a100-sxm"])
    size = 128 * (512 * 2048 + 2048 * 1536 + 512 * 1536) * 2.0
    flops = 2.0 * 128 * 512 * 1536 * 2048
    at_once = Compute("experts", "grouped_gemm", (128, 512, 1536, 2048), "fp16", flops, size, Phase.FORWARD)
    one_by_one = costs.compute(replace(at_once, kernels=128)).seconds
    assert one_by_one == pytest.approx(costs.compute(at_once).seconds * 2 * 108 / 192, rel=0.01)
    assert costs.compute(replace(at_once, kernels=128, looped=True)) == costs.compute(at_once)


def test_groups_in_fp32_take_as_long_as_their_layers_apart() -> None:
    """A layer of 512 rows, with both gradients, took 240.6 us on an H200 (scenarios/measured/gpu_kernels/h200.json)."""
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
    size = 128 * (512 * 2048 + 2048 * 1536 + 512 * 1536) * 4.0
    flops = 2.0 * 128 * 512 * 1536 * 2048
    op = Compute("experts", "grouped_gemm", (128, 512, 1536, 2048), "fp32", flops, size, Phase.FORWARD, kernels=128)
    assert costs.compute(op).seconds == pytest.approx(128 * 240.6e-6 / 3, rel=0.12)


@pytest.mark.parametrize(("words", "forward_s", "full_s"), [(65536, 10615e-6, 30778e-6), (131072, 20726e-6, 60438e-6)])
def test_a_loss_takes_as_long_as_on_an_a100(words: int, forward_s: float, full_s: float) -> None:
    """Liger 0.2.1, cross_entropy of 16,384 tokens by torch; the coefficients are read off the row of 32,768 words."""
    x = Tensor("fp32", (16384, words), ())
    forward = seconds("a100-sxm", made("_log_softmax", x, x))
    assert forward == pytest.approx(forward_s, rel=0.05)
    back = (made("zeros", x), made("_log_softmax_backward_data", x, x, x))
    assert forward + seconds("a100-sxm", *back) == pytest.approx(full_s, rel=0.05)


def test_a_measured_cast_is_used_as_it_is() -> None:
    wide, narrow = Tensor("fp32", (32768, 4096), ()), Tensor("bf16", (32768, 4096), ())
    op = compute_of(made("_to_copy", wide, narrow))
    points_of = points("cast", (2**20, 2**20 / 3.9e12), (2**30, 2**30 / 3.9e12))
    own, without = (Costs(Profile("x", "", points=p), GPUS["h200-sxm"]).compute(op).seconds for p in ((points_of,), ()))
    assert own == pytest.approx(op.bytes / 3.9e12, rel=0.02)
    assert without == pytest.approx(2**27 * 0.68 * 4096 / 989.4e12, rel=1e-3)


def test_more_sequences_than_measured_are_as_more_heads() -> None:
    """A profile's points end at 4 sequences; 16 of 16 heads run as many thread blocks as 4 of 64."""
    shapes = [[b, h, h, s, s, 64, 64, 1] for b in (1, 4) for h in (8, 16, 32, 64) for s in (512, 1024)]
    seconds_of = np.array([b * h * s * s * 64 / (1e12 * b * h) + 1e-4 for b, h, _, s, *_ in shapes])
    table = PointTable("attention_forward", "bf16", np.array(shapes), seconds_of, np.zeros(16), np.full(16, 9))
    costs = Costs(Profile("x", "", points=(table,)), GPUS["h200-sxm"])
    flops = 2.0 * 256 * 1024 * 1024 * 64

    def attention(batch: int, heads: int) -> float:
        shape = (batch, heads, heads, 1024, 1024, 64, 64, 1)
        return costs.compute(Compute("a", "attention_forward", shape, "bf16", flops, 1e8, Phase.FORWARD)).seconds

    assert attention(16, 16) == pytest.approx(attention(4, 64), rel=0.02)
    assert attention(64, 4) == pytest.approx(attention(4, 64), rel=0.02)
