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
        ("aten.index_add_", (NODES, OF_EDGE, EDGES), NODES, EDGES.elements),
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


@pytest.mark.parametrize("strides", [(), (64 * 56 * 56, 1, 64 * 56, 64)], ids=["channels first", "channels last"])
@pytest.mark.parametrize("pass_", ["", "_backward"])
def test_fp16_batch_norms_are_of_cudnn_unless_their_weights_are_fp16(pass_: str, strides: tuple[int, ...]) -> None:
    """As under torch.autocast, whose weights stay in fp32, and as in a model in fp16; those of bf16 are torch's own."""

    def norm(dtype: str, weights: str) -> float:
        x, w, mean = Tensor(dtype, (128, 64, 56, 56), strides), Tensor(weights, (64,), ()), Tensor("fp32", (64,), ())
        return seconds(f"aten.native_batch_norm{pass_}", ((x,) if not pass_ else (x, x)) + (w, mean, mean), x)

    assert norm("fp16", "fp16") == norm("bf16", "fp32") == norm("bf16", "bf16")
    assert norm("fp16", "fp32") < 0.9 * norm("bf16", "fp32")
    assert norm("fp16", "fp32") <= norm("fp32", "fp32")
