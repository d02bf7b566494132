"""Compares measurements on a GPU with their simulations, and writes the tables of docs/real_runs.md.

    python tools/gpu_table.py

Steps: each stored real run is simulated with three profiles: the calibration between its steps, that of `calibrate.run`
on the same machine (`scenarios/cuda/h200.json`), and the shipped one. For ranks that shared one GPU only the first has
a meaning. Kernels: the shipped profile is compared with the points of that file. Power and dropout, of an H100 too:
`tools/gpu_power.py show` and `tools/gpu_dropout.py show`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpu_dropout import STORED as DROPOUT  # noqa: E402
from gpu_dropout import show as show_dropout  # noqa: E402
from gpu_power import STORED, show  # noqa: E402
from page_tables import with_table  # noqa: E402

from sim.core.program import Compute, Phase  # noqa: E402
from sim.prices.operator_prices import Costs  # noqa: E402
from sim.prices.profiles import load_profile  # noqa: E402
from sim.prices.roofline import shape_bytes, shape_flops  # noqa: E402
from topology.presets import GPUS  # noqa: E402

PAGE = ROOT / "docs" / "real_runs.md"
RUNS, OWN, SHIPPED = "scenarios/measured/cuda", "scenarios/cuda/h200.json", "h200-sxm"
STEPS = """| scenario | ranks | step | own calibration | micro-benchmarks | shipped profile | saved | peak memory |
|---|---|---|---|---|---|---|---|"""
KERNELS = """| kernels of h200.json, 0.2 ms and longer | points | shipped ÷ measured, median | error, median | 95 % |
|---|---|---|---|---|"""
H100_POWER = ROOT / "scenarios" / "cuda" / "h100_power.json"
LEAST_S = 2e-4  # shorter kernels were limited by their launches
NAMED = {"flash": "flash2", "cudnn": "cudnn"}


def compared(name: str, *options: str) -> dict[str, Any]:
    """Return the JSON of `sim.compare`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "compare.json"
        command = ["sim.compare", f"scenarios/cuda/{name}.yaml", f"{RUNS}/{name}.json", "--json", str(report), *options]
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        found: dict[str, Any] = json.loads(report.read_text())
    return found


def step(name: str) -> str:
    """Return one line of the steps' table."""
    ranks = len(json.loads((ROOT / RUNS / f"{name}.json").read_text())["memory"])
    own = compared(name)
    errors = [own["step_time_s"]["error"]]
    if ranks == 1:
        errors += [compared(name, "--calibration", p)["step_time_s"]["error"] for p in (OWN, SHIPPED)]
    memory = [
        max((m[key]["error"] for m in own["memory"]), key=abs) for key in ("saved_for_backward_bytes", "peak_bytes")
    ]
    shown = [f"{e:+.1%}" for e in errors] + [""] * (3 - len(errors)) + [f"{e:+.1%}" for e in memory]
    return f"| {name} | {ranks} | {own['step_time_s']['measured'] * 1e3:.1f} ms | {' | '.join(shown)} |"


def steps() -> list[str]:
    """Return the steps' table, with runs of one rank first."""
    names = sorted(p.stem for p in (ROOT / RUNS).glob("*.json") if p.stem != "expected")
    return [STEPS, *sorted((step(name) for name in names), key=lambda line: line.split("|")[2])]


def kernels() -> list[str]:
    """Return the kernels' table: matmuls by dtype, attention by direction and kernel."""
    costs, ratios = Costs(load_profile(SHIPPED), GPUS[SHIPPED]), defaultdict(list)
    for table in load_profile(ROOT / OWN).points:
        op, _, backend = table.op.partition(":")
        kind = "gemm" if op.startswith("gemm") else op
        if kind != "gemm" and backend not in NAMED:
            continue
        phase = Phase.INPUT_GRAD if op.endswith(("backward", "input_grad")) else Phase.FORWARD
        phase = Phase.WEIGHT_GRAD if op.endswith("weight_grad") else phase
        kernel = NAMED[backend] if backend else ""
        name = f"{kind}:{kernel}" if backend else "matmul"
        for row, seconds in zip(table.shapes.tolist(), table.seconds.tolist(), strict=True):
            if seconds >= LEAST_S:
                shape = tuple(row)
                flops, moved = shape_flops(kind, shape), shape_bytes(kind, shape, table.dtype)
                priced = costs.compute(Compute(name, kind, shape, table.dtype, flops, moved, phase, kernel=kernel))
                ratios[f"{name}, {table.dtype}"].append(priced.seconds / seconds)
    return [KERNELS, *(_line(name, np.array(found)) for name, found in ratios.items() if len(found) >= 10)]


def _line(name: str, ratio: Any) -> str:
    error = np.abs(ratio - 1.0)
    return (
        f"| {name} | {len(ratio)} | {np.median(ratio):.2f} | {np.median(error):.1%} | {np.quantile(error, 0.95):.1%} |"
    )


def with_tables(text: str) -> str:
    """Return the page's text with the tables of the present predictions."""
    tables = {
        "gpu": steps(),
        "gpu kernels": kernels(),
        "gpu power": show(json.loads(STORED.read_text())),
        "h100 power": show(json.loads(H100_POWER.read_text())),
        "h100 dropout": show_dropout(json.loads(DROPOUT.read_text())),
    }
    for name, lines in tables.items():
        text = with_table(text, name, "\n".join(lines))
    return text


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
