"""Times single operators of torch on a GPU, forward and backward, by shape and dtype.

    python tools/gpu_kernels.py --out FILE.json [--only GROUP …] [--device cpu --small]
    python tools/gpu_kernels.py --show FILE.json

FILE has, for each case, the device seconds of every ATen operator that its forward and backward ran, as torch's
profiler saw them (the mean of three runs). Inputs are random and, but for small cases, larger than a GPU's cache.
`--show` prints how much longer attention takes with a mask, and norms and convolutions than with channels last.
`--device cpu --small` runs the same cases with small tensors, to see that they run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_kernel_cases import GROUPS, Maker

RUNS = 3


def seconds_of(run: Callable[[], Any], device: str) -> dict[str, float]:
    """Return the device seconds of each operator in one run, the mean of several."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    run()
    with profile(activities=activities) as profiler:
        for _ in range(RUNS):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    sums: Counter[str] = Counter()
    for e in profiler.key_averages():
        if e.key.startswith("aten::") and device == "cuda" and e.self_device_time_total > 0:
            sums[e.key.removeprefix("aten::")] += e.self_device_time_total * 1e-6 / RUNS
    return dict(sums)


def compared(path: Path) -> list[str]:
    """Return the number of cases, and median ratios of pairs of cases that differ in one thing."""
    cases = {c["case"]: c["seconds"] for c in json.loads(path.read_text())["cases"] if "seconds" in c}
    pairs = (
        ("attention window", "attention full", ("_cudnn_attention_forward", "_cudnn_attention_backward")),
        ("batch_norm bf16 first", "batch_norm bf16 last", ("native_batch_norm", "native_batch_norm_backward")),
        ("convolution first", "convolution last", ("cudnn_convolution", "convolution_backward")),
    )
    lines = [f"{len(cases)} cases"]
    for one, other, operators in pairs:
        for operator in operators:
            ratios = [
                seconds[operator] / cases[name.replace(one, other)][operator]
                for name, seconds in cases.items()
                if name.startswith(one) and operator in seconds
            ]
            said = f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(f"{operator}: {one} / {other.split()[-1]}: {said} ({len(ratios)} shapes)")
    return lines


def main() -> int:
    """Read the command line, run the cases, and write after each group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path)
    what.add_argument("--show", type=Path)
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.show:
        print("\n".join(compared(options.show)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    cases: list[dict[str, Any]] = []
    for group in options.only:
        began = time.perf_counter()
        for name, make in GROUPS[group](Maker(options.device, options.small)):
            try:
                cases.append({"group": group, "case": name, "seconds": seconds_of(make(), options.device)})
            except Exception as error:  # the other cases still run
                cases.append({"group": group, "case": name, "failed": f"{type(error).__name__}: {error}"[:200]})
                print(name, cases[-1]["failed"], flush=True)
        print(f"{group}: {time.perf_counter() - began:.1f} s", flush=True)
        facts = {"gpu": gpu, "software": f"torch {torch.__version__}"}
        options.out.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
