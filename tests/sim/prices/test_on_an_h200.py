"""Prices of single operators beside what they took on an H200 (tools/gpu_kernels.py)."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import computes_of
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

CASES = {
    c["case"]: c["seconds"] for c in json.loads(Path("scenarios/measured/gpu_kernels/h200.json").read_text())["cases"]
}
COSTS = Costs(load_profile("h200-sxm"), GPUS["h200-sxm"])
ONE: tuple[int, ...] = (1,)


def seconds(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Return the predicted seconds of a captured operator."""
    phase = "backward" if "backward" in name else "forward"
    op = CapturedOperator(f"aten.{name}", phase, "", tuple(inputs), tuple(outputs), 1, False)
    return sum(COSTS.compute(c).seconds for c in computes_of(op))


def tensor(dtype: str, shape: tuple[int, ...], last: bool = False) -> Tensor:
    _, c, h, w = shape if last else (1, 1, 1, 1)
    return Tensor(dtype, shape, (c * h * w, 1, w * c, c) if last else ())


def layer_norms() -> Iterator[tuple[float, float]]:
    for case, found in CASES.items():
        kind, dtype, *size = case.split()
        if kind == "layer_norm":
            rows, width = map(int, size[0].split("x"))
            x, w, m = tensor(dtype, (rows, width)), tensor(dtype, (width,)), tensor("fp32", (rows, 1))
            yield seconds("native_layer_norm", [x, w, w], [x, m, m]), found["native_layer_norm"]
            backward = seconds("native_layer_norm_backward", [x, x, m, m, w, w], [x, w, w])
            yield backward, found["native_layer_norm_backward"]


def batch_norms() -> Iterator[tuple[float, float]]:
    for case, found in CASES.items():
        kind, dtype, *rest = case.split()
        if kind == "batch_norm":
            n, c, width = map(int, rest[1].split("x"))
            x, w = tensor(dtype, (n, c, width, width), rest[0] == "last"), tensor("fp32", (c,))
            of = "native" if "native_batch_norm" in found else "cudnn"
            yield seconds(f"{of}_batch_norm", [x, w, w, w, w], [x, w, w]), found[f"{of}_batch_norm"]
            backward = seconds(f"{of}_batch_norm_backward", [x, x, w, w, w, w, w], [x, w, w])
            yield backward, found[f"{of}_batch_norm_backward"]


def convolutions() -> Iterator[tuple[float, float]]:
    for case, found in CASES.items():
        kind, *rest = case.split()
        if kind == "convolution":
            n, into, width = map(int, rest[1].split("x"))
            out, size, stride, groups = (int(rest[i]) for i in (3, 5, 7, 9))
            padding = size // 2 if stride < size or size == 1 else 0
            result = (width + 2 * padding - size) // stride + 1
            last = rest[0] == "last"
            x, y = tensor("bf16", (n, into, width, width), last), tensor("bf16", (n, out, result, result), last)
            w = tensor("bf16", (out, into // groups, size, size), last)
            forward = found.get("cudnn_convolution") or found["_conv_depthwise2d"]
            yield seconds("convolution", [x, w], [y]), forward
            outputs = [x, w] if into > 3 else [w]  # an image needs no gradient
            backward = [tensor("bf16", ONE), *outputs] if into == 3 else outputs
            yield seconds("convolution_backward", [y, x, w], backward), found["convolution_backward"]


def of_steps(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the operators of that name in measured training steps, and each step's name."""
    steps = json.loads(gzip.decompress(Path("scenarios/measured/gpu_programs_h200/operators.json.gz").read_bytes()))
    yield from ((step, o) for step, found in steps.items() for o in found["operators"] if name in o["name"])


def gradients_of_rows() -> Iterator[tuple[float, float]]:
    """Tokens that go to several experts, or to other places; no constant is fitted to them."""
    for step, o in of_steps("_index_put_impl_"):
        table, _, values = o["shapes"][:3]
        if len(table) == 2 and math.prod(values) > 10**7:
            dtype = "fp32" if step.endswith("_amp") else "bf16"
            rows, grads = tensor(dtype, tuple(table)), tensor(dtype, tuple(values))
            places = tensor("int64", (values[0],))
            op = CapturedOperator("aten.index_put_", "backward", "", (rows, places, grads), (rows,), 1, False)
            yield sum(COSTS.compute(c).seconds for c in computes_of(op)), o["seconds"] / o["count"]


def convolutions_of_samples() -> Iterator[tuple[float, float]]:
    """Whisper's, whose steps decided no constant; their inputs' copies and biases are operators of their own.

    So is the sum that is the gradient of the first one's bias.
    """
    step = "whisper_small_amp"
    sums = {tuple(n for n in o["shapes"][0] if n > 1): o["seconds"] for name, o in of_steps("sum") if name == step}
    found = [o for name, o in of_steps("convolution") if name == step]
    for o in found:
        first, second, third = (tensor("bf16", tuple(n for n in shape if n > 1)) for shape in o["shapes"][:3])
        if o["name"] == "aten::convolution_backward":
            both = second.shape[1] > third.shape[0] // 2
            outputs = [second, third] if both else [third, tensor("bf16", ONE)]
            bias_s = 0.0 if both else sums[first.shape]
            yield seconds("convolution_backward", [first, second, third], outputs), o["seconds"] + bias_s
        else:
            stride = 2 if first.shape[1] == second.shape[0] else 1
            result = tensor("bf16", (first.shape[0], second.shape[0], first.shape[2] // stride))
            yield seconds("convolution", [first, second], [result]), o["seconds"]


def triangular_solvers() -> Iterator[tuple[float, float]]:
    """The solver, and the copy of the right-hand sides that its call makes."""
    for case, found in CASES.items():
        kind, *rest = case.split()
        if kind == "solve_triangular":
            count, rows = map(int, rest[1].split("x"))
            x = tensor("fp32", (count, rows, rows))
            result = Tensor("fp32", x.shape, (rows * rows, 1, rows))
            yield (
                seconds("linalg_solve_triangular", [x, x], [result]),
                found["linalg_solve_triangular"] + found["copy_"],
            )


def masked_attentions() -> Iterator[tuple[float, float]]:
    for case, found in CASES.items():
        kind, *rest = case.split()
        if kind == "attention" and rest[0] in ("causal", "full", "window"):
            b, h, s, d = map(int, rest[1].split("x"))
            q, sums, mask = tensor("bf16", (b, h, s, d)), tensor("fp32", (b, h, s, 1)), tensor("bf16", (b, 1, s, s))
            masks, causal = ([mask] if rest[0] == "window" else []), rest[0] == "causal"
            name = "aten._scaled_dot_product_cudnn_attention"
            ahead = CapturedOperator(name, "forward", "", (q, q, q, *masks), (q, sums), 1, causal)
            back = CapturedOperator(f"{name}_backward", "backward", "", (*[q] * 5, sums, *masks), (q, q, q), 1, causal)
            for op, key in ((ahead, "_cudnn_attention_forward"), (back, "_cudnn_attention_backward")):
                yield sum(COSTS.compute(c).seconds for c in computes_of(op)), found[key]


@pytest.mark.parametrize(
    ("cases", "count", "median", "most"),
    [
        (layer_norms, 52, 0.1, 0.3),
        (batch_norms, 72, 0.13, 0.6),
        (convolutions, 92, 0.2, 1.1),
        (convolutions_of_samples, 4, 0.2, 0.3),
        (gradients_of_rows, 8, 0.2, 0.35),
        (masked_attentions, 60, 0.17, 0.8),
        (triangular_solvers, 3, 0.2, 0.3),
    ],
)
def test_operators_take_as_long_as_measured(cases, count, median, most) -> None:  # type: ignore[no-untyped-def]
    off = [abs(math.log(own / real)) for own, real in cases()]
    assert len(off) == count
    assert statistics.median(off) < median
    assert max(off) < most
