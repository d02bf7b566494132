"""Prints how wrong kernels are that are priced by another GPU's, as tables for docs/gpus.md.

    python tools/borrowed_kernels.py

Every measured GPU's kernels are predicted without their measurements, by the GPU that `sim.inputs.nearest_gpu` chooses
among the others: once with only the GPU itself left out, once with all GPUs of its multiprocessors left out, which is
the case of a chip that nobody measured. Up to 300 kernels of each kind that take 20 us or more count. A cell has the
median of predicted ÷ measured − 1 (negative: too fast), and the factor that half of the kernels stay within. The second
table compares the rule with others, whole chips left out: geometric means over GPUs and kinds. A line after it has the
same means where only the GPU itself is left out and another board has its multiprocessors. The third table has the
lowest and the highest part of the peak that a training step (`STEP`) reaches, with these kernels and by the bare
roofline, and the 90 % intervals of its time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from sim.core.operator_kinds import shape_flops
from sim.core.program import Compute, Phase
from sim.inputs.nearest_gpu import measured_gpus, nearest_measured
from sim.inputs.scenario import parse_scenario
from sim.prices.coefficients import PriceOptions
from sim.prices.kernel_file import TableName, kernel_file
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_bytes
from sim.simulation import simulate
from topology.presets import GPUS

BURSTS = PriceOptions(power=False, host=False)  # the kernels were timed in short bursts
KINDS = {
    "matmul bf16": ("gemm", "bf16"),
    "fp8": ("gemm", "fp8"),
    "attention": ("attention_forward", "bf16"),
    "decode": ("attention_decode", "bf16"),
    "experts bf16": ("moe_layer", "bf16"),
    "experts fp8": ("moe_layer", "fp8"),
}
LEAST_S, MOST = 20e-6, 300
STEP = {
    "name": "step",
    "model": "llama3-8b",
    "training": {"seq_len": 4096, "global_batch_size": 32, "framework": "megatron"},
    "parallelism": {"dp": 8, "zero": 1},
}
ENOUGH_BYTES = 1e12  # of memory, so that the step fits every GPU
Logs = NDArray[np.float64]


def log_errors(gpu: str, profile: str, kind: str) -> Logs | None:
    """Return log(predicted ÷ measured) of kernels of `gpu`, priced by `profile`; None where either has none."""
    if not has_table(gpu, kind) or (profile != "roofline" and not has_table(profile, kind)):
        return None
    return _log_errors(gpu, profile, kind)


@cache
def _log_errors(gpu: str, profile: str, kind: str) -> Logs:
    op, dtype = KINDS[kind]
    points, _ = kernel_file(load_profile(gpu).kernels).table(op, dtype)
    long = np.random.default_rng(3).permutation(np.flatnonzero(points.seconds > LEAST_S))[:MOST]
    costs, found = Costs(load_profile(profile), GPUS[gpu], BURSTS), []
    for i in long:
        shape = tuple(points.shapes[i].tolist())
        flops, moved = shape_flops(op, shape), shape_bytes(op, shape, dtype)
        kernel = Compute("x", op, shape, dtype, flops, moved, Phase.FORWARD, served=True)
        found.append(np.log(costs.compute(kernel).seconds / points.seconds[i]))
    return np.array(found)


def has_table(gpu: str, kind: str) -> bool:
    """Tell whether kernels of this kind were measured on a GPU."""
    return TableName(*KINDS[kind]) in kernel_file(load_profile(gpu).kernels).tables


def of_chip(gpu: str) -> list[str]:
    """Return the measured GPUs with the multiprocessors of `gpu`."""
    return [name for name in measured_gpus() if GPUS[name].same_multiprocessors(GPUS[gpu])]


def by_rule(gpu: str, kind: str) -> Logs | None:
    """Return the errors of the rule without any GPU of the chip."""
    return log_errors(gpu, nearest_measured(GPUS[gpu], of_chip(gpu)), kind)


def by_board(gpu: str, kind: str) -> Logs | None:
    """Return the errors of the rule without the GPU itself, if it finds another board with the same multiprocessors."""
    like = nearest_measured(GPUS[gpu], [gpu])
    return log_errors(gpu, like, kind) if like in of_chip(gpu) else None


def by_always(profile: str) -> Callable[[str, str], Logs | None]:
    """Return the errors of one GPU's efficiencies for all other chips."""
    return lambda gpu, kind: None if profile in of_chip(gpu) else log_errors(gpu, profile, kind)


def by_median(gpu: str, kind: str) -> Logs | None:
    """Return the errors of the median of one prediction for each other chip."""
    chips: dict[tuple[str, ...], list[Logs]] = {}
    for name in measured_gpus():
        logs = None if name in of_chip(gpu) else log_errors(gpu, name, kind)
        if logs is not None:
            chips.setdefault(tuple(of_chip(name)), []).append(logs)
    return np.median([np.mean(each, axis=0) for each in chips.values()], axis=0) if chips else None


def cell(logs: Logs | None) -> str:
    """Return the median error, and the error that half of the kernels stay within."""
    return "" if logs is None else f"{np.expm1(np.median(logs)):+.0%}, ×{np.exp(np.median(np.abs(logs))):.2f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"| GPU | priced by | same multiprocessors | {' | '.join(KINDS)} |\n|---|---|---|{'---:|' * len(KINDS)}")
    for gpu in measured_gpus():
        for left_out in ([gpu], [gpu, *of_chip(gpu)]):
            like = nearest_measured(GPUS[gpu], left_out)
            alike = "yes" if GPUS[like].same_multiprocessors(GPUS[gpu]) else "no"
            cells = " | ".join(cell(log_errors(gpu, like, kind)) for kind in KINDS)
            if alike == "yes" or left_out != [gpu]:
                print(f"| `{gpu}` | `{like}` | {alike} | {cells} |")
    rules = {
        "the rule": by_rule,
        "the median of the others": by_median,
        "the bare roofline": by_always("roofline"),
    }
    rules |= {f"always `{name}`": by_always(name) for name in measured_gpus()}
    print("\n| priced by | chips | median of a kind | half of the kernels within | nine in ten within |")
    print("|---|---:|---:|---:|---:|")
    for name, rule in rules.items():
        chips, factors = factors_of(rule)
        print(f"| {name} | {chips} | {' | '.join(f'×{factor:.2f}' for factor in factors)} |")
    _, factors = factors_of(by_board)
    print(f"\nBy another board: {', '.join(f'×{factor:.2f}' for factor in factors)}")
    print_steps()


def factors_of(rule: Callable[[str, str], Logs | None]) -> tuple[int, tuple[float, ...]]:
    """Return the number of predicted chips, and geometric means over GPUs and kinds of three factors: of the median
    error, and within which half of the kernels and nine in ten of them are."""
    found = [(gpu, logs) for gpu in measured_gpus() for kind in KINDS if (logs := rule(gpu, kind)) is not None]
    rows = [(abs(np.median(logs)), *np.percentile(np.abs(logs), (50, 90))) for _, logs in found]
    return len({tuple(of_chip(gpu)) for gpu, _ in found}), tuple(np.exp(np.mean(rows, axis=0)).tolist())


def print_steps() -> None:
    """Print the third table."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for gpu in GPUS.values():
        if gpu.chip.is_host or "bf16" not in gpu.peak_flops_per_s or gpu.variant_of:
            continue
        scenario = {**STEP, "cluster": {"gpu": {"preset": gpu.name, "memory_bytes": ENOUGH_BYTES}}}
        read = parse_scenario(scenario)
        like = GPUS[load_profile(read.calibration).reference]
        same = "the same multiprocessors" if gpu.same_multiprocessors(like) else "another chip"
        result = simulate(read).result
        low, high = (each / result["step_time_s"] - 1.0 for each in result["step_time_interval_s"])
        bare = simulate(parse_scenario({**scenario, "calibration": "roofline"})).result["mfu"]
        key = "its own kernels" if gpu is GPUS[like.name] else same
        found.setdefault(key, []).append((result["mfu"], bare, low, high))
    print("\n| priced by | GPUs | of the peak | by the roofline | interval's begin | its end |")
    print("|---|---:|---:|---:|---:|---:|")
    for key, rows in found.items():
        columns = list(zip(*rows, strict=True))
        parts = [f"{min(c):.0%} to {max(c):.0%}" for c in columns[:2]]
        ends = [f"{min(c):+.0%} to {max(c):+.0%}" for c in columns[2:]]
        print(f"| {key} | {len(rows)} | {' | '.join([*parts, *ends])} |")


if __name__ == "__main__":
    main()
