"""Times how long the host takes to issue a training step of Hugging Face models, where nothing waits for the GPU.

    python tools/gpu_host.py measure TABLE.json --out FILE.json [--only ID …]    (a CUDA GPU)
    python tools/gpu_host.py show [FILE.json]

`measure` runs the rows of a table as `tools/gpu_programs.py measure` does, but with one sequence of 64 tokens, or one
image or sound. FILE has, for each row, the medians of 12 steps: seconds of forward, backward, clipping and optimizer,
and of the wait for the GPU after them. `show` divides forward and backward by the operators that launch kernels in the
captured programs of scenarios/measured/gpu_programs_h200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

STORED = ROOT / "scenarios" / "measured" / "gpu_kernels" / "h200_host.json"
PROGRAMS = ROOT / "scenarios" / "measured" / "gpu_programs_h200" / "programs"
SMALL = {"seq_len": 64, "micro_batch_size": 1, "global_batch_size": 1}
COLUMNS = ("forward", "backward", "clipping", "optimizer", "wait for the GPU at the end")
WARM_UP, STEPS = 3, 12


def measure(table: Path, out: Path, only: list[str]) -> int:
    """Measure rows; write after each."""
    import torch
    from gpu_training import Training

    from calibrate.capture.run_step import autocast_of, gradients_of

    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    facts = {"hardware": torch.cuda.get_device_name(), "software": f"torch {torch.__version__}"}
    rows: dict[str, list[float]] = {}
    for row in json.loads(table.read_text())["rows"]:
        if only and row["id"] not in only:
            continue
        row["scenario"]["training"], row["program"]["torch_compile"] = dict(SMALL), False
        training = Training(row, f"{table}: {row['id']}")
        step = training.wanted
        found = []
        for _ in range(WARM_UP + STEPS):
            torch.cuda.synchronize()
            times = [time.perf_counter()]
            step.optimizer.zero_grad(set_to_none=True)
            with torch.device("cuda"), autocast_of(step, "cuda"), gradients_of(step):
                loss = step.loss()
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            if step.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
            times.append(time.perf_counter())
            step.optimizer.step()
            times.append(time.perf_counter())
            torch.cuda.synchronize()
            times.append(time.perf_counter())
            found.append([b - a for a, b in pairwise(times)])
        rows[row["id"]] = [statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)]
        out.write_text(json.dumps({**facts, "columns": COLUMNS, "rows": rows}, indent=1) + "\n")
    return 0


def show(path: Path) -> list[str]:
    """Return microseconds for each operator that launches kernels, forward and backward, and their medians."""
    from sim.inputs.program_file import read_program

    lines, each = [], ([], [])  # type: tuple[list[str], tuple[list[float], list[float]]]
    for name, seconds in json.loads(path.read_text())["rows"].items():
        program = read_program(PROGRAMS / f"{name}.json.gz")
        launching = Counter(op.phase for op in program.operators if op.launches)
        counts = launching["forward"], launching["backward"] + launching["recomputed"]
        found = [1e6 * s / n for s, n in zip(seconds[:2], counts, strict=True)]
        for column, value in zip(each, found, strict=True):
            column.append(value)
        lines.append(f"{name:28} forward {found[0]:5.1f} us, backward {found[1]:5.1f} us")
    medians = [statistics.median(column) for column in each]
    return [*lines, f"{'median':28} forward {medians[0]:5.1f} us, backward {medians[1]:5.1f} us"]


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    words = commands.add_parser("measure", help="run the rows of a table on a GPU")
    words.add_argument("table", type=Path)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--only", nargs="*", default=[])
    shows = commands.add_parser("show", help="print microseconds for each operator")
    shows.add_argument("file", type=Path, nargs="?", default=STORED)
    options = parser.parse_args()
    if options.command == "measure":
        return measure(options.table, options.out, options.only)
    print("\n".join(show(options.file)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
