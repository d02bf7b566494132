"""Captures small models and scripts, runs them for real on this machine's CPU, and compares.

    python tools/measure_programs.py --measure [--only NAME …] [--rounds 2] [--budget 6] [--quick] [--folder FOLDER]
    python tools/measure_programs.py [--folder FOLDER]

With `--measure` it captures every model and script of `tools/program_sources.py`, calibrates this machine
(`calibrate.run --cpu-seconds`), and measures all of them in rounds: models by `calibrate.measure --program`, scripts on
two gloo ranks. FOLDER then holds the programs, the calibration and `measured.json`. In both cases it predicts each step
from its program and the stored calibration, and prints a table. Two folders are stored: scenarios/measured/programs
(models, the default) and scenarios/measured/programs_two_ranks (scripts). For either,
docs/programs_checked.md gets the table of both. A measurement is stored with the cores that other processes used
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page_tables import with_table  # noqa: E402
from program_sources import FUNCTIONS, MICRO_BATCH_SIZE, MODELS, PARALLEL, SCRIPT, SEQ_LEN  # noqa: E402

from calibrate.launch import MALLOC  # noqa: E402
from calibrate.machine_load import Others  # noqa: E402
from sim.core.errors import InputError  # noqa: E402
from sim.inputs.scenario import parse_scenario  # noqa: E402
from sim.inputs.script_program import read_rank_program  # noqa: E402
from sim.prices.profiles import load_profile  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from sim.studies.regression import MACHINE  # noqa: E402
from sim.traces.program_in import program_recording  # noqa: E402
from sim.traces.program_prices import ProgramPrices  # noqa: E402
from sim.traces.replay import replay  # noqa: E402
from topology.presets import CLUSTERS  # noqa: E402

FOLDER, TWO_RANKS = (ROOT / "scenarios" / "measured" / name for name in ("programs", "programs_two_ranks"))
PAGE = ROOT / "docs" / "programs_checked.md"
TABLE = "measured"  # of the page
MEASURED = "measured.json"
RANKS = 2
WORKER = ROOT / "tests" / "real" / "counting_worker.py"
EVERY = (*MODELS, *FUNCTIONS, *PARALLEL)


def program_file(folder: Path, name: str) -> Path:
    """Return the file of a captured program."""
    return folder / (f"{name}.rank0.json.gz" if name in PARALLEL else f"{name}.json.gz")


def scenario_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the scenario of a captured model: one micro-batch on one core."""
    return {
        "version": 1,
        "name": name,
        "model": {"program": str(program_file(folder, name))},
        "training": {"global_batch_size": FUNCTIONS.get(name, MICRO_BATCH_SIZE)},
        "cluster": "cpu-host",
    }


def run(words: list[str], place: Path = ROOT, **environment: str) -> None:
    """Run this Python in a folder.

    Raises:
        SystemExit: if the command fails.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths} | environment
    done = subprocess.run([sys.executable, *words], cwd=place, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-3000:]}")


def sources(temporary: Path) -> dict[str, str]:
    """Write configs and scripts; return what `calibrate.capture` takes for each name."""
    found = {name: f"program_sources:{name}" for name in FUNCTIONS}
    for name, model in MODELS.items():
        path = temporary / f"{name}.json"
        path.write_text(json.dumps(model.config))
        found[name] = str(path)
    for name, parallel in PARALLEL.items():
        path = temporary / f"{name}.py"
        path.write_text(SCRIPT.replace("{parallel}", parallel))
        found[name] = str(path)
    return found


def capture(name: str, what: str, folder: Path) -> None:
    """Capture a model for a CPU, or rank 0 of a script."""
    place = ROOT
    if name in PARALLEL:
        place = Path(what).parent  # the program keeps the command, which should name no temporary folder
        options = ["--script", Path(what).name, "--world-size", str(RANKS), "--out", str(folder / name)]
    else:
        options = [what, "--device", "cpu", "--out", str(program_file(folder, name))]
    if name in MODELS:
        options += ["--seq-len", str(SEQ_LEN), "--micro-batch-size", str(MICRO_BATCH_SIZE)]
        options += ["--attention", MODELS[name].attention]
    run(["-m", "calibrate.capture", *options], place)


def measure_model(name: str, what: str, folder: Path, temporary: Path, budget: float) -> dict[str, Any]:
    """Return steps, peak and operators of a captured model that runs for real."""
    scenario, out = temporary / f"{name}.yaml", temporary / f"{name}.measured.json"
    scenario.write_text(json.dumps(scenario_of(folder, name)))  # JSON is YAML
    run(["-m", "calibrate.measure", str(scenario), "--program", what, "--budget", str(budget), "--out", str(out)])
    found = json.loads(out.read_text())
    return {
        "step_times_s": found["step_times_s"],
        "others_cores": max(found["foreign_cores"]),
        "peak_bytes": found["memory"][0]["allocated_peak_bytes"],
        "operators": found["operators"],
        "launches_beyond_captured": found["proof"]["launches_beyond_captured"],
        "environment": found["environment"],
    }


def measure_script(name: str, what: str, temporary: Path) -> dict[str, Any]:
    """Return steps and collectives of a script that two gloo ranks run for real."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-port=29513"]
    counted, timed = temporary / f"{name}.counted.json", temporary / f"{name}.timed.json"
    one = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **MALLOC}
    if not counted.exists():  # counting slows steps, so it has a run of its own
        run([*launcher, str(WORKER), str(counted), what], **one)
    others = Others()
    run([*launcher, str(WORKER), str(timed), what, "--time"], **one)
    return {
        "step_times_s": json.loads(timed.read_text())["steps_s"],
        "others_cores": others.cores(),
        "collectives": sorted(json.loads(counted.read_text())["collectives"]),
    }


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement with the steps of both; all else is of the new one."""
    together = {"step_times_s": [*old.get("step_times_s", ()), *new["step_times_s"]]}
    return {**new, **together, "others_cores": max(old.get("others_cores", 0.0), new["others_cores"])}


def measure(folder: Path, names: list[str], rounds: int, budget: float, quick: bool) -> None:
    """Capture, calibrate and measure; store after each measurement."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MEASURED
    before = json.loads(file.read_text()) if file.exists() else {}
    rows: dict[str, Any] = {name: row for name, row in before.items() if name not in names}
    with tempfile.TemporaryDirectory() as place:
        temporary = Path(place)
        what = sources(temporary)
        for name in names:
            if not program_file(folder, name).exists():
                capture(name, what[name], folder)
        if not (folder / MACHINE).exists():
            options = ["--device", "cpu", "--cpu-seconds", "--out", str(folder / MACHINE)]
            run(["-m", "calibrate.run", *options, *(["--quick"] if quick else [])])
            print("calibrated", flush=True)
        for _ in range(rounds):
            for name in names:
                found = (
                    measure_script(name, what[name], temporary)
                    if name in PARALLEL
                    else measure_model(name, what[name], folder, temporary, budget)
                )
                rows[name] = joined(rows.get(name, {}), found)
                file.write_text(json.dumps(rows, indent=1) + "\n")
                middle = statistics.median(found["step_times_s"])
                print(f"{name}: {middle * 1e3:.1f} ms, others {found['others_cores']:.2f} cores", flush=True)


def predicted(folder: Path, name: str) -> tuple[float, float, list[tuple[str, int]]]:
    """Return the predicted step in seconds, the peak in bytes (of a script: 0), and a script's collectives."""
    calibration = str(folder / MACHINE)
    if name in PARALLEL:
        rank = read_rank_program(program_file(folder, name))
        prices = ProgramPrices(CLUSTERS["cpu-host"], calibration)
        step_s = replay(program_recording([rank], prices), None).step_time_s
        return step_s, 0.0, sorted((c.kind, c.bytes) for c in rank.collectives)
    outcome = simulate(parse_scenario(scenario_of(folder, name)), load_profile(calibration)).outcome
    return outcome.step_time_s, outcome.peak_memory_bytes, []


def compared(folder: Path) -> list[dict[str, Any]]:
    """Return each stored measurement with its prediction; errors are predicted ÷ measured − 1."""
    stored = json.loads((folder / MEASURED).read_text())
    rows = []
    for name in (n for n in EVERY if n in stored):
        found = stored[name]
        step_s, peak, collectives = predicted(folder, name)
        middle = statistics.median(found["step_times_s"])
        real = [(kind, size) for kind, size in found.get("collectives", ())]
        rows.append(
            {
                "name": name,
                "script": name in PARALLEL,
                "measured_s": middle,
                "predicted_s": step_s,
                "error": step_s / middle - 1,
                "noise": statistics.median(abs(t - middle) for t in found["step_times_s"]) / middle,
                "steps": len(found["step_times_s"]),
                "others_cores": found["others_cores"],
                "peak_error": peak / found["peak_bytes"] - 1 if peak else None,
                "collectives": len(real),
                "collectives_equal": Counter(real) == Counter(collectives) if name in PARALLEL else None,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page's table."""
    lines = [
        "| what runs | measured | predicted | error | noise | steps | peak memory | collectives | others, cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        peak = "" if r["peak_error"] is None else f"{r['peak_error']:+.2%}"
        same = {True: f"{r['collectives']}, as captured", False: f"{r['collectives']}, DIFFERENT", None: ""}
        lines.append(
            f"| {r['name']} | {r['measured_s'] * 1e3:.1f} ms | {r['predicted_s'] * 1e3:.1f} ms | {r['error']:+.1%} | "
            f"{r['noise']:.1%} | {r['steps']} | {peak} | {same[r['collectives_equal']]} | {r['others_cores']:.2f} |"
        )
    return "\n".join(lines)


def rewrite(text: str) -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(), TABLE, text))


def main() -> None:
    """Measure if asked to; then predict, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="capture, calibrate and run; else predict again")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(EVERY))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=6.0, metavar="SECONDS", help="timed steps of a model's round")
    parser.add_argument("--quick", action="store_true", help="calibrate with fewer micro-benchmarks")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    if unknown := sorted(set(args.only) - set(EVERY)):
        parser.error(f"--only: found {', '.join(unknown)}; allowed: {', '.join(EVERY)}")
    folder = args.folder.resolve()
    try:
        if args.measure:
            measure(folder, args.only, args.rounds, args.budget, args.quick)
        folders = (FOLDER, TWO_RANKS) if folder in (FOLDER, TWO_RANKS) else (folder,)
        text = table([row for each in folders for row in compared(each)])
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    print(text)
    if len(folders) > 1:
        rewrite(text)


if __name__ == "__main__":
    main()
