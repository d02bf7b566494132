"""Runs training steps of Hugging Face models on a GPU, and compares them with their captured programs.

    python tools/gpu_programs.py measure TABLE.json [--folder FOLDER] [--seconds S] [--only ID …]    (a CUDA GPU)
    python tools/gpu_programs.py show [--folder FOLDER]

`measure` runs the rows of a table, as `calibrate.capture --table` reads them, with random tokens. FOLDER then has the
same table with `measured` (`table.json`: step time, peak memory), the conditions of each run (power, clock), and
`operators.json.gz`: device seconds of a step by ATen operator with input shapes, and by kernel, as torch's profiler saw
them. A row's `program.float8` names a recipe of torchao, which converts every linear layer but the output. A row that
fails gets `failed`; the others still run.

`show` prices the programs that `calibrate.capture --table FOLDER/table.json --out FOLDER/programs` wrote, and prints
device seconds without matmuls, whose speed depends on the data, and peak memory. Of the stored folder,
scenarios/measured/gpu_programs, it writes the table into docs/programs_checked.md.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STORED = ROOT / "scenarios" / "measured" / "gpu_programs"
PAGE = ROOT / "docs" / "programs_checked.md"
BEGIN, END = "<!-- h100 programs: begin -->", "<!-- h100 programs: end -->"
TABLE, OPERATORS, PROGRAMS = "table.json", "operators.json.gz", "programs"
SAMPLE_S, REST_S, FIRST_S = 0.02, 0.5, 1.0
WARM_UP, PROFILED = 3, 2  # steps
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "grouped_mm", "_grouped_mm")


class Watch:
    """Samples power in W and multiprocessor clock in MHz of GPU 0 until it is stopped."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._samples: list[tuple[float, float, float]] = []  # time, W, MHz
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            power = self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3
            clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self._samples.append((time.perf_counter(), power, clock))

    def stop(self, since: float) -> dict[str, float]:
        """Stop and return the means since a time."""
        self._stop.set()
        self._thread.join()
        rows = [s[1:] for s in self._samples if s[0] >= since]
        if not rows:
            return {}
        power, clock = (round(statistics.fmean(column), 1) for column in zip(*rows, strict=True))
        return {"power_w": power, "clock_mhz": clock}


class Training:
    """A model of a table's row on the GPU."""

    def __init__(self, row: dict[str, Any], where: str) -> None:
        import torch
        from msgspec.structs import replace

        from calibrate.capture.huggingface_step import huggingface_maker
        from calibrate.capture.what import options_of_row

        config, options = options_of_row(row, where)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.wanted = huggingface_maker(config, replace(options, random_values=True))()
        if recipe := row["program"].get("float8"):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                self.wanted.model,
                config=Float8LinearConfig.from_recipe_name(recipe),
                module_filter_fn=lambda _, name: "lm_head" not in name,
            )
        if options.compiled:
            self.wanted.model.compile()
        training = row["scenario"]["training"]
        self.micro_batches = training["global_batch_size"] // training.get("micro_batch_size", 1)

    def step(self) -> None:
        """Issue one step."""
        import torch

        from calibrate.capture.run_step import autocast_of, gradients_of

        step = self.wanted
        step.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_batches):
            with torch.device("cuda"), autocast_of(step, "cuda"), gradients_of(step):
                loss = step.loss()
            loss.backward()
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
        step.optimizer.step()


def measured(training: Training, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run steps and return what was measured, and the conditions."""
    import torch

    for _ in range(WARM_UP):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    time.sleep(REST_S)
    watch = Watch()
    begin = time.perf_counter()
    ends: list[float] = []
    waiting: list[torch.cuda.Event] = []
    while time.perf_counter() - begin < seconds or len(ends) < 4:
        training.step()
        waiting.append(torch.cuda.Event())
        waiting[-1].record()
        if len(waiting) > 1:  # the host is at most one step ahead
            waiting.pop(0).synchronize()
            ends.append(time.perf_counter())
    # The last step is left out: nothing was issued behind it, so it ends sooner after its predecessor.
    half = len(ends) // 2
    conditions = watch.stop(ends[half])
    torch.cuda.synchronize()
    first = [b - a for a, b in zip([begin, *ends], ends, strict=False) if b - begin <= FIRST_S] or [ends[0] - begin]
    step_s = (ends[-1] - ends[half]) / (len(ends) - 1 - half)
    found = {"step_time_s": step_s, "peak_memory_bytes": torch.cuda.max_memory_allocated()}
    return found, {"steps": len(ends) + 1, "first_steps_s": statistics.fmean(first), **conditions}


def profiled(training: Training) -> dict[str, Any]:
    """Return device seconds of a step by operator and by kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as seen:
        for _ in range(PROFILED):
            training.step()
        torch.cuda.synchronize()
    on_host, on_device = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    operators = [
        {
            "name": e.key,
            "shapes": e.input_shapes,
            "count": e.count / PROFILED,
            "seconds": e.self_device_time_total * 1e-6 / PROFILED,
        }
        for e in seen.key_averages(group_by_input_shape=True)
        if e.self_device_time_total > 0 and e.device_type == on_host
    ]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for e in seen.events():
        if e.device_type == on_device:
            kernels[e.name][0] += 1 / PROFILED
            kernels[e.name][1] += e.self_device_time_total * 1e-6 / PROFILED
    named = [{"name": k[:160], "count": n, "seconds": s} for k, (n, s) in kernels.items() if s > 0]
    longest = [sorted(rows, key=lambda r: -r["seconds"]) for rows in (operators, named)]
    return {"operators": longest[0][:400], "kernels": longest[1][:200]}


def measure(table: Path, folder: Path, seconds: float, only: list[str]) -> int:
    """Measure all rows; write after each, so that an interruption loses one row."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    data = json.loads(table.read_text())
    data["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus_per_node": 1}
    data["software"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    operators: dict[str, Any] = {}
    for row in [r for r in data["rows"] if not only or r["id"] in only]:
        try:
            training = Training(row, f"{table}: {row['id']}")
            row["measured"], row["conditions"] = measured(training, row["program"].get("seconds", seconds))
            operators[row["id"]] = profiled(training)
            print(f"{row['id']:24} {row['measured']} {row['conditions']}", flush=True)
        except Exception as error:  # the other rows still run
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
            print(f"{row['id']:24} {row['failed']}", flush=True)
        done.append(row)
        (folder / TABLE).write_text(json.dumps({**data, "rows": done}, indent=1) + "\n")
        (folder / OPERATORS).write_bytes(gzip.compress(json.dumps(operators).encode(), mtime=0))
        training = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def by_operator(folder: Path, row_id: str, prices: Any) -> tuple[Counter[str], Counter[str]]:
    """Return measured and predicted device seconds of a row by operator, without torch's namespace."""
    from sim.inputs.program_file import read_program

    seen = json.loads(gzip.decompress((folder / OPERATORS).read_bytes()))[row_id]["operators"]
    real: Counter[str] = Counter()
    for o in seen:
        if o["name"].startswith("aten::"):  # the others are the profiler's own
            real[o["name"].removeprefix("aten::")] += o["seconds"]
    predicted: Counter[str] = Counter()
    for op in read_program(folder / PROGRAMS / f"{row_id}.json.gz").operators:
        if op.launches:
            predicted[op.name.partition(".")[2]] += prices.operator(op)[0]
    return real, predicted


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
            for found in by_operator(folder, row.id, prices)
        ]
        (real, real_products), (own, products) = sums
        peak = captured_step(row, None, folder / PROGRAMS / f"{row.id}.json.gz").outcome.peak_memory_bytes
        lines.append(
            f"| {row.id} | {real * 1e3:.1f} ms | {own * 1e3:.1f} ms | {(own / real - 1) * 100:+.1f}% "
            f"| {real_products * 1e3:.1f} ms | {products * 1e3:.1f} ms "
            f"| {(peak / row.measured['peak_memory_bytes'] - 1) * 100:+.1f}% |"
        )
    return lines


def with_table(text: str, lines: list[str]) -> str:
    """Return the page's text with the table."""
    before, _, rest = text.partition(BEGIN)
    return "\n".join((before + BEGIN, *lines, END)) + rest.partition(END)[2]


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    words = commands.add_parser("measure", help="run the rows of a table on a GPU")
    words.add_argument("table", type=Path)
    words.add_argument("--seconds", type=float, default=5.0)
    words.add_argument("--only", nargs="*", default=[])
    for each in (words, commands.add_parser("show", help="compare a measured folder with its programs")):
        each.add_argument("--folder", type=Path, default=STORED)
    options = parser.parse_args()
    if options.command == "measure":
        return measure(options.table, options.folder, options.seconds, options.only)
    lines = show(options.folder)
    print("\n".join(lines))
    if options.folder == STORED:
        PAGE.write_text(with_table(PAGE.read_text(), lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
