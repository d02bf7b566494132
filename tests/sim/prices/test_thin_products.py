"""Matmuls of few rows or columns, and sums over many rows, on a GPU."""

from __future__ import annotations

import math

import pytest

from sim.core.program import SumShape
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of, computes_of
from sim.models.torch_kernels.row_sums import shared_sum
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.unvectorized import sm_clocks_per_s
from topology.presets import GPUS

COSTS = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
BANDWIDTH = GPUS["h100-sxm"].memory_bandwidth_bytes_per_s


def product(dtype: str, *shape: int) -> tuple[float, int]:
    """Return the seconds of a product of [batch,] m, n, k, and its bytes."""
    *batch, m, n, k = shape
    x, w, y = (Tensor(dtype, (*batch, *sizes), ()) for sizes in ((m, k), (k, n), (m, n)))
    op = CapturedOperator("aten.bmm" if batch else "aten.mm", "forward", "", (x, w), (y,), 1, False)
    return COSTS.compute(compute_of(op)).seconds, x.bytes + w.bytes + y.bytes


def turns(rows: int, columns: int, gpu: str = "h100-sxm") -> int:
    """Return the turns in which the last thread block of a sum over rows adds up parts."""
    return shared_sum(SumShape(rows, columns), GPUS[gpu].sm_count).turns


def summed(x: Tensor, *shape: int) -> float:
    """Return the clocks of a multiprocessor that each number of a sum takes on an H100."""
    op = CapturedOperator("aten.sum", "backward", "", (x,), (Tensor(x.dtype, shape, ()),), 1, False)
    return COSTS.compute(compute_of(op)).seconds * sm_clocks_per_s(GPUS["h100-sxm"]) / x.elements


@pytest.mark.parametrize("shape", [(1_000_000, 1, 512), (1, 4096, 4096), (8192, 1, 1, 1024)])
def test_a_matrix_times_a_vector_in_fp32_has_no_tiles(shape: tuple[int, ...]) -> None:
    """A score for each row, as of an edge of a graph; whole tiles took 1.8 to 60 times as long as the bytes."""
    seconds, size = product("fp32", *shape)
    assert 1.0 < seconds * BANDWIDTH / size < 1.5


def test_small_matrices_in_fp32_have_small_tiles() -> None:
    """Products of pairs of 5 features, as of a recommender: a tile of 32 x 32 each, and one to start and end."""
    seconds, _ = product("fp32", 16384, 5, 5, 128)
    gpu = GPUS["h100-sxm"]
    tile_s = 2.0 * 32 * 32 * 128 / gpu.peak_flops_per_s["fp32"]
    assert seconds == pytest.approx(16384 * tile_s / 0.8 + tile_s * gpu.sm_count, rel=1e-6)


@pytest.mark.parametrize("shape", [(1_000_000, 1, 512), (1_000_000, 16, 512), (8_388_608, 64, 64)])
def test_no_matmul_reads_faster_than_memory(shape: tuple[int, ...]) -> None:
    seconds, size = product("bf16", *shape)
    assert seconds > size / BANDWIDTH


def test_a_cache_holds_no_more_than_its_bytes() -> None:
    """GH100 has an L2 cache of 60 MiB; the rest of a matmul's bytes come from memory."""
    cached = GPUS["h100-sxm"].chip.cache_bytes
    assert cached == 60 * 2**20
    seconds, size = product("bf16", 300_000, 1, 512)
    assert seconds > (size - cached) / BANDWIDTH


def test_the_parts_of_a_sum_are_no_more_than_fill_the_gpu() -> None:
    """Gradients of biases of 32,768 and 65,536 rows: the last block adds as many parts. 16 blocks of 128 threads are on
    a multiprocessor, 16 of them share the columns, and four threads of a block add up a column."""
    assert turns(32768, 2048) == turns(65536, 2048) == 132 * 16 // 16 // 4
    assert turns(65536, 2048, "a100-sxm") == math.ceil(108 * 16 / 16 / 4)


def test_a_block_of_few_columns_adds_its_parts_at_once() -> None:
    """The gradient of a bias of four numbers, over 524,288 points: 256 parts, which 128 threads add in two turns. One
    block has all of 2,048 points."""
    assert (turns(524288, 4), turns(2048, 4)) == (2, 0)


def test_threads_load_numbers_at_once_only_where_they_lie_together() -> None:
    """512 columns of 16,384 rows: a thread takes four columns, or one of those that lie apart (Reduce.cuh:
    setReduceConfig, `fastest_moving_stride`). Blocks have then 128 threads, or 512, of which 4 or 16 add a column."""
    together, apart = (shared_sum(SumShape(16384, 512, stride=stride), 132) for stride in (1, 2))
    assert (together.parts, together.threads) == (256, 4)
    assert (apart.parts, apart.threads) == (33, 16)


def test_a_sum_of_few_threads_waits_for_its_loads() -> None:
    """Six thread blocks add up 512 rows of 768 numbers, each thread 128 rows, four at once."""
    x = Tensor("bf16", (512, 768), ())
    op = CapturedOperator("aten.sum", "backward", "", (x,), (Tensor("bf16", (1, 768), ()),), 1, False)
    assert COSTS.compute(compute_of(op)).seconds == pytest.approx(32 * 479 / 1.98e9, rel=0.15)


@pytest.mark.parametrize("row", [8, 16, 32])
def test_a_warp_adds_up_several_short_rows(row: int) -> None:
    """Sums over a head's few numbers, as of a graph's attention: each number takes as long as in a row of 32."""
    rows = Tensor("fp32", (2**24 // row, row), ())
    assert summed(rows, 2**24 // row, 1) == pytest.approx(60 / 32, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "out", "measured_us"),
    [
        ((2048, 4, 2880), (2048, 2880), 32.5),  # gptoss_4l: a token's experts
        ((4, 16, 512, 512), (1, 16, 512, 512), 23.1),  # t5_large: biases of a batch
    ],
)
def test_few_rows_of_many_results_take_clocks(shape: tuple[int, ...], out: tuple[int, ...], measured_us: float) -> None:
    """Single operators of steps on an H100 (scenarios/measured/gpu_programs)."""
    seconds = summed(Tensor("bf16", shape, ()), *out) * math.prod(shape) / sm_clocks_per_s(GPUS["h100-sxm"])
    assert seconds == pytest.approx(measured_us * 1e-6, rel=0.05)


def test_a_sum_of_a_heads_neighbours_streams_wherever_the_heads_lie() -> None:
    """The mean of squares over heads of 128 numbers, with heads and tokens exchanged, reads rows as they lie."""
    rows = Tensor("fp32", (2, 4096, 32, 128), ())
    exchanged = rows._replace(strides=(16777216, 128, 524288, 1))
    assert summed(exchanged, 2, 4096, 32, 1) == summed(rows, 2, 4096, 32, 1) < 0.7


def test_a_sum_against_the_order_of_memory_takes_clocks() -> None:
    """Gradients of repeated keys, whose tokens lie together, are written head by head."""
    keys = Tensor("bf16", (8, 2, 4096, 256), ())
    tokens_together = keys._replace(strides=(2097152, 1048576, 1, 4096))
    assert summed(keys, 8, 1, 4096, 256) < 0.7
    assert summed(tokens_together, 8, 1, 4096, 256) == pytest.approx(1.8, rel=0.02)


def test_a_sum_over_images_and_places_computes_each_place() -> None:
    """The gradient of a convolution's bias: channels lie between images and places. Channels last are a matrix."""
    images = Tensor("bf16", (64, 1024, 16, 16), ())
    assert summed(images, 1, 1024, 1, 1) == pytest.approx(0.7, rel=0.05)
    assert summed(images._replace(strides=(262144, 1, 16384, 1024)), 1, 1024, 1, 1) < 0.6
    weight = Tensor("bf16", (1024, 3, 14, 14), ())
    pixels = Tensor("bf16", (64, 3, 224, 224), ())
    gradients = (weight, Tensor("bf16", (1024,), ()))
    op = CapturedOperator("aten.convolution_backward", "backward", "", (images, pixels, weight), gradients, 1, False)
    bias = computes_of(op)[-1]
    assert bias.sums is not None
    assert bias.single_elements == images.elements
