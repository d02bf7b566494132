"""Compare the stored real runs on a GPU with their simulation, and write the table of docs/accuracy.md.

    python tools/gpu_table.py

Each is simulated three times: from the calibration taken between its steps, from what `calibrate.run` measured on that
machine beforehand (`scenarios/cuda/h200.json`), and from the shipped profile. Of ranks that shared one GPU the first
alone has a meaning.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
HEAD = """| scenario | ranks | step | own calibration | micro-benchmarks | shipped profile | saved | peak memory |
|---|---|---|---|---|---|---|---|"""
RUNS, PROFILES = "scenarios/measured/cuda", ("scenarios/cuda/h200.json", "h200-sxm")


def compared(name: str, *options: str) -> dict[str, Any]:
    """What `sim.compare` finds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "compare.json"
        command = ["sim.compare", f"scenarios/cuda/{name}.yaml", f"{RUNS}/{name}.json", "--json", str(report), *options]
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        found: dict[str, Any] = json.loads(report.read_text())
    return found


def row(name: str) -> str:
    """One line of the table."""
    ranks = len(json.loads((ROOT / RUNS / f"{name}.json").read_text())["memory"])
    own = compared(name)
    errors = [own["step_time_s"]["error"]]
    if ranks == 1:
        errors += [compared(name, "--calibration", p)["step_time_s"]["error"] for p in PROFILES]
    memory = [max((m[key]["error"] for m in own["memory"]), key=abs)
              for key in ("saved_for_backward_bytes", "peak_bytes")]  # fmt: skip
    shown = [f"{e:+.1%}" for e in errors] + [""] * (3 - len(errors)) + [f"{e:+.1%}" for e in memory]
    return f"| {name} | {ranks} | {own['step_time_s']['measured'] * 1e3:.1f} ms | {' | '.join(shown)} |"


def main() -> None:
    """The command."""
    names = sorted(p.stem for p in (ROOT / RUNS).glob("*.json") if p.stem != "expected")
    rows = sorted((row(name) for name in names), key=lambda r: r.split("|")[2])
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join((before + BEGIN, HEAD, *rows, END)) + after)


if __name__ == "__main__":
    main()
