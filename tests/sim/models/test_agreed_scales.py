"""Tensor-parallel ranks agree on a scale: which of a layer's casts wait for an all-reduce, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.program import Comm, Compute, Program
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.linear import linear
from sim.models.operators import Linear
from tests.sim.cases import scenario_with

M, K, N = 2048, 4096, 512


def scenario(cluster: str = "dgx-h100", layout: dict[str, Any] | None = None, **training: Any) -> Scenario:
    training = {"seq_len": M, "global_batch_size": 8, "precision": "fp8", **training}
    return scenario_with(training, layout or {"tp": 8, "sp": True}, cluster=cluster)


def agreed(program: Program) -> list[tuple[str, float]]:
    return [(i.name, i.bytes) for i in program if isinstance(i, Comm) and "_largest_" in i.name]


@pytest.mark.parametrize(
    ("cluster", "training", "size"),
    [
        ("dgx-h100", {"fp8_recipe": "tensorwise"}, 4.0),
        ("dgx-b200", {"precision": "nvfp4"}, 8.0),
        ("dgx-h100", {"fp8_recipe": "delayed"}, None),
        ("dgx-h100", {"fp8_recipe": "blockwise"}, None),
        ("dgx-b200", {"precision": "mxfp8"}, None),
    ],
)
def test_transformer_engine_agrees_on_what_is_gathered(cluster: str, training: dict[str, Any], size: float) -> None:
    """module/linear.py: the input of column layers in the forward, the output's gradient of row layers in the backward;
    a number for each order where both are quantized before the gather."""
    s = scenario(cluster, framework="megatron", **training)
    block = layer_block(s, 0)
    names = [agreed(block.forward), agreed(block.backward)]
    wanted = [["qkv", "mlp_up"], ["mlp_down_grad", "attention_out_grad"]] if size else [[], []]
    assert names == [[(f"{name}_largest_all_reduce", size) for name in one] for one in wanted]


@pytest.mark.parametrize("layout", [{"tp": 8}, {"dp": 8}])
def test_transformer_engine_agrees_on_nothing_without_sequence_parallelism(layout: dict[str, Any]) -> None:
    block = layer_block(scenario(layout=layout, framework="megatron", fp8_recipe="tensorwise"), 0)
    assert agreed((*block.forward, *block.backward)) == []


def test_torchao_agrees_on_each_tensor_that_is_cut() -> None:
    """Forward: an input of each layer and seven weights. Backward: the gradient of each output, of queries, keys,
    values, gate and up apart. With replicated tokens inputs of column layers and gradients of row layers are whole;
    where FSDP gathers 8 bits, weights arrive with their scales."""

    def counts(**layout: Any) -> tuple[int, int]:
        block = layer_block(scenario(layout={"tp": 4, **layout}, framework="compiled", fp8_recipe="tensorwise"), 0)
        return len(agreed(block.forward)), len(agreed(block.backward))

    assert counts(sp=True) == (4 + 7, 3 + 1 + 2 + 1)
    assert counts(sp=False) == (2 + 7, 3 + 2)
    assert counts(sp=True, dp=2, zero=3) == (4, 3 + 1 + 2 + 1)
    assert counts(sp=True, dp=2, zero=3, param_gather_dtype="bf16") == (4 + 7, 3 + 1 + 2 + 1)


@pytest.mark.parametrize("joins_norm", [False, True])
def test_the_largest_value_is_found_before_it_is_agreed_on(joins_norm: bool) -> None:
    """A norm's kernel finds it; else a pass does, which reads a rank's part. All bytes are those of one rank alone."""
    s = scenario(framework="megatron", fp8_recipe="tensorwise")
    part = linear(dims(s), Linear("x", M, K, (N,), mode="column", joins_norm=joins_norm))
    names = [i.name for i in part.forward if isinstance(i, Compute | Comm)]
    first = names.index("x_largest_all_reduce")
    assert names[:first] == ([] if joins_norm else ["x_largest"])
    assert names[first + 1 : first + 3] == ["x_cast", "x_gather"]
    moved = sum(i.bytes for i in part.forward if isinstance(i, Compute) and i.name in ("x_largest", "x_cast"))
    assert moved == ((2 if joins_norm else 4) + 1) * M * K / 8


def test_weights_scales_do_not_wait_for_a_gather_that_is_overlapped() -> None:
    s = scenario(layout={"tp": 4, "sp": True, "tp_overlap": "full"}, framework="compiled", fp8_recipe="tensorwise")
    forward = linear(dims(s), Linear("x", M, K, (N, N), mode="column")).forward
    names = [i.name for i in forward if isinstance(i, Comm)]
    assert names[:3] == ["x_largest_all_reduce", *["x_weight_largest_all_reduce"] * 2]
    assert names[3].startswith("x_gather")


@pytest.mark.parametrize("sp", [True, False])
def test_torchao_agrees_on_the_scales_of_rows_that_are_cut(sp: bool) -> None:
    """A row layer's forward reads rows of its input and weight of which each rank has a part; a column layer's backward
    those of its outputs' gradients and of its weights: 4 and 10 messages of 8 bytes a row. `tests/real` counts them
    with torch's DTensor."""
    layout = {"tp": 4, "sp": sp}
    s = scenario(layout=layout, framework="compiled", fp8_recipe="rowwise")
    block, h = layer_block(s, 0), s.model.hidden
    rows, forward, backward = 8.0 * M, agreed(block.forward), agreed(block.backward)
    assert [size for _, size in forward] == [rows, 8.0 * h, rows, 8.0 * h]
    assert sorted(size for _, size in backward) == sorted([rows] * 5 + [8.0 * h] * 5)
    alone = scenario(layout={"dp": 4}, framework="compiled", fp8_recipe="rowwise")
    assert not agreed(layer_block(alone, 0).forward)


def test_values_of_rows_are_found_before_they_are_agreed_on() -> None:
    """A kernel that finds a row's largest value and casts the row at once becomes two, which read 16 bits each."""
    s = scenario(layout={"tp": 8, "sp": True}, framework="compiled", fp8_recipe="rowwise")
    part = linear(dims(s), Linear("x", M, K, (N,), mode="row"))
    items = [i for i in part.forward if isinstance(i, Compute | Comm)]
    of_input = [(i.name, i.bytes) for i in items if i.name in ("x_largest", "x_largest_all_reduce", "x_cast")]
    assert of_input == [("x_largest", 2.0 * M * K), ("x_largest_all_reduce", 8.0 * M), ("x_cast", 3.0 * M * K)]


def test_largest_values_of_a_weights_other_rows_are_found_before_they_are_agreed_on() -> None:
    """A column layer's backward reads rows of weights of which each rank has a part: one read more than a rank alone,
    which transposes 16 bits and then finds values and casts at once."""

    def of_weights(**layout: int) -> list[tuple[str, float]]:
        s = scenario(layout=layout, framework="compiled", fp8_recipe="rowwise")
        part = linear(dims(s), Linear("x", M, K, (N,), mode="column"))
        items = [i for i in part.backward if isinstance(i, Compute | Comm)]
        return [(i.name, i.bytes) for i in items if i.name.startswith("x_weight_")]

    again = ("x_weight_cast_again", 7.0 * K * N)
    assert of_weights(dp=8) == [again]
    agreed = ("x_weight_largest_all_reduce", 8.0 * K)
    assert of_weights(tp=8) == [("x_weight_largest", 2.0 * K * N), agreed, again]
