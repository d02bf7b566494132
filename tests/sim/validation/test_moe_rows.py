"""Rows of one MoE layer: its peak against a count by hand, the row's words, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.validation.predict import predict
from sim.validation.records import Measurement

MODEL = {"hidden": 4096, "expert_ffn": 14336, "experts": 8, "experts_per_token": 2, "seq_len": 4096}
MEASURED = {"forward_s": 1.0, "backward_s": 1.0, "max_allocated_bytes": 1.0}


def found(model: dict[str, Any] | None = None, precision: str = "bf16", **layout: int) -> dict[str, float]:
    data = {
        "op": "moe_layer",
        "model": MODEL | (model or {}),
        "parallelism": layout or {"dp": 8, "ep": 8},
        "training": {"micro_batch_size": 1, "precision": precision},
    }
    row = Measurement("t", "kernel", "r", "g", {"cluster": "dgx-h100"}, MEASURED, data)
    return {key: value.value for key, value in predict(row)[0].items()}


@pytest.mark.parametrize(("precision", "copies", "input_bytes"), [("bf16", 0, 2), ("fp8 blockwise", 2, 1 + 4 / 128)])
def test_peak_by_hand(precision: str, copies: int, input_bytes: float) -> None:
    """The fullest moment is the weighting's backward: GELU's input and output, and 14 bytes an element in flight."""
    tokens, h, f = 4096, 4096, 14336
    received = 8192 + (7.5 if copies else 0)  # in blocks each rank's expert has rows that fill up a tile of 16
    weights, router = 2 * h * f, 8 * h
    inner = received * f
    expected = (
        (2 + copies * (1 + 4 / 128**2 if copies else 0)) * weights
        + 2 * router  # 16-bit parameters, and the matmuls' own copies
        + 2 * h * f  # down's gradient is there, up's is not
        + 3 * 2 * tokens * h  # the layer's input, its result and the result's gradient
        + 4 * tokens * 8
        + 4 * tokens * (2 * 8 + 1)  # probabilities, the map of copies
        + input_bytes * received * h  # up's input, with a scale for 128 in blocks
        + 2 * 2 * inner  # GELU's input and output
        + (3 * 4 + 2) * inner  # the gradient, two products in fp32; one cast back
        + 6 * 32 * 2**20  # workspaces: torch's, Transformer Engine's, four of its grouped matmuls
    )
    assert found(precision=precision)["max_allocated_bytes"] == expected


def test_shared_experts_and_gates_are_counted_where_a_row_has_them() -> None:
    plain = found()
    shared, gated = found({"shared_expert_ffn": 14336}), found({"mlp": "swiglu"})
    assert all(shared[key] > plain[key] for key in plain)
    assert gated["forward_s"] > 1.2 * plain["forward_s"]
    assert found({"num_experts": 8, "top_k": 2}) == found(ep=8) == plain


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden": None}, r"model: width: found None; allowed: a whole number above 0 under one of H, N, D, hidden"),
        ({"shared_expert_ffn": 1000}, r"model.shared_expert_ffn: found 1000; allowed: a multiple of expert_ffn"),
    ],
)
def test_refusals(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        found(model)
