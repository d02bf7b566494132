"""Matmuls of few rows or columns, and sums over many rows, on a GPU."""

from __future__ import annotations

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

COSTS = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
BANDWIDTH = GPUS["h100-sxm"].memory_bandwidth_bytes_per_s


def product(dtype: str, *shape: int) -> tuple[float, int]:
    """Return the seconds of a product of [batch,] m, n, k, and its bytes."""
    *batch, m, n, k = shape
    x, w, y = (Tensor(dtype, (*batch, *sizes), ()) for sizes in ((m, k), (k, n), (m, n)))
    op = CapturedOperator("aten.bmm" if batch else "aten.mm", "forward", "", (x, w), (y,), 1, False)
    return COSTS.compute(compute_of(op)).seconds, x.bytes + w.bytes + y.bytes


def added(rows: int, columns: int) -> float:
    """Return the rows that wait for others in a sum over rows."""
    x, out = Tensor("bf16", (rows, columns), ()), Tensor("bf16", (1, columns), ())
    return compute_of(CapturedOperator("aten.sum", "backward", "", (x,), (out,), 1, False)).summed_rows


@pytest.mark.parametrize("shape", [(1_000_000, 1, 512), (1, 4096, 4096), (8192, 1, 1, 1024)])
def test_a_matrix_times_a_vector_in_fp32_has_no_tiles(shape: tuple[int, ...]) -> None:
    """A score for each row, as of an edge of a graph; whole tiles took 1.8 to 60 times as long as the bytes."""
    seconds, size = product("fp32", *shape)
    assert 1.0 < seconds * BANDWIDTH / size < 1.5


def test_small_matrices_in_fp32_have_small_tiles() -> None:
    """Products of pairs of 5 features, as of a recommender: a tile of 32 x 32 each, and 10 us to start and end."""
    seconds, _ = product("fp32", 16384, 5, 5, 128)
    peak = GPUS["h100-sxm"].peak_flops_per_s["fp32"]
    assert seconds == pytest.approx(1e-5 + 2.0 * 16384 * 32 * 32 * 128 / (0.8 * peak), rel=1e-6)


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
    """Gradients of biases of 32,768 and 65,536 rows: what is added beside the bytes is the same."""

    assert added(32768, 2048) == added(65536, 2048) == 132 * 16 * 4  # blocks of a column, rows and threads of a block


def test_a_block_of_few_columns_adds_its_parts_at_once() -> None:
    """The gradient of a bias of four numbers, over 524,288 points: 256 parts, which 128 threads add in two turns."""
    assert added(524288, 4) == 2 * added(2048, 4) == 512
