"""Measures or prints how much a loop of one kernel loses to a GPU's power limit.

    python tools/gpu_power.py measure FILE.json [--seconds S]     (a CUDA GPU, torch, nvidia-ml-py)
    python tools/gpu_power.py show [FILE.json]                    (scenarios/cuda/h200_power.json)

Every loop starts on an idle GPU. `first_s`: a call within the first 50 ms. `settled_s`: the 25th percentile of the
second half. Power and clock are means of the second half.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from gpu_watch import Watch  # noqa: E402

STORED = ROOT / "scenarios" / "cuda" / "h200_power.json"
CHUNK_S, REST_S = 0.05, 2.0
SQUARES = (2048, 4096, 8192, 16384)
LAYER = ((8192, 14336, 4096), (8192, 4096, 14336))  # the MLP of a model of hidden size 4,096


def loops() -> dict[str, tuple[Callable[[], object], float]]:
    """Return the call that each loop repeats, and its FLOPs."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def matmul(m: int, n: int, k: int) -> tuple[Callable[[], object], float]:
        a, b = random(m, k), random(n, k)
        return lambda: torch.mm(a, b.t()), 2.0 * m * n * k

    source, target = random(1 << 30), random(1 << 30)
    q, k, v = (random(4, 32, 8192, 128) for _ in range(3))

    def attention() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def matmul_fp8(m: int, n: int, k: int) -> tuple[Callable[[], object], float]:
        a, b = (random(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), 2.0 * m * n * k

    def of(shape: tuple[int, int, int]) -> str:
        return " x ".join(map(str, shape))

    found = {f"matmul {of((n, n, n))}": matmul(n, n, n) for n in SQUARES}
    found |= {f"matmul {of(shape)}": matmul(*shape) for shape in LAYER}
    found |= {f"matmul fp8 {of(shape)}": matmul_fp8(*shape) for shape in ((8192, 8192, 8192), *LAYER)}
    return {
        "copy of 2 GiB": (lambda: target.copy_(source), 0.0),
        **found,
        "attention b=4 h=32 s=8192 d=128": (attention, 2.0 * 4 * 32 * 8192 * 8192 * 128),
    }


def measure(seconds: float) -> dict[str, Any]:
    """Run all loops, `seconds` each."""
    try:
        import pynvml  # noqa: F401  (gpu_watch needs it)
        import torch
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install nvidia-ml-py torch", file=sys.stderr)
        raise SystemExit(2) from None
    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    found, limit_w = [], 0.0
    for name, (call, flops) in loops().items():
        call()
        once_s = _timed(call, 1)
        time.sleep(REST_S)
        watch = Watch()
        calls, end = max(1, int(CHUNK_S / once_s)), time.perf_counter() + seconds
        chunks = []
        while time.perf_counter() < end:
            chunks.append(_timed(call, calls))
        power, clock = watch.stop(since=end - seconds / 2)
        limit_w = watch.limit_w
        late = sorted(chunks[len(chunks) // 2 :])
        found.append(
            {
                "loop": name,
                "flops": flops,
                "first_s": chunks[0],
                "settled_s": late[len(late) // 4],
                "power_w": power,
                "sm_clock_mhz": clock,
            }
        )
    return {
        "gpu": torch.cuda.get_device_name(),
        "limit_w": limit_w,
        "loops": found,
    }


def _timed(call: Callable[[], object], calls: int) -> float:
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / calls


def show(data: dict[str, Any]) -> list[str]:
    """Return a Markdown table; matmuls also have the shipped profile's times without and with its power limit."""
    lines = [
        f"| {data['gpu']}, limit {data['limit_w']:.0f} W | first | settled | power | clock "
        "| shipped, burst | shipped, in a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in data["loops"]:
        times = [_shown(x["first_s"], x["flops"]), _shown(x["settled_s"], x["flops"])]
        priced = [_shown(s, x["flops"]) for s in _shipped(x, data["gpu"])]
        lines.append(
            "| "
            + " | ".join(
                [x["loop"], *times, f"{x['power_w']:.0f} W", f"{x['sm_clock_mhz']:.0f} MHz", *(priced or ("", ""))]
            )
            + " |"
        )
    return lines


def _shown(seconds: float, flops: float) -> str:
    return f"{seconds * 1e6:,.1f} µs" + (f", {flops / seconds / 1e12:.0f} TFLOP/s" if flops else "")


def _shipped(x: dict[str, Any], gpu_name: str) -> list[float]:
    from sim.core.program import Compute, Phase
    from sim.prices.coefficients import PriceOptions
    from sim.prices.operator_prices import Costs
    from sim.prices.profiles import load_profile
    from topology.node_parts import gpu_by_name
    from topology.presets import GPUS

    name = gpu_by_name(gpu_name)
    if not x["loop"].startswith("matmul") or name is None:
        return []
    *_, m, _, n, _, k = x["loop"].split()
    shape = (1, int(m), int(n), int(k))
    dtype, size = ("fp8", 1.0) if " fp8 " in x["loop"] else ("bf16", 2.0)
    moved = size * (shape[1] + shape[2]) * shape[3] + 2.0 * shape[1] * shape[2]
    op = Compute("linear", "gemm", shape, dtype, x["flops"], moved, Phase.FORWARD)
    profile = load_profile(name)
    gpu, limits = GPUS[name], (PriceOptions(power=False), PriceOptions())
    return [Costs(profile, gpu, options).compute(op).seconds for options in limits]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "show"))
    parser.add_argument("file", nargs="?", type=Path, default=STORED)
    parser.add_argument("--seconds", type=float, default=3.5)
    args = parser.parse_args()
    if args.what == "measure":
        args.file.write_text(json.dumps(measure(args.seconds), indent=1) + "\n")
    print("\n".join(show(json.loads(args.file.read_text()))))


if __name__ == "__main__":
    main()
