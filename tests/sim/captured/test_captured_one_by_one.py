"""Captured operators whose kernels compute the place of each element: instructions bound them, not memory."""

from __future__ import annotations

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.unvectorized import PLACE_CLOCKS, sm_clocks_per_s
from topology.presets import GPUS

IMAGES, LARGER = Tensor("bf16", (64, 256, 32, 32), ()), Tensor("bf16", (64, 256, 64, 64), ())
NODES, EDGES, OF_EDGE = Tensor("bf16", (4096, 256), ()), Tensor("bf16", (2**18, 256), ()), Tensor("int64", (2**18,), ())
COLUMNS, OF_COLUMNS = Tensor("bf16", (256, 4096), ()), Tensor("bf16", (256, 2**18), ())
MESSAGES = OF_EDGE._replace(shape=EDGES.shape, strides=(1, 0))


def seconds(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> float:
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
    return costs.compute(compute_of(CapturedOperator(name, "forward", "", inputs, (output,), 1, False))).seconds


@pytest.mark.parametrize(
    ("name", "inputs", "output", "elements"),
    [
        ("aten.flip", (IMAGES,), IMAGES, IMAGES.elements),
        ("aten.upsample_nearest2d", (IMAGES,), LARGER, LARGER.elements),
        ("aten.avg_pool2d_backward", (IMAGES, LARGER), LARGER, LARGER.elements),
        ("aten.index_add_", (COLUMNS, OF_EDGE, OF_COLUMNS), COLUMNS, OF_COLUMNS.elements),
    ],
)
def test_places_of_elements_take_clocks(name: str, inputs: tuple[Tensor, ...], output: Tensor, elements: int) -> None:
    least_s = elements * PLACE_CLOCKS / sm_clocks_per_s(GPUS["h200-sxm"])
    assert least_s <= seconds(name, inputs, output) < 1.1 * least_s


def test_what_is_repeated_once_is_a_copy() -> None:
    """native/TensorShape.cpp, repeat: both lie in memory in one order, so that the copy is vectorized."""
    row = EDGES._replace(shape=EDGES.shape[-1:])
    assert seconds("aten.repeat", (EDGES,), EDGES) < 0.5 * seconds("aten.repeat", (row,), EDGES)


def test_a_reduction_by_index_takes_as_long_as_a_sum_by_index() -> None:
    """Messages of a graph: the largest of each node's takes the kernel of their sum, if each number has a place."""
    given = NODES, MESSAGES._replace(strides=()), EDGES
    assert seconds("aten.scatter_reduce_", given, NODES) == seconds("aten.scatter_add_", given, NODES)
    given = NODES, MESSAGES, EDGES
    assert seconds("aten.scatter_reduce_", given, NODES) > 2 * seconds(
        "aten.index_add_", (NODES, OF_EDGE, EDGES), NODES
    )


@pytest.mark.parametrize(("width", "streams"), [(256, True), (252, False)])
def test_a_sum_of_whole_rows_by_index_streams(width: int, streams: bool) -> None:
    """torch 2.14 adds rows of a multiple of 16 bytes at once: messages of a graph, copied from expanded indices."""
    nodes, places, edges = (x._replace(shape=(x.shape[0], width)) for x in (NODES, MESSAGES, EDGES))
    bytes_s = (edges.bytes + 2 * nodes.bytes) / GPUS["h200-sxm"].memory_bandwidth_bytes_per_s
    assert (seconds("aten.scatter_add_", (nodes, places, edges), nodes) < 2 * bytes_s) == streams
    assert seconds("aten.scatter_add_", (nodes, places._replace(strides=()), edges), nodes) > 10 * bytes_s
    summed = seconds("aten.index_add_", (nodes, OF_EDGE, edges), nodes)
    assert summed == pytest.approx(seconds("aten.scatter_add_", (nodes, places, edges), nodes), rel=0.01)


@pytest.mark.parametrize("strides", [(), (64 * 56 * 56, 1, 64 * 56, 64)], ids=["channels first", "channels last"])
@pytest.mark.parametrize("pass_", ["", "_backward"])
def test_batch_norms_of_cudnn_are_faster_than_those_of_torch(pass_: str, strides: tuple[int, ...]) -> None:
    def norm(library: str, dtype: str) -> float:
        x, w = Tensor(dtype, (128, 64, 56, 56), strides), Tensor("fp32", (64,), ())
        return seconds(f"aten.{library}_batch_norm{pass_}", ((x,) if not pass_ else (x, x)) + (w, w, w), x)

    assert norm("cudnn", "fp16") < 0.9 * norm("native", "fp16") == 0.9 * norm("native", "bf16")
    assert norm("cudnn", "fp16") <= norm("cudnn", "fp32")


def test_a_batch_norm_that_uses_its_running_means_adds_nothing_up() -> None:
    x, w = Tensor("fp32", (8, 16, 256, 256), ()), Tensor("fp32", (16,), ())
    costs = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])

    def norm(means: Tensor) -> float:
        op = CapturedOperator("aten.cudnn_batch_norm", "forward", "", (x, w, w, w, w), (x, means, means), 1, False)
        return costs.compute(compute_of(op)).seconds

    assert norm(w._replace(shape=(0,))) < 0.5 * norm(w)
