"""Fit the clocks of torch's kernels that are not vectorized (`sim/prices/unvectorized.py`) to published chains.

    python tools/fit_unvectorized.py

Each chain is captured operator by operator on fake tensors. Its time is the sum of its operators' times: each takes
the longer of its bytes' time and of its elements' clocks, and `LATENCY_S`. Four numbers are fitted: the part of the
bandwidth, clocks for an element's place, clocks for a cast of an operand, and clocks for an element of a concatenation.
The tool prints them for each half of the chains, with the errors on the other half, and for all chains. Chains that
move less than `LEAST_BYTES` an operator are left out, because launches bound them. A100 chains are only shown: they are
of 2024, when a cast to 16 bits was not vectorized either (pytorch pull request 137053).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import least_squares
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from calibrate.bundled_model.norm import eager_rms_norm
from calibrate.capture.gpu.autocast import CudaOperators
from calibrate.capture.recorder import Recorder
from calibrate.timings.fused import CHAINS
from sim.inputs.program_file import CapturedOperator
from sim.inputs.program_file import Tensor as Described
from sim.models.captured.kernels import moved_bytes
from sim.models.captured.layout import casts_of, single_elements
from sim.models.norm import rms_norm_eager
from sim.prices.unvectorized import sm_clocks_per_s
from topology.presets import GPUS
from topology.spec import GpuSpec

LIGER, H200 = Path("scenarios/published/liger_kernels.json"), Path("scenarios/cuda/h200.json")
LATENCY_S = 2e-6  # start and end of a kernel, as in shipped profiles
LEAST_BYTES = 120e6
START = (1.2, 0.7, 0.4, 0.8)
BF16, FP32 = torch.bfloat16, torch.float32


class Chain(NamedTuple):
    """A measured chain. `phase`: forward, backward or full."""

    name: str
    phase: str
    gpu: GpuSpec
    seconds: float
    operators: tuple[CapturedOperator, ...]


def captured(make: Callable[[], tuple[Tensor, ...]], function: Callable[..., Any]) -> list[CapturedOperator]:
    """Return the operators of a function's forward and backward."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make()
        operators = CudaOperators(None)
        recorder = Recorder(torch.nn.Module(), operators)
        with recorder, operators:
            recorder.phase, operators.active = "forward", True
            out = function(*inputs)
            recorder.phase, operators.active = "", False
            outs = out if isinstance(out, tuple) else (out,)
            slopes = [torch.ones_like(x) for x in outs]
            recorder.phase = "backward"
            torch.autograd.grad(outs, [x for x in inputs if x.requires_grad], slopes)
            recorder.phase = ""
    return [
        CapturedOperator(
            r.name,
            r.phase,
            "",
            tuple(Described(*t) for t, _ in r.inputs),
            tuple(Described(*t) for t, _ in r.outputs),
            r.launches,
            False,
        )
        for r in recorder.rows
        if r.launches
    ]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return an input with a gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def rows_and_weight(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a norm's input and weight."""
    return random(rows, width, dtype=dtype), random(width, dtype=dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute Transformers' LlamaRMSNorm."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a residual sum and its norm."""
    x = x + residual
    return rms_norm(x, weight), x


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Transformers' apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def half(x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return torch.cat((-x[..., d:], x[..., :d]), -1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


def rope_inputs(tokens: int, hidden: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Return queries and keys as a projection leaves them, and the angles."""
    d = hidden // heads
    q, k = (torch.randn(1, tokens, n, d, dtype=BF16).transpose(1, 2).requires_grad_() for n in (heads, kv_heads))
    return q, k, torch.randn(1, tokens, d, dtype=BF16), torch.randn(1, tokens, d, dtype=BF16)


def gate(x: Tensor) -> Tensor:
    """Compute SwiGLU of one merged projection."""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def liger_case(row: dict[str, Any]) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[..., Any]] | None:
    """Return inputs and function of a row; None if the row is none of the chains."""
    s, dtype = {**row, **row["shape"]}, FP32 if row.get("dtype") == "float32" else BF16
    match row["op"]:
        case "rms_norm":
            return partial(rows_and_weight, s["M"], s["H"], dtype), rms_norm
        case "fused_add_rms_norm":
            sizes = ((s["M"], s["H"]), (s["M"], s["H"]), (s["H"],))
            return lambda: tuple(random(*n, dtype=dtype) for n in sizes), add_rms_norm
        case "rope":
            tokens, hidden = s.get("T") or s["seq_len"], s.get("H") or s["hidden_size"]
            return partial(rope_inputs, tokens, hidden, s["num_q_heads"], s["num_kv_heads"]), rope
        case "relu_squared":
            return lambda: (random(s["M"], s["N"]),), lambda x: F.relu(x).square()
        # Its backward rows include the forward.
        case "megatron_swiglu" if row["pass"] == "forward":
            return lambda: (random(s["S"], s["B"], 2 * s["ffn_local"]),), gate
    return None


def liger_chains() -> Iterator[Chain]:
    """Yield Liger's rows of eager torch."""
    gpus = {"NVIDIA A100-SXM4-80GB": "a100-sxm", "NVIDIA H100 80GB HBM3": "h100-sxm"}
    for row in json.loads(LIGER.read_text())["rows"]:
        seconds = row.get("measured", {}).get("seconds")
        case = liger_case(row) if seconds and row["provider"] in ("huggingface", "torch") else None
        if case is not None and row["gpu"] in gpus:
            found = [o for o in captured(*case) if row["pass"] in ("full", o.phase)]
            yield Chain(row["id"], row["pass"], GPUS[gpus[row["gpu"]]], seconds, tuple(found))


def h200_chains() -> Iterator[Chain]:
    """Yield the eager chains that `calibrate.run` measured on an H200."""
    tables = {(p["op"], p["dtype"]): p for p in json.loads(H200.read_text())["points"]}

    def measured(op: str, dtype: str, bytes_: float) -> float:
        table = tables[op, dtype]
        sizes = [abs(shape[0] - bytes_) for shape in table["shape"]]
        best = int(np.argmin(sizes))
        assert sizes[best] <= 1e-3 * bytes_, (op, dtype, bytes_)
        return float(table["seconds"][best])

    n = 1 << 27
    for name, chain in CHAINS.items():
        found = captured(partial(chain.inputs, n, 4096, random), chain.function)
        for phase, suffix in (("forward", ""), ("backward", "_backward")):
            seconds = measured(f"elementwise:{name}_eager{suffix}", "bf16", chain.accesses * n * 2)
            yield Chain(name, phase, GPUS["h200-sxm"], seconds, tuple(o for o in found if o.phase == phase))
    for dtype, size, counts in ((BF16, 2, (1 << 26, 1 << 28)), (FP32, 4, (1 << 24, 1 << 27))):
        for n in counts:
            t, label = rms_norm_eager(size), "bf16" if dtype == BF16 else "fp32"
            found = captured(partial(rows_and_weight, n // 4096, 4096, dtype), eager_rms_norm)
            for phase, op, moved, kernels in (
                ("forward", "norm_eager", t.forward_bytes, t.forward_kernels),
                ("backward", "norm_eager_input_grad", t.backward_bytes, t.backward_kernels),
            ):
                seconds = kernels * measured(op, label, moved * n / kernels)
                chosen = tuple(o for o in found if o.phase == phase)
                yield Chain(f"{op} {label} {n}", phase, GPUS["h200-sxm"], seconds, chosen)


def predicted(x: Any, chain: Chain) -> float:
    """Return a chain's seconds with the constants `x`."""
    gpu, total = chain.gpu, 0.0
    for o in chain.operators:
        elements, casts = single_elements(o), casts_of(o)
        joins = o.name in ("aten.cat", "aten.slice_backward")
        clocks = elements * (x[3] if joins else max(x[1] if not casts else 0.0, x[2] * casts))
        moved_s = x[0] * moved_bytes(o) / gpu.memory_bandwidth_bytes_per_s
        total += max(moved_s, clocks / sm_clocks_per_s(gpu)) + LATENCY_S
    return total


def fitted(chains: list[Chain]) -> Any:
    """Return the constants with the least squares of log(predicted ÷ measured)."""
    return least_squares(lambda x: [np.log(predicted(x, c) / c.seconds) for c in chains], START).x


def main() -> None:
    """Print constants and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    every = (*liger_chains(), *h200_chains())
    large = [c for c in every if sum(map(moved_bytes, c.operators)) / len(c.operators) > LEAST_BYTES]
    chains = [c for c in large if c.gpu.name != "a100-sxm"]
    old = [c for c in large if c.gpu.name == "a100-sxm"]
    halves = [(chains[i::2], chains[1 - i :: 2]) for i in (0, 1)]
    everything = ("without the rule", np.array([1 / 0.85, 0, 0, 0]), chains)
    for title, x, judged in (
        everything,
        ("from the first half", fitted(halves[0][0]), halves[0][1]),
        ("from the second half", fitted(halves[1][0]), halves[1][1]),
        ("from all", fitted(chains), chains),
    ):
        errors, of_old = ([predicted(x, c) / c.seconds - 1 for c in found] for found in (judged, old))
        print(f"{title}: {1 / x[0]:.3f} of the bandwidth, clocks: place {x[1]:.3f}, cast {x[2]:.3f}, join {x[3]:.3f}")
        print(
            f"  {len(judged)} chains: error {np.mean(np.abs(errors)):.1%}, largest {np.max(np.abs(errors)):.1%}", end=""
        )
        print(f"; {len(old)} on an A100: {np.mean(np.abs(of_old)):.1%}")
    for c in chains:
        error = predicted(x, c) / c.seconds - 1
        print(f"  {c.gpu.name:9} {c.name:60} {c.phase:9} {c.seconds * 1e6:7.0f} us {error:+.1%}")


if __name__ == "__main__":
    main()
