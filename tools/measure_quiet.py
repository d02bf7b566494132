"""Runs and stores all timed measurements that need a quiet machine.

    python tools/measure_quiet.py [--list] [--only NAME …] [--again] [--attempts 3] [--quick] [--budget 35]
                                  [--folder FOLDER]

The measurements, in this order: `calibrate.run` of this machine (machine.json), every scenario of scenarios/cpu and
scenarios/cpu4 as a real run, the sleeping stages on four and eight ranks, and the bundled serving engine. Runs and
machine.json are stored in scenarios/measured only if other processes used almost no cores; those that were never quiet
are listed at the end. Stored files are measured again only with `--again`. Then each step is predicted by the
calibration between its steps and by machine.json. `sim.regress --update` accepts the errors and prints them: check them
before you commit.

Exit codes: 0 all stored, 1 a measurement was never quiet or failed, 2 a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sim.inputs.measured_run import QUIET_CORES, load_measured  # noqa: E402
from sim.prices.profiles import load_profile  # noqa: E402
from sim.studies.regression import MACHINE  # noqa: E402

MOST_BYTES = 600_000  # limit for a stored run
APART = {  # measurements that are no training steps, by output; they are stored beside the folder of steps
    "schedules/sleeping": ("-m", "calibrate.schedule_replay", "--ranks", "4", "--ranks", "8", "--json", "OUT"),
    "serving/serve_cpu": ("-m", "calibrate.serving.measure", "scenarios/serve_cpu.yaml", "--out", "OUT"),
}


def scenarios() -> dict[str, Path]:
    """Return name and file of each scenario that is run for real."""
    folders = (ROOT / "scenarios" / "cpu", ROOT / "scenarios" / "cpu4")
    return {p.stem: p for folder in folders for p in sorted(folder.glob("*.yaml"))}


def python(*words: str) -> int:
    """Run this Python in the project's folder and return its exit code."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


def measure(scenario: Path, out: Path, attempts: int, budget: float) -> str | None:
    """Measure until a run was quiet; return why none is stored, or None."""
    trial, why = out.with_suffix(".try"), ""
    try:
        for _ in range(attempts):
            options = ("--out", str(trial), "--budget", str(budget))
            if python("-m", "calibrate.measure", str(scenario), *options):
                return "calibrate.measure failed"
            run = load_measured(trial)
            if not run.quiet:
                why = f"never quiet: other processes used {run.others_cores:.2g} cores"
                continue
            if trial.stat().st_size > MOST_BYTES:
                return f"is larger than {MOST_BYTES} bytes"
            os.replace(trial, out)
            return None
    finally:
        trial.unlink(missing_ok=True)
    return why


def calibrate(out: Path, attempts: int, quick: bool) -> str | None:
    """Calibrate this machine until it was quiet; return why nothing is stored, or None."""
    trial, others = out.with_suffix(".try"), 0.0
    try:
        for _ in range(attempts):
            if python("-m", "calibrate.run", "--device", "cpu", "--out", str(trial), *(["--quick"] if quick else [])):
                return "calibrate.run failed"
            others = float(load_profile(str(trial)).settings["busy_cores_meanwhile"])
            if others <= QUIET_CORES:
                os.replace(trial, out)
                return None
    finally:
        trial.unlink(missing_ok=True)
    return f"never quiet: other processes used {others:.2g} cores"


def main() -> None:
    """Measure what is missing, then accept the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also measure what is stored")
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="run fewer micro-benchmarks: one minute instead of several"
    )
    parser.add_argument("--budget", type=float, default=35.0, metavar="SECONDS")
    parser.add_argument("--folder", type=Path, default=ROOT / "scenarios" / "measured")
    args = parser.parse_args()
    runs, machine = scenarios(), MACHINE.removesuffix(".json")
    every = [machine, *runs, *APART]
    unknown = sorted(set(args.only or ()) - set(every))
    if unknown:
        parser.error(f"--only: found {', '.join(unknown)}; allowed: {', '.join(every)}")
    folder = args.folder.resolve()
    missing = [n for n in args.only or every if args.again or not (folder / f"{n}.json").exists()]
    if args.list:
        print("\n".join(missing))
        return
    failed = {}
    for name in missing:
        out = folder / f"{name}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        if name in runs:
            failed[name] = measure(runs[name], out, args.attempts, args.budget)
            continue
        if name == machine:
            failed[name] = calibrate(out, args.attempts, args.quick)
            continue
        words = APART[name]
        code = python(*(str(out) if w == "OUT" else w for w in words))
        failed[name] = f"ended with exit code {code}" if code else None
    failed = {name: why for name, why in failed.items() if why}
    if any((folder / f"{name}.json").exists() for name in runs):
        python("-m", "sim.regress", str(folder), "--update")
    print(json.dumps({"not stored": failed}, indent=1))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
