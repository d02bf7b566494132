"""Runs training steps of Hugging Face models on a GPU, and compares them with their captured programs.

    python tools/gpu_programs.py measure TABLE.json [--folder FOLDER] [--seconds S] [--only ID …]    (a CUDA GPU)
    python tools/gpu_programs.py show [--folder FOLDER]
    python tools/gpu_programs.py steps
    python tools/gpu_programs.py operators ID [--folder FOLDER]
    python tools/gpu_programs.py compiled [--folder FOLDER]

`measure` runs the rows of a table, as `calibrate.capture --table` reads them, with random tokens. FOLDER then has the
same table with `measured` (`table.json`: step time, peak memory), the conditions of each run (power, clock), and
`operators.json.gz`: device seconds of a step by ATen operator with input shapes, and by kernel, as torch's profiler saw
them. A row's `program.float8` names a recipe of torchao, which converts every linear layer but the output. A row that
fails gets `failed`; the others still run.

`show` prices the programs that `calibrate.capture --table FOLDER/table.json --out FOLDER/programs` wrote, and prints
device seconds without matmuls, whose speed depends on the data, and peak memory. Of the stored folder,
scenarios/measured/gpu_programs, it writes the table into docs/programs_checked.md. `steps` does so for the steps of
scenarios/measured/gpu_programs_h200, whose rows say what was predicted before they ran. `operators` prints measured and
predicted seconds of one row's operators, the largest differences first, and what its matmuls reached. `compiled` prints
the kernels of the rows that a compiler changed: matmuls, attention, optimizer and the others, and the generated kernels
as measured and as captured, with the bytes that they move.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from gpu_training import OPERATORS, TABLE, measure  # noqa: E402
from page_tables import with_table  # noqa: E402

STORED = ROOT / "scenarios" / "measured" / "gpu_programs"
PAGE = ROOT / "docs" / "programs_checked.md"
ON_PAGE, STEPS_ON_PAGE = "h100 programs", "h200 steps"  # the tables' names there
PREDICTED_BEFORE = ROOT / "scenarios" / "measured" / "gpu_programs_h200"
PROGRAMS = "programs"  # folder of captured programs beside a measured table
RANGES = "ranges"  # of the profiler, not kernels
KERNELS = {
    RANGES: ("Torch-Compiled", "Optimizer.step", "## Call", "CompiledFunction", "aten::"),
    "matmuls": ("nvjet", "gemm", "cutlass"),
    "attention": ("sdpa", "cudnn::fusion"),
    "optimizer and clipping": ("multi_tensor_apply", "lpnorm"),
}
# Operators whose kernels the profiler shows under the name of another operator that they call.
CALLED = {
    "_to_copy": "copy_",
    "clone": "copy_",
    "convolution": "cudnn_convolution",
    "relu": "clamp_min",
    "_scaled_dot_product_cudnn_attention": "_cudnn_attention_forward",
    "_scaled_dot_product_cudnn_attention_backward": "_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention": "_efficient_attention_forward",
    "_scaled_dot_product_efficient_attention_backward": "_efficient_attention_backward",
    "_scaled_dot_product_flash_attention": "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_backward": "_flash_attention_backward",
}
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "grouped_mm", "_grouped_mm")


def by_operator(folder: Path, row_id: str, prices: Any, micro_batches: int) -> tuple[Counter[str], Counter[str]]:
    """Return measured and predicted device seconds of a row by operator, without torch's namespace."""
    from sim.inputs.program_file import read_program

    real: Counter[str] = Counter()
    for o in seen(folder, row_id):
        if o["name"].startswith("aten::"):  # the others are the profiler's own
            real[o["name"].removeprefix("aten::")] += o["seconds"]
    predicted: Counter[str] = Counter()
    for op in read_program(folder / PROGRAMS / f"{row_id}.json.gz").operators:
        if op.launches:
            name = op.name.partition(".")[2]
            times = 1 if op.phase in ("clip", "optimizer") else micro_batches
            predicted[CALLED.get(name, name)] += times * prices.operator(op)[0]
    return real, predicted


def micro_batches_of(row: Any) -> int:
    """Return how many micro-batches a row's step has."""
    training = row.scenario["training"]
    return int(training["global_batch_size"]) // int(training.get("micro_batch_size", 1))


def show(folder: Path) -> list[str]:
    """Return the Markdown table of the rows that ran without a compiler, whose kernels have operators."""
    from sim.traces.program_prices import ProgramPrices
    from sim.validation.program_rows import captured_step
    from sim.validation.tables import read_table
    from topology.presets import CLUSTERS

    table = read_table(folder / TABLE)
    lines = [
        "| program | without matmuls, measured | predicted | error | matmuls, measured | predicted | peak memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.rows:
        if row.data["program"].get("torch_compile"):
            continue
        prices = ProgramPrices(CLUSTERS[row.scenario["cluster"]], row.scenario["calibration"])
        sums = [
            (sum(s for name, s in found.items() if name not in MATMULS), sum(found[name] for name in MATMULS))
            for found in by_operator(folder, row.id, prices, micro_batches_of(row))
        ]
        (real, real_products), (own, products) = sums
        peak = captured_step(row, None, folder / PROGRAMS / f"{row.id}.json.gz").outcome.peak_memory_bytes
        lines.append(
            f"| {row.id} | {real * 1e3:.1f} ms | {own * 1e3:.1f} ms | {(own / real - 1) * 100:+.1f}% "
            f"| {real_products * 1e3:.1f} ms | {products * 1e3:.1f} ms "
            f"| {(peak / row.measured['peak_memory_bytes'] - 1) * 100:+.1f}% |"
        )
    return lines


def steps(folder: Path) -> list[str]:
    """Return the Markdown table of steps and peaks: measured, predicted before the measurement, and predicted now."""
    from sim.validation.program_rows import captured_step
    from sim.validation.tables import read_table

    lines = [
        "| program | step, measured | predicted before | error | predicted now | error | peak memory, before | now |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    errors: dict[str, list[float]] = defaultdict(list)
    for row in read_table(folder / TABLE).rows:
        before, real = row.data["predicted_before"], row.measured
        now = captured_step(row, None, folder / PROGRAMS / f"{row.id}.json.gz")
        step_s, peak = real["step_time_s"], real["peak_memory_bytes"]
        found = {
            "before": before["step_time_s"] / step_s - 1,
            "now": now.step_time_s / step_s - 1,
            "peak before": before["peak_memory_bytes"] / peak - 1,
            "peak now": now.outcome.peak_memory_bytes / peak - 1,
        }
        for name, error in found.items():
            errors[name].append(abs(error))
        lines.append(
            f"| {row.id} | {step_s * 1e3:.1f} ms | {before['step_time_s'] * 1e3:.1f} ms | {found['before']:+.1%} "
            f"| {now.step_time_s * 1e3:.1f} ms | {found['now']:+.1%} "
            f"| {found['peak before']:+.1%} | {found['peak now']:+.1%} |"
        )
    for word, summary in (("mean", statistics.fmean), ("median", statistics.median)):
        shown = {name: f"{summary(each):.1%}" for name, each in errors.items()}
        lines.append(
            f"| {word} of the absolute errors | | | {shown['before']} | | {shown['now']} "
            f"| {shown['peak before']} | {shown['peak now']} |"
        )
    return lines


def operators(folder: Path, row_id: str) -> list[str]:
    """Return a row's operators, measured and predicted, in the order of their difference."""
    from sim.traces.program_prices import ProgramPrices
    from sim.validation.tables import read_table
    from topology.presets import CLUSTERS

    row = next((r for r in read_table(folder / TABLE).rows if r.id == row_id), None)
    if row is None or not (folder / PROGRAMS / f"{row_id}.json.gz").exists():
        raise SystemExit(f"error: ID: found {row_id!r}; {folder} has no captured program of it")
    prices = ProgramPrices(CLUSTERS[row.scenario["cluster"]], row.scenario["calibration"])
    real, own = by_operator(folder, row_id, prices, micro_batches_of(row))
    names = sorted(real | own, key=lambda n: -abs(own[n] - real[n]))
    products = [o for o in seen(folder, row_id) if o["name"] == "aten::mm"]
    flops = sum(2.0 * o["count"] * _multiplied(o["shapes"]) for o in products)
    rate = flops / sum(o["seconds"] for o in products) if products else 0.0
    conditions = row.data.get("conditions", {})
    measured_at = f"{conditions.get('power_w')} W, {conditions.get('clock_mhz')} MHz"
    return [
        f"matmuls of two matrices: {rate / 1e12:.0f} TFLOP/s; the step: {measured_at}",
        *(f"{n:48} measured {real[n] * 1e3:8.2f} ms, predicted {own[n] * 1e3:8.2f} ms" for n in names[:20]),
    ]


def _multiplied(shapes: list[list[int]]) -> float:
    (m, k), (_, n) = shapes[:2]
    return float(m) * k * n


def seen(folder: Path, row_id: str, what: str = "operators") -> list[dict[str, Any]]:
    """Return what torch's profiler saw of a row: its operators, or its kernels."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress((folder / OPERATORS).read_bytes()))[row_id][what]
    return found


def compiled(folder: Path) -> list[str]:
    """Return the seconds of kernels of the rows that torch.compile changed, by what they do."""
    from sim.validation.tables import read_table

    lines = []
    for row in read_table(folder / TABLE).rows:
        if not row.data["program"].get("torch_compile"):
            continue
        sums: Counter[str] = Counter()
        for kernel in seen(folder, row.id, "kernels"):
            kind = next((kind for kind, words in KERNELS.items() if any(w in kernel["name"] for w in words)), "others")
            sums[kind] += kernel["seconds"]
        shown = ", ".join(f"{kind} {sums[kind] * 1e3:.1f} ms" for kind in (*KERNELS, "others") if kind != RANGES)
        lines += [f"{row.id}: {shown}", *_generated(folder, row)]
    return lines


def _generated(folder: Path, row: Any) -> list[str]:
    """Return a row's generated kernels, the longest first: as measured, and as captured with their bytes."""
    from sim.inputs.program_file import read_program
    from sim.models.captured.operators import compute_of
    from sim.traces.program_prices import ProgramPrices
    from topology.presets import CLUSTERS

    real = [k for k in seen(folder, row.id, "kernels") if k["name"].startswith("triton")]
    lines = [
        f"  measured {k['count']:5.0f} x {k['seconds'] / k['count'] * 1e6:7.1f} us  {k['name'][:90]}" for k in real[:16]
    ]
    file = folder / PROGRAMS / f"{row.id}.json.gz"
    if not file.exists():
        return lines
    prices = ProgramPrices(CLUSTERS[row.scenario["cluster"]], row.scenario["calibration"])
    own: Counter[tuple[str, str, float, float]] = Counter()
    for op in read_program(file).operators:
        if op.name.startswith("inductor."):
            own[op.name, op.phase, compute_of(op).bytes, prices.operator(op)[0]] += 1
    longest = sorted(own.items(), key=lambda x: -x[0][-1] * x[1])[:16]
    return lines + [
        f"  captured {n:5} x {seconds * 1e6:7.1f} us  {moved / 1e6:7.1f} MB  {name}, {phase}"
        for (name, phase, moved, seconds), n in longest
    ]


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    words = commands.add_parser("measure", help="run the rows of a table on a GPU")
    words.add_argument("table", type=Path)
    words.add_argument("--seconds", type=float, default=5.0)
    words.add_argument("--only", nargs="*", default=[])
    of_row = commands.add_parser("operators", help="compare one row operator by operator")
    of_row.add_argument("id")
    commands.add_parser("steps", help="compare the steps that were predicted before they were measured")
    shows = commands.add_parser("show", help="compare a measured folder with its programs")
    for each in (words, of_row, shows, commands.add_parser("compiled", help="kernels of compiled rows")):
        each.add_argument("--folder", type=Path, default=STORED)
    options = parser.parse_args()
    if options.command == "measure":
        return measure(options.table, options.folder, options.seconds, options.only)
    if options.command == "operators":
        print("\n".join(operators(options.folder, options.id)))
        return 0
    if options.command == "steps":
        print("\n".join(lines := steps(PREDICTED_BEFORE)))
        PAGE.write_text(with_table(PAGE.read_text(), STEPS_ON_PAGE, "\n".join(lines)))
        return 0
    lines = compiled(options.folder) if options.command == "compiled" else show(options.folder)
    print("\n".join(lines))
    if options.command == "show" and options.folder == STORED:
        PAGE.write_text(with_table(PAGE.read_text(), ON_PAGE, "\n".join(lines)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
