"""What torch runs for a captured convolution on a GPU, beside its products (aten/src/ATen/native/Convolution.cpp)."""

from __future__ import annotations

import pytest

from sim.core.program import Compute
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of, computes_of
from sim.prices.unvectorized import DEPTHWISE_CLOCKS, least_seconds

LAST = (32 * 256, 1, 512, 32)  # strides of [2, 32, 16, 16] with the channels last


def tensor(*shape: int, dtype: str = "bf16", strides: tuple[int, ...] = ()) -> Tensor:
    return Tensor(dtype, shape, strides)


def computes(inputs: list[Tensor], outputs: list[Tensor], on_gpu: bool = True) -> list[Compute]:
    """Return the kernels of a convolution; one with a gradient of the output first is a backward."""
    backward = len(outputs) > 1
    name, phase = ("aten.convolution_backward", "backward") if backward else ("aten.convolution", "forward")
    op = CapturedOperator(name, phase, "", tuple(inputs), tuple(outputs), 1, False)
    return list(computes_of(op, on_gpu))


X, W, B, Y = tensor(2, 32, 16, 16), tensor(64, 32, 3, 3), tensor(64), tensor(2, 64, 16, 16)


def test_a_bias_is_added_by_a_kernel_of_its_own() -> None:
    """cuDNN's convolutions have none: `output.add_(reshape_bias(…))` reads and writes the whole output."""
    products, moved, added = computes([X, W, B], [Y])
    assert (products.kind, products.flops) == ("gemm", 2 * Y.elements * 32 * 9)
    assert (added.kind, added.bytes, added.single_elements) == ("elementwise", 2 * Y.bytes, Y.elements)
    assert [c.kind for c in computes([X, W], [Y])] == ["gemm", "copy"]
    assert moved.bytes == 2 * (X.bytes + Y.bytes)  # cuDNN's kernels have the channels last


def test_the_gradient_of_a_bias_is_a_sum_over_the_outputs_gradient() -> None:
    products, moved, summed = computes([Y, X, W], [X, W, B])
    assert (products.kind, products.kernels) == ("gemm", 2)
    assert moved.bytes == 4 * (X.bytes + Y.bytes)  # for each of two gradients
    assert (summed.kernel, summed.bytes) == ("reduce_first", Y.bytes)
    assert len(computes([Y, X, W], [X, W])) == 2


def test_rows_of_one_place_are_a_matmul_without_moved_channels() -> None:
    one, odd = tensor(64, 32, 1, 1), tensor(2, 32, 7, 7)
    assert [c.kind for c in computes([X, one], [Y])] == ["gemm"]
    assert [c.kind for c in computes([odd, one], [tensor(2, 64, 7, 7)])] == ["gemm", "copy"]


def test_an_images_three_channels_take_no_tensor_cores() -> None:
    image, first = tensor(8, 3, 224, 224), tensor(64, 3, 7, 7)
    product, _ = computes([image, first], [tensor(8, 64, 112, 112)])
    assert (product.dtype, product.shape[3]) == ("fp32", 4 * 49)


def test_a_cpus_convolution_is_one_operator() -> None:
    assert [c.kind for c in computes([X, W, B], [Y], on_gpu=False)] == ["gemm"]


def test_samples_that_do_not_lie_together_are_copied_first() -> None:
    """Mamba's convolution reads [batch, length, channels] transposed; `input = input.contiguous()`."""
    x = tensor(2, 32, 64, strides=(64 * 32, 1, 32))
    weight, y = tensor(16, 32, 4), tensor(2, 16, 61)
    copied, products, moved = computes([x, weight], [y])
    assert moved.bytes == 2 * (x.bytes + y.bytes)  # cuDNN has images of one row, and moves their channels
    assert (copied.kind, copied.bytes, products.kind) == ("permute", 2 * x.bytes, "gemm")
    assert [c.kind for c in computes([y, x, weight], [x, weight])] == ["permute", "gemm", "copy"]
    assert len(computes([X._replace(strides=LAST), W], [Y])) == 1  # cuDNN takes channels that lie last


@pytest.mark.parametrize(
    ("x", "of_torch"),
    [
        (X, True),
        (X._replace(dtype="fp32"), True),
        (X._replace(strides=LAST), False),
        (X._replace(dtype="fp16"), False),
    ],
)
def test_a_channel_in_each_group_is_no_matmul(x: Tensor, of_torch: bool) -> None:
    """ConvParams::is_depthwise, use_cudnn_depthwise. torch's kernel adds the bias itself."""
    weight, bias = tensor(32, 1, 3, 3, dtype=x.dtype), tensor(32, dtype=x.dtype)
    products, *added = computes([x, weight, bias], [x])
    multiplied = 9 * x.elements
    assert (products.kind, products.kernel, products.flops) == ("elementwise", "depthwise", 2 * multiplied)
    assert (products.clocks > multiplied / 9, len(added)) == ((True, 0) if of_torch else (False, 1))
    back, summed = computes([x, x, weight], [x, weight, bias])
    assert (back.flops, back.kernels, summed.kernel) == (4 * multiplied, 2, "reduce_first")


def test_torchs_kernel_takes_clocks_for_each_product() -> None:
    """As a Mamba's took on an H100: 1.98 GHz, 132 multiprocessors (scenarios/measured/gpu_programs)."""
    x, weight = tensor(1, 2304, 1024), tensor(2304, 1, 4)
    y, clocks_per_s = tensor(1, 2304, 1027), 132 * 1.98e9
    (ahead,), (back,) = computes([x, weight], [y]), computes([y, x, weight], [x, weight])
    seconds = [least_seconds(c, clocks_per_s, 132) for c in (ahead, back)]
    assert sum(seconds) == pytest.approx(27.67e-6 + 42.92e-6, rel=0.02)
    assert seconds[0] == pytest.approx(y.elements * 4 * DEPTHWISE_CLOCKS / clocks_per_s)


def test_gradients_are_copied_to_the_layout_of_the_input() -> None:
    """A ViT's lie as its tokens do, with the channels last: 84 us on an H100, as a transposing copy."""
    copied, products, _ = computes([Y._replace(strides=(64 * 256, 1, 1024, 64)), X, W], [X, W])
    assert (copied.kind, copied.bytes, products.kind) == ("permute", 2 * Y.bytes, "gemm")
    last = X._replace(strides=LAST)
    assert [c.kind for c in computes([Y, last, W], [last, W])] == ["permute", "gemm"]
    assert [c.kind for c in computes([Y._replace(strides=(64 * 256, 1, 1024, 64)), last, W], [last, W])] == ["gemm"]


def test_its_flops_are_those_of_the_matmul() -> None:
    op = CapturedOperator("aten.convolution", "forward", "", (X, tensor(32, 1, 3, 3)), (X,), 1, False)
    assert compute_of(op).flops == computes_of(op)[0].flops
