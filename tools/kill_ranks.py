"""Kills real runs at random moments and checks that no process and no incomplete file is left.

    python tools/kill_ranks.py [--kills 50] [--seed 0]

It starts measurements and calibrations on two ranks in turns. A signal (terminate, interrupt or kill) ends each after a
random time of up to `--longest` seconds, while Python starts or ranks import, join or work. The exit code is 1 if a
process lived 30 s longer than its command, a file was incomplete, or a command that could clean up left its temporary
folder.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.processes import ALL_SIGNALS, CODES, start  # noqa: E402

OUTLIVES_S = 30.0
COMMANDS = (
    ("calibrate.measure", "scenarios/cpu/dp2_bucketed.yaml", "--budget", "20"),
    ("calibrate.run", "--device", "cpu", "--quick", "--only", "collectives"),
)


def kill_once(command: tuple[str, ...], number: signal.Signals, wait_s: float) -> list[str]:
    """Start a command, wait, kill it, and return what was wrong afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "temporary"
        own.mkdir()
        running = start(*command, "--out", f"{folder}/out.json", TMPDIR=str(own))
        time.sleep(wait_s)
        ended = running.process.poll()
        code, errors = running.end(number)
        wrong = []
        try:
            running.check_gone(OUTLIVES_S)
        except AssertionError:
            wrong.append("a process is left")
        python_s_own = code == -number or (number == signal.SIGINT and "KeyboardInterrupt" in errors)
        if ended is None and code != CODES[number] and not python_s_own:  # else the command had not started yet
            wrong.append(f"exit code {code}: {errors[-300:]}")
        for path in Path(folder).glob("out.json*"):
            try:
                json.loads(path.read_text())
            except ValueError:
                wrong.append(f"{path.name} is incomplete")
        if code == CODES[number] and number != signal.SIGKILL and list(own.iterdir()):
            wrong.append(f"left in the temporary folder: {[p.name for p in own.iterdir()]}")
        return wrong


def main() -> None:
    """Kill runs, count, and print what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=8.0, metavar="SECONDS")
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("needs /proc, which only Linux has")
    # A shell starts background processes with interrupts ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dice, found = random.Random(args.seed), Counter[str]()
    for i in range(args.kills):
        number, wait_s = dice.choice(ALL_SIGNALS), dice.uniform(0.0, args.longest)
        wrong = kill_once(COMMANDS[i % len(COMMANDS)], number, wait_s)
        found.update(wrong)
        for line in wrong:
            name = COMMANDS[i % len(COMMANDS)][0]
            print(f"kill {i} ({name}, {number.name} after {wait_s:.2f} s): {line}", flush=True)
    print(f"{args.kills} kills, {sum(found.values())} errors")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
