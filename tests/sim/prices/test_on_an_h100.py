"""Prices beside what was measured on an H100: dropout, unaligned widths, AdamW, rows added one after another."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute, Phase
from sim.inputs.program_file import CapturedOperator, Tensor
from sim.models.captured.operators import compute_of
from sim.models.torch_kernels.softmax_rows import torch_softmax, torch_softmax_backward
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_bytes
from topology.presets import GPUS

ROWS: list[dict[str, Any]] = json.loads(Path("scenarios/cuda/h100_dropout.json").read_text())["rows"]
KERNELS = {"cudnn": "torch", "flash": "torch_2024"}
COSTS = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])


def attention(kernel: str, direction: str, shape: list[int], drops: bool) -> float:
    """Return the seconds of causal attention."""
    batch, heads, tokens, size = shape
    full = (batch, heads, heads, tokens, tokens, size, size, 1)
    kind = f"attention_{direction}"
    flops, moved = shape_flops(kind, full), shape_bytes(kind, full, "bf16")
    phase = Phase.FORWARD if direction == "forward" else Phase.INPUT_GRAD
    op = Compute("core", kind, full, "bf16", flops, moved, phase, kernel=KERNELS[kernel], drops=drops)
    return COSTS.compute(op).seconds


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_lengthens_attention_as_measured(kernel: str, direction: str) -> None:
    found = {
        (tuple(r["shape"]), bool(r["p"])): r["seconds"] for r in ROWS if r["call"] == f"attention {kernel} {direction}"
    }
    ratios = []
    for shape, drops in found:
        if drops:
            added = found[shape, True] - found[shape, False]
            own = attention(kernel, direction, list(shape), True) - attention(kernel, direction, list(shape), False)
            ratios.append(own / added)
    assert len(ratios) == 7
    assert 0.85 < statistics.median(ratios) < 1.15


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_dropout_kernel_takes_longer_than_its_bytes(dtype: str) -> None:
    times = {r["call"]: r["seconds"] for r in ROWS if r.get("elements") == 1 << 28 and r["dtype"] == dtype}
    n = 1 << 28
    x, mask = Tensor(dtype, (n,), ()), Tensor("bool", (n,), ())
    forward = CapturedOperator("aten.native_dropout", "forward", "", (x,), (x, mask), 1, False)
    backward = CapturedOperator("aten.native_dropout_backward", "backward", "", (x, mask), (x,), 1, False)
    own, plain = (COSTS.compute(compute_of(op)).seconds for op in (forward, backward))
    measured = times["native_dropout"] / times["native_dropout_backward"]
    assert own / plain == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("vocabulary", "slower"), [(50257, 6.1), (30522, 2.9)])
def test_a_vocabulary_that_is_not_aligned_is_slow_as_measured(vocabulary: int, slower: float) -> None:
    def seconds(words: int) -> float:
        shapes = ((8192, 1024), (1024, words)), (8192, words)
        op = CapturedOperator(
            "aten.mm",
            "forward",
            "",
            tuple(Tensor("bf16", s, ()) for s in shapes[0]),
            (Tensor("bf16", shapes[1], ()),),
            1,
            False,
        )
        return COSTS.compute(compute_of(op)).seconds

    padded = -(-vocabulary // 64) * 64
    assert seconds(vocabulary) / seconds(padded) == pytest.approx(slower, rel=0.2)


@pytest.mark.parametrize(("m", "n", "k"), [(8191, 1024, 1024), (8192, 1, 1024), (1, 1024, 1024)])
def test_an_odd_number_of_rows_or_a_single_column_is_aligned(m: int, n: int, k: int) -> None:
    left, right, out = (Tensor("bf16", shape, ()) for shape in ((m, k), (k, n), (m, n)))
    assert compute_of(CapturedOperator("aten.mm", "forward", "", (left, right), (out,), 1, False)).alignment == 8
    turned = right._replace(shape=(n, k), strides=(1, n))  # of a weight gradient: X is [rows, k], dY is [rows, n]
    gradient = CapturedOperator("aten.mm", "backward", "", (turned, left._replace(shape=(k, m))), (out,), 1, False)
    assert compute_of(gradient).alignment == (1 if m % 2 and m > 1 else 8)


@pytest.mark.parametrize(("dtype", "bytes_per_s"), [("bf16", 1.99e12), ("fp32", 2.68e12)])
def test_fused_adamw_is_bound_by_instructions_in_16_bits(dtype: str, bytes_per_s: float) -> None:
    x = Tensor(dtype, (1 << 29,), ())
    op = CapturedOperator("aten._fused_adamw_", "optimizer", "", (x,) * 4, (x,) * 3, 1, False)
    compute = compute_of(op)
    assert compute.bytes / COSTS.compute(compute).seconds == pytest.approx(bytes_per_s, rel=0.05)


def test_rows_of_one_index_are_added_one_after_another() -> None:
    """2,048 rows for each of four experts took 2.1 ms; here 8,192 rows are spread over four."""
    bias, rows, places = (
        Tensor(d, s, ()) for d, s in (("bf16", (4, 5760)), ("bf16", (8192, 5760)), ("int64", (8192,)))
    )
    backward = CapturedOperator("aten.index_put_", "backward", "", (bias, places, rows), (bias,), 1, False)
    assert COSTS.compute(compute_of(backward)).seconds == pytest.approx(2.1e-3, rel=0.05)
    forward = backward._replace(phase="forward")
    assert COSTS.compute(compute_of(forward)).seconds < 1e-3


SOFTMAX_ROWS = {1024: ("", "torch_short_backward"), 2048: ("", "torch_backward")}
SOFTMAX_ROWS |= {2049: ("torch_unaligned", "torch_backward")}


@pytest.mark.parametrize(("row", "kernels"), [*SOFTMAX_ROWS.items(), (4096, ("torch", "torch_backward"))])
def test_the_softmax_of_short_rows_is_another_kernel(row: int, kernels: tuple[str, str]) -> None:
    assert (torch_softmax(row, 2), torch_softmax_backward(row)) == kernels


@pytest.mark.parametrize("name", ["_log_softmax", "_log_softmax_backward_data"])
def test_a_vocabulary_s_softmax_takes_as_long_as_profiled(name: str) -> None:
    profiles = json.loads(gzip.decompress(Path("scenarios/measured/gpu_programs/operators.json.gz").read_bytes()))
    found = [o for p in profiles.values() for o in p["operators"] if o["name"] == f"aten::{name}"]
    ratios = []
    for o in found:
        x = Tensor("fp32", tuple(o["shapes"][0]), ())
        if x.bytes > 1e9:  # smaller ones lie in the cache in part
            op = CapturedOperator(f"aten.{name}", "forward", "", (x,) * (1 + ("backward" in name)), (x,), 1, False)
            ratios.append(COSTS.compute(compute_of(op)).seconds * o["count"] / o["seconds"])
    # BERT's takes less than half of the predicted time. The reason is not known.
    assert len(ratios) == 17
    assert sum(abs(ratio - 1.0) < 0.1 for ratio in ratios) == 16


def profiled(name: str) -> list[tuple[list[int], float]]:
    """Return the shapes of an operator's first input in the profiled steps, and the seconds of one call."""
    with gzip.open("scenarios/measured/gpu_programs/operators.json.gz") as file:
        steps = json.load(file)
    rows = [row for step in steps.values() for row in step["operators"] if row["name"] == name and row["shapes"][0]]
    return [(row["shapes"][0], row["seconds"] / row["count"]) for row in rows]


def test_sums_over_rows_take_what_was_profiled() -> None:
    """Gradients of biases, in 16 bits. Their bytes alone would take half of the time in the median."""
    ratios, by_bytes = [], []
    for shape, seconds in profiled("aten::sum"):
        if len(shape) != 2 or shape[1] < 2048 or shape[1] % 8:  # sums of experts' rows go over the other dimension
            continue
        x, out = Tensor("bf16", tuple(shape), ()), Tensor("bf16", (1, shape[1]), ())
        op = compute_of(CapturedOperator("aten.sum", "backward", "", (x,), (out,), 1, False))
        ratios.append(COSTS.compute(op).seconds / seconds)
        by_bytes.append(COSTS.compute(replace(op, sums=None)).seconds / seconds)
    assert len(ratios) > 20
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)
    assert statistics.median(by_bytes) < 0.65


def test_heads_halves_are_joined_as_profiled() -> None:
    """Rotary embeddings in Llama 3 8B, 8,192 tokens: four times the halves of 32 query heads, four of 8 key heads."""
    halves = Tensor("bf16", (1, 32, 8192, 64), (67108864, 128, 4096, 1))
    seconds = 0.0
    for heads in (32, 8):
        half = halves._replace(shape=(1, heads, 8192, 64))
        out = Tensor("bf16", (1, heads, 8192, 128), ())
        op = CapturedOperator("aten.cat", "forward", "", (half, half), (out,), 1, False)
        seconds += 4 * COSTS.compute(compute_of(op)).seconds
    assert seconds == pytest.approx(0.711e-3, rel=0.1)


def test_unaligned_rows_of_a_softmax_are_read_one_by_one() -> None:
    """gpt-oss's 2,048 scores and a sink, 64 heads, took 1.47 ms."""
    x = Tensor("bf16", (1, 64, 2048, 2049), ())
    op = compute_of(CapturedOperator("aten._softmax", "forward", "", (x,), (x,), 1, False))
    assert COSTS.compute(op).seconds == pytest.approx(1.47e-3, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "shape", "measured_us"), [("h100-sxm", (64, 512, 64, 512), 15.8), ("h200-sxm", (192, 512, 64, 512), 28.7)]
)
def test_a_batch_of_products_is_not_faster_than_its_bytes(gpu: str, shape: tuple[int, ...], measured_us: float) -> None:
    """T5 and DeBERTa (scenarios/measured/gpu_programs, gpu_programs_h200); points would say 9.2 and 21.1 us."""
    batch, m, n, k = shape
    left, right = Tensor("bf16", (batch, m, k), ()), Tensor("bf16", (batch, k, n), ())
    op = CapturedOperator("aten.bmm", "forward", "", (left, right), (Tensor("bf16", (batch, m, n), ()),), 1, False)
    found = compute_of(op)
    costs = Costs(load_profile(gpu), GPUS[gpu])
    seconds = costs.compute(found).seconds
    assert seconds >= found.bytes / GPUS[gpu].memory_bandwidth_bytes_per_s * 0.999
    assert seconds == pytest.approx(measured_us * 1e-6, rel=0.25)
