"""Put each fault of `planted_faults.yaml` into a copy of the code, and list the test that notices it.

    python tools/plant_faults.py [--only WORD] [--lane quick|whole] [--workers 2]

A copy is tested by the tests of the fault's own package first, then by closed forms, then by the whole lane; the first
failure ends it.
Prints a row for each fault, and how many the lane caught. Exit code 1 if the quick lane misses more than three, or the
whole misses one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("planted_faults.yaml")
LANES = {"quick": "not slow", "whole": "slow or not slow"}
MAY_MISS = {"quick": 3, "whole": 0}
COPIED = ("sim", "topology", "calibrate", "tests", "tools", "benchmarks", "scenarios", "docs", "README.md")
COPIED += ("pyproject.toml", "setup.py", "mkdocs.yml")


class Caught(NamedTuple):
    """The first test that failed, None if none did, and the seconds until then."""

    test: str | None
    seconds: float


def plant(fault: dict[str, str], checkout: Path) -> None:
    """Change a checkout's file.

    Raises:
        SystemExit: if the text does not stand in the file exactly once.
    """
    path = checkout / fault["file"]
    text = path.read_text("utf-8")
    if text.count(fault["find"]) != 1:
        raise SystemExit(
            f"{FAULTS.name}: {fault['fault']}: {fault['file']} has the text {text.count(fault['find'])} times"
        )
    path.write_text(text.replace(fault["find"], fault["put"]), "utf-8")


def near(file: str) -> str | None:
    """The folder of tests that mirrors a file's package, if there is one."""
    for folder in Path("tests", file).parents:
        if (ROOT / folder).is_dir() and folder not in (Path("tests"), Path("tests/sim"), Path(".")):
            return str(folder)
    return None


def caught(fault: dict[str, str], lane: str, workers: int) -> Caught:
    """Test a copy that has the fault."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        checkout = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        plant(fault, checkout)
        start = time.monotonic()
        own = near(fault["file"])
        for where in [*([own] if own else []), "tests/closed_forms", "tests"]:
            command = [sys.executable, "-B", "-m", "pytest", where, "-x", "-m", LANES[lane], "-n", str(workers), "-rf"]
            variables = {**os.environ, "PYTHONPATH": folder}
            done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            if failed:
                return Caught(failed[0].split(" ")[1], time.monotonic() - start)
            if done.returncode not in (0, 5):
                raise SystemExit(f"{fault['fault']}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return Caught(None, time.monotonic() - start)


def main() -> int:
    """Print the table; its rows appear as they are found."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", help="faults whose text or file has this word")
    parser.add_argument("--lane", choices=LANES, default="quick")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    faults = [f for f in yaml.safe_load(FAULTS.read_text("utf-8")) if asked.only in f["fault"] + f["file"]]
    missed = 0
    print("| fault | file | caught by | s |\n|---|---|---|---|")
    for fault in faults:
        found = caught(fault, asked.lane, asked.workers)
        missed += found.test is None
        row = [
            fault["fault"],
            f"`{fault['file']}`",
            f"`{found.test}`" if found.test else "nothing",
            f"{found.seconds:.0f}",
        ]
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{len(faults) - missed} of {len(faults)} caught by the {asked.lane} lane")
    return int(missed > MAY_MISS[asked.lane])


if __name__ == "__main__":
    sys.exit(main())
