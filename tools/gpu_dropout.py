"""Measures what dropout adds to kernels of a GPU: element by element, compiled, and within fused attention.

    python tools/gpu_dropout.py measure FILE.json     (a CUDA GPU and torch)
    python tools/gpu_dropout.py show [FILE.json]      (scenarios/cuda/h100_dropout.json)

Calls without dropout and with it are timed sample by sample in turn. `show` prints what dropout adds, in clocks of one
multiprocessor for each score or element: fused attention beside the same without dropout, and torch's own dropout
beside the time of its bytes at the speed of its backward, which draws nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STORED = ROOT / "scenarios" / "cuda" / "h100_dropout.json"
P = 0.125  # cuDNN's attention takes multiples of 1/16 alone
ELEMENTS = (1 << 20, 1 << 23, 1 << 26, 1 << 28)
HIDDEN = 4096
SHAPES = (  # sequences, heads, tokens, head size
    (8, 16, 1024, 64),
    (8, 16, 2048, 64),
    (4, 32, 2048, 64),
    (2, 32, 2048, 128),
    (1, 32, 4096, 128),
    (1, 32, 8192, 128),
    (4, 32, 4096, 128),
)
Call = Callable[[], object]


def _elementwise(bench: Any, dtype_name: str) -> list[dict[str, Any]]:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    found = []
    for n in ELEMENTS:
        if n * torch.finfo(dtype).bits // 8 > 1 << 30:
            continue
        xs = [torch.randn(n, device="cuda", dtype=dtype) for _ in range(bench.copies(n * 5))]
        masks = [torch.ones(n, device="cuda", dtype=torch.bool) for _ in xs]
        ways: dict[str, list[Call]] = {
            "unary": [partial(torch.mul, x, 1.5) for x in xs],
            "native_dropout": [partial(torch.ops.aten.native_dropout, x, P, True) for x in xs],
            "native_dropout_backward": [
                partial(torch.ops.aten.native_dropout_backward, x, m, 1.1) for x, m in zip(xs, masks, strict=True)
            ],
            "bernoulli_": [partial(x.bernoulli_, 0.9) for x in xs],
            "empty": [partial(x.fill_, 0.9) for x in xs],
        }
        for name, timing in zip(ways, bench.side_by_side(list(ways.values())), strict=True):
            found.append({"call": name, "dtype": dtype_name, "elements": n, "seconds": timing.seconds})
    return found


def _compiled(bench: Any) -> list[dict[str, Any]]:
    """Megatron's bias, dropout and residual sum, which torch.compile fuses (core/fusions/fused_bias_dropout.py)."""
    import torch

    def add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
        return residual + torch.nn.functional.dropout(x + bias, p=p, training=True)

    fused, found = torch.compile(add), []
    for n in (1 << 24, 1 << 27):
        x, residual = (torch.randn(n // HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        bias = torch.randn(HIDDEN, device="cuda", dtype=torch.bfloat16)
        for t in (x, residual, bias):
            t.requires_grad_()
        grad = torch.randn_like(x)
        forward, backward = list[list[Call]](), list[list[Call]]()
        for p in (0.0, P):
            out = fused(x, bias, residual, p)
            forward.append([partial(fused, x, bias, residual, p)])
            backward.append([partial(torch.autograd.grad, out, (x, residual, bias), grad, retain_graph=True)])
        for direction, calls in (("forward", forward), ("backward", backward)):
            for p, timing in zip((0.0, P), bench.side_by_side(calls), strict=True):
                call = f"bias_dropout_add {direction}"
                found.append({"call": call, "dtype": "bf16", "elements": n, "p": p, "seconds": timing.seconds})
    return found


def _attention(bench: Any) -> list[dict[str, Any]]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }

    def attend(kind: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)

    found = []
    for shape in SHAPES:
        q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        grad = torch.randn_like(q)
        names, forward, backward = list[tuple[str, float]](), list[list[Call]](), list[list[Call]]()
        for name, kind in kinds.items():
            for p in (0.0, P):
                try:
                    out = attend(kind, q, k, v, p)
                    torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
                except RuntimeError as error:
                    print(f"{name} {shape} p={p}: {str(error)[:100]}", file=sys.stderr)
                    continue
                names.append((name, p))
                forward.append([partial(attend, kind, q, k, v, p)])
                backward.append([partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)])
        for direction, calls in (("forward", forward), ("backward", backward)):
            for (name, p), timing in zip(names, bench.side_by_side(calls), strict=True):
                call = f"attention {name} {direction}"
                found.append({"call": call, "dtype": "bf16", "shape": shape, "p": p, "seconds": timing.seconds})
    return found


def measure(out: Path) -> int:
    """Measure everything and write it."""
    import torch

    from calibrate import machine
    from calibrate.timings.timing import Bench

    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    bench = Bench("cuda", quick=False, limit_s=0.2)
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        partial(_attention, bench),
        *(partial(_elementwise, bench, dtype) for dtype in ("bf16", "fp16", "fp32")),
        partial(_compiled, bench),
    ]
    rows: list[dict[str, Any]] = []
    for part in parts:
        try:
            rows += part()
        except RuntimeError as error:
            print(f"{part.func.__name__}: {str(error)[:300]}", file=sys.stderr)
        out.write_text(
            json.dumps({"hardware": machine.hardware("cuda"), "software": machine.software("cuda"), "rows": rows})
        )
    return 0


def show(data: dict[str, Any]) -> list[str]:
    """Return a Markdown table of what dropout adds."""
    from sim.prices.attention_speed import TILE
    from sim.prices.unvectorized import sm_clocks_per_s
    from topology.node_parts import gpu_by_name
    from topology.presets import GPUS

    gpu = gpu_by_name(data["hardware"]["gpu"])
    if gpu is None:
        raise SystemExit(f"error: hardware.gpu: found {data['hardware']['gpu']!r}; no shipped GPU has this name")
    clocks_per_s = sm_clocks_per_s(GPUS[gpu])
    times = {(r["call"], str(r.get("shape") or r["elements"]), r["dtype"], r.get("p")): r for r in data["rows"]}
    lines = ["| kernel | size | without | with dropout | clocks added |", "|---|---|---:|---:|---:|"]
    for (call, size, dtype, p), row in times.items():
        if call.startswith("attention") and p:
            plain = times[call, size, dtype, 0.0]["seconds"]
            batch, heads, tokens, _ = row["shape"]
            number = batch * heads * tokens * (tokens + TILE) / 2
            what = " x ".join(map(str, row["shape"]))
        elif call == "native_dropout" and row["elements"] >= 1 << 26:
            plain = times["native_dropout_backward", size, dtype, None]["seconds"]
            number, what = row["elements"], f"{row['elements']:,}, {dtype}"
        else:
            continue
        added = (row["seconds"] - plain) * clocks_per_s / number
        lines.append(f"| {call} | {what} | {plain * 1e6:.0f} µs | {row['seconds'] * 1e6:.0f} µs | {added:.3f} |")
    return lines


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure", help="measure on a CUDA GPU").add_argument("file", type=Path)
    commands.add_parser("show", help="print the table").add_argument("file", nargs="?", type=Path, default=STORED)
    options = parser.parse_args()
    if options.command == "measure":
        return measure(options.file)
    print("\n".join(show(json.loads(options.file.read_text()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
