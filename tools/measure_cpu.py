"""Measures the scenarios of scenarios/cpu, compares each with its simulation, and writes docs/real_runs.md's table.

    python tools/measure_cpu.py [NAME …] [--keep FOLDER | --stored FOLDER] [--budget SECONDS] [--attempts N]

Each scenario is measured until a run was quiet, at most `--attempts` times. If all runs were noisy, the least noisy one
counts and is marked. Rows of other scenarios do not change. `--keep` keeps the measured runs, and `--stored` compares
kept runs again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from page_tables import table_in, with_table

from sim.inputs.measured_run import QUIET_CORES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "real_runs.md"
TABLE = "measured"  # of the page
HEAD = """| scenario | step, measured | simulated | error | noise | pairs | bytes saved | peak memory | others, cores |
|---|---|---|---|---|---|---|---|---|"""


def run(command: list[str], allowed: tuple[int, ...]) -> None:
    """Run one of the project's commands; if it fails, end this one."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in allowed:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")


def compared(name: str, run_file: Path) -> dict[str, Any]:
    """Return the comparison of a measured run; `foreign` has the cores that other processes used."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "compare.json"
        run(["sim.compare", f"scenarios/cpu/{name}.yaml", str(run_file), "--json", str(report)], (0, 1))
        found: dict[str, Any] = json.loads(report.read_text())
    return found | {"foreign": max(json.loads(run_file.read_text())["foreign_cores"])}


def measured(name: str, folder: Path, budget: float, attempts: int) -> dict[str, Any]:
    """Measure a scenario and return the comparison of the least noisy run."""
    best: dict[str, Any] = {}
    for i in range(attempts):
        out = folder / f"{name}.try.json"
        run(["calibrate.measure", f"scenarios/cpu/{name}.yaml", "--out", str(out), "--budget", str(budget)], (0,))
        found = compared(name, out)
        print(f"{name} {i}: {found['step_time_s']['error']:+.1%}, others {found['foreign']:.2f}", flush=True)
        if not best or found["foreign"] < best["foreign"]:
            best = found
            out.replace(folder / f"{name}.json")
        if best["foreign"] <= QUIET_CORES:
            break
    (folder / f"{name}.try.json").unlink(missing_ok=True)
    return best


def row(name: str, r: dict[str, Any]) -> str:
    """Return one line of the table."""
    step, memory = r["step_time_s"], r["memory"]
    saved, peak = (
        max((m[k]["error"] for m in memory if k in m), key=abs) for k in ("saved_for_backward_bytes", "peak_bytes")
    )
    busy = f"{r['foreign']:.2f}" + ("" if r["foreign"] <= QUIET_CORES else " (not quiet)")
    return (
        f"| {name} | {step['measured'] * 1e3:.1f} ms | {step['simulated'] * 1e3:.1f} ms | {step['error']:+.1%} | "
        f"{r['noise']:.1%} | {r['steps']['count'] // 2} | {saved:+.1%} | {peak:+.1%} | {busy} |"
    )


def rewrite(rows: dict[str, str]) -> None:
    """Write rows into the page, in order of their names."""
    text = PAGE.read_text()
    old = {m[1]: m[0] for m in re.finditer(r"^\| (\w+) \| [\d.]+ ms .*$", table_in(text, TABLE), re.MULTILINE)}
    table = "\n".join([HEAD, *(line for _, line in sorted((old | rows).items()))])
    PAGE.write_text(with_table(text, TABLE, table))


def main() -> None:
    """Measure and compare scenarios, and write the page after each."""
    every = sorted(p.stem for p in (ROOT / "scenarios" / "cpu").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=every, metavar="NAME")
    parser.add_argument("--keep", type=Path, help="folder for the measured runs")
    parser.add_argument("--stored", type=Path, help="folder of measured runs to compare, instead of measuring")
    parser.add_argument("--budget", type=float, default=35.0)
    parser.add_argument("--attempts", type=int, default=3)
    args = parser.parse_args()
    if args.stored is not None:
        runs = {name: args.stored.resolve() / f"{name}.json" for name in args.names}
        rewrite({name: row(name, compared(name, path)) for name, path in runs.items() if path.is_file()})
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        for name in args.names:
            rewrite({name: row(name, measured(name, folder, args.budget, args.attempts))})


if __name__ == "__main__":
    main()
