"""Rows of measured kernels as operators, priced by the same tables as a training step's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.core.json_values import is_count, is_number
from sim.core.operator_kinds import ATTENTION_DECODE, ATTENTION_LAUNCHES, shape_flops
from sim.core.program import Compute, Phase
from sim.inputs.recorded import decided
from sim.prices.cost import Cost
from sim.prices.roofline import shape_bytes
from sim.validation.fused_prices import fused_costs
from sim.validation.moe_rows import moe_layer
from sim.validation.prediction import NotSimulated, Prediction, Predictions, costs_of, spread
from sim.validation.records import Measurement
from sim.validation.sizes import NAMES, dtype_of, pass_of
from sim.variants.engines.names import engine_named

Data = Mapping[str, Any]
PHASES = {
    "TN": Phase.FORWARD,
    "NN": Phase.INPUT_GRAD,
    "NT": Phase.WEIGHT_GRAD,
    "fwd": Phase.FORWARD,
    "bwd_grad_act": Phase.INPUT_GRAD,
    "bwd_grad_w": Phase.WEIGHT_GRAD,
}


def kernel_predictions(row: Measurement, calibration: str | None) -> Predictions:
    """Seconds of the row's kernel, or of a layer's parts."""
    if row.data.get("fit"):
        raise NotSimulated("a fitted parameter, not a measured kernel")
    data = _usual_names(row.data)
    op = data["op"]
    if op == "moe_layer":
        return moe_layer(row, calibration)
    costs = costs_of(row, calibration, burst=not _as_in_training(data))
    items = OPERATORS[op](data) if op in OPERATORS else []
    if op == "gemm" and not _as_in_training(data) and engine_named(row.served_by) is not None:
        items = [replace(item, served=True) for item in items]  # an engine's linear layer, which quantizes its input
    parts = [costs.compute(item) for item in items] if op in OPERATORS else fused_costs(op, data, costs)
    if op == "gemm":  # launched one after another
        parts = [cost._replace(seconds=max(cost.seconds, costs.launch_overhead_s)) for cost in parts]
    found = total(parts)
    flops = 2.0 * math.prod(OPERATORS[op](data)[0].shape) if op in ("gemm", "grouped_gemm") else 0.0
    rate = {"flops_per_s": Prediction(*(flops / s for s in (found.value, found.high, found.low)))} if flops else {}
    return {"seconds": found, **rate}


_OTHER_NAMES = {
    "matmul": "gemm",
    "mm": "gemm",
    "bmm": "gemm",
    "linear": "gemm",
    "group_gemm": "grouped_gemm",
    "flash_attention": "attention",
    "sdpa": "attention",
    "flash_decode": "attention_decode",
    "adam": "adamw",
}
_SIZES = ("batch", "seq_len", "kv_len", "heads", "kv_heads", "head_dim", "groups")  # under any of their names
_PASSES = {"forward": "attention_forward", "backward": "attention_backward", "full": "attention_forward_backward"}


def _usual_names(data: Data) -> dict[str, Any]:
    """The row with the format's names beside other usual ones; `attention` with a `pass` is that pass's operator."""
    op = str(data.get("op")).lower().replace("-", "_")
    op = _OTHER_NAMES.get(op, op)
    named = {size: data[name] for size in _SIZES for name in NAMES[size] if name in data and size not in data}
    if op == "attention":
        op = _PASSES[pass_of(data)]
    return (data if isinstance(data, dict) else dict(data)) | named | {"op": op}


_OF_TRAINING = ("layout", "stage", "impl", "provider", "qkv_contiguous")


def _as_in_training(data: Data) -> bool:
    """Tell whether a row names a layer's pass or whose kernel it is.

    Then it was measured as training runs it. A bare matmul or attention is taken for what a profile's own points are:
    a serving library's kernel in a short burst, which ends before the power limit acts.
    """
    decided(data, *_OF_TRAINING)
    return any(key in data for key in _OF_TRAINING)


def total(parts: list[Cost]) -> Prediction:
    """The sum of kernels; their errors are taken to go together."""
    seconds = sum(c.seconds for c in parts)
    sigma = sum(c.seconds * c.uncertainty for c in parts) / seconds if seconds else 0.0
    return spread(seconds, sigma)


def _sizes(data: Data, *names: str) -> Sequence[int]:
    """Whole numbers above 0 under these names; InputError where one is missing or is no such number."""
    for name in names:
        found = data.get(name)
        if not is_count(found):
            raise InputError(f"{data['op']}: {name}: found {str(found)[:40]}; allowed: a whole number above 0")
    return [int(data[name]) for name in names]


def _size(data: Data, name: str, default: int) -> int:
    """A whole number above 0 under this name, `default` where it is not given."""
    return default if data.get(name) is None else _sizes(data, name)[0]


def _gemm(data: Data) -> list[Compute]:
    """`m`, `n`, `k` are those of the product itself: the result is `[m, n]`, whatever the layout."""
    dtype, (m, n, k) = dtype_of(data, "bf16"), _sizes(data, "m", "n", "k")
    shape = (_size(data, "batch", 1), m, n, k)
    phase = PHASES.get(str(data.get("layout")), Phase.FORWARD)
    item = _matmul("gemm", shape, dtype, dtype_of(data, dtype, "out_dtype"), bool(data.get("accumulate")), phase)
    return [item]


def _grouped_gemm(data: Data) -> list[Compute]:
    """The forward's `m` (per group), `n`, `k` in all stages; the gradients are `[m, k]` and `[n, k]`."""
    rows = "m_per_group" if "m_per_group" in data else "m"
    dtype, (groups, m, n, k) = dtype_of(data, "bf16"), _sizes(data, "groups", rows, "n", "k")
    phase = PHASES.get(str(data.get("stage")), Phase.FORWARD)
    shape = {Phase.INPUT_GRAD: (m, k, n), Phase.WEIGHT_GRAD: (n, k, m)}.get(phase, (m, n, k))
    out = dtype_of(data, dtype, "grad_dtype" if phase is Phase.WEIGHT_GRAD else "out_dtype")
    return [_matmul("grouped_gemm", (groups, *shape), dtype, out, bool(data.get("accumulate")), phase)]


def _matmul(kind: str, shape: tuple[int, ...], dtype: str, out: str, accumulate: bool, phase: Phase) -> Compute:
    batch, m, n, k = shape
    size, written = dtype_bytes(dtype), dtype_bytes(out)
    moved = batch * (size * (m * k + k * n) + written * m * n * (2.0 if accumulate else 1.0))
    return Compute(kind, kind, shape, dtype, shape_flops(kind, shape), moved, phase)


def _attention(kinds: tuple[str, ...]) -> Callable[[Data], list[Compute]]:
    def items(data: Data) -> list[Compute]:
        dtype, (batch, heads, length) = dtype_of(data, "bf16"), _sizes(data, "batch", "heads", "seq_len")
        (d,) = _sizes(data, "qk_head_dim" if "qk_head_dim" in data else "head_dim")
        v = _size(data, "v_head_dim", d)
        shape = (
            batch,
            heads,
            _size(data, "kv_heads", heads),
            length,
            _size(data, "kv_len", length),
            d,
            v,
            int(bool(data.get("causal"))),
        )
        name = str(data.get("impl", ""))
        if name in UNFUSED:
            return _unfused(shape, dtype, kinds)
        served = not (name or _as_in_training(data) or len(kinds) > 1)
        return [_fused(IMPLEMENTATIONS.get(name, name), kind, shape, dtype, served) for kind in kinds]

    return items


def _attention_decode(data: Data) -> list[Compute]:
    """One new token of each sequence against a cache of `kv_len` tokens."""
    dtype, (batch, heads, kv_len, d) = dtype_of(data, "bf16"), _sizes(data, "batch", "heads", "kv_len", "head_dim")
    shape = (batch, heads, _size(data, "kv_heads", heads), kv_len, d)
    flops, moved = shape_flops(ATTENTION_DECODE, shape), shape_bytes(ATTENTION_DECODE, shape, dtype)
    return [Compute("attention", ATTENTION_DECODE, shape, dtype, flops, moved, Phase.FORWARD)]


def _optimizer(data: Data) -> list[Compute]:
    """One fused sweep over tensors of one dtype: AdamW reads parameter, gradient and two moments and writes all but the
    gradient; SGD reads parameter and gradient and writes the parameter."""
    counts = [data[name] for name in ("elements", "params", "parameters", "numel") if name in data]
    count = counts[0] if counts else None
    if not is_number(count) or not 1 <= count < 1e18:
        raise InputError(f"{data['op']}: elements: found {str(count)[:40]}; allowed: a number above 0")
    dtype = dtype_of(data, "fp32")
    moved = (7 if data["op"] == "adamw" else 3) * dtype_bytes(dtype) * count
    return [Compute(data["op"], "optimizer", (round(count),), dtype, float(count), moved, Phase.OPTIMIZER)]


UNFUSED = ("PyTorch", "standard")


def _fused(kernel: str, kind: str, shape: tuple[int, ...], dtype: str, served: bool) -> Compute:
    phase = Phase.FORWARD if kind == "attention_forward" else Phase.INPUT_GRAD
    return Compute(
        kernel or kind,
        kind,
        shape,
        dtype,
        shape_flops(kind, shape),
        shape_bytes(kind, shape, dtype),
        phase,
        ATTENTION_LAUNCHES[kind],
        kernel=kernel,
        served=served,
    )


IMPLEMENTATIONS = {
    "FlashAttention": "flash1",
    "FlashAttention-2": "flash2",
    "FlashAttention-3": "flash3",
    "cuDNN": "cudnn",
    "Triton": "triton",
}


def _unfused(shape: tuple[int, ...], dtype: str, kinds: tuple[str, ...]) -> list[Compute]:
    """Plain torch: scores, mask, softmax (the mask is a copy that the causal case alone makes), context."""
    batch, heads, _, q, kv, d, v, causal = shape
    e, scores = dtype_bytes(dtype), float(batch * heads * q * kv)

    def product(m: int, n: int, k: int, phase: Phase) -> Compute:
        s = (batch * heads, m, n, k)
        return Compute("scores", "gemm", s, dtype, shape_flops("gemm", s), shape_bytes("gemm", s, dtype), phase)

    def chain(accesses: float, kernels: int, phase: Phase) -> Compute:
        return Compute("softmax", "softmax", (int(scores),), dtype, scores, accesses * e * scores, phase, kernels)

    mask = 1 if causal else 0
    out: list[Compute] = []
    f, b = Phase.FORWARD, Phase.INPUT_GRAD
    if "attention_forward" in kinds:
        out += [product(q, kv, d, f), chain(4 + 2 * mask, 2 + mask, f), product(q, v, kv, f)]
    if "attention_backward" in kinds:
        out += [
            product(kv, v, q, b),
            product(q, kv, v, b),
            chain(5 + 2 * mask, 2 + mask, b),
            product(q, d, kv, b),
            product(kv, d, q, b),
        ]
    return out


OPERATORS: Mapping[str, Callable[[Data], list[Compute]]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention_forward": _attention(("attention_forward",)),
    "attention_backward": _attention(("attention_backward",)),
    "attention_decode": _attention_decode,
    "adamw": _optimizer,
    "sgd": _optimizer,
    "attention_forward_backward": _attention(("attention_forward", "attention_backward")),
}
