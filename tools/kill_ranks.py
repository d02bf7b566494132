"""Kill real runs at random moments, and look for what is left: no process, and no file but whole ones.

    python tools/kill_ranks.py [--kills 50] [--seed 0]

Measurements and calibrations on two ranks are started in turns, each is ended by a signal (terminate, interrupt or
kill) after a random time between nothing and `--longest` seconds, while Python starts, ranks import, join or work.
Exit code 1 where a process outlived its command by 30 s, a file was half written, or, where the command could still
clean up, its temporary folder stayed.
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
    """Start, wait, kill; what was wrong afterwards."""
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
            wrong.append("a process stayed")
        python_s_own = code == -number or (number == signal.SIGINT and "KeyboardInterrupt" in errors)
        if ended is None and code != CODES[number] and not python_s_own:  # Python's own: the command was not up yet
            wrong.append(f"exit code {code}: {errors[-300:]}")
        for path in Path(folder).glob("out.json*"):
            try:
                json.loads(path.read_text())
            except ValueError:
                wrong.append(f"{path.name} is half a file")
        if code == CODES[number] and number != signal.SIGKILL and list(own.iterdir()):
            wrong.append(f"left in the temporary folder: {[p.name for p in own.iterdir()]}")
        return wrong


def main() -> None:
    """Kill, count, and say what stayed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=8.0, metavar="SECONDS")
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("looks into /proc, which Linux alone has")
    # A shell starts what it puts into the background with interrupts ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dice, found = random.Random(args.seed), Counter[str]()
    for i in range(args.kills):
        number, wait_s = dice.choice(ALL_SIGNALS), dice.uniform(0.0, args.longest)
        wrong = kill_once(COMMANDS[i % len(COMMANDS)], number, wait_s)
        found.update(wrong)
        for line in wrong:
            name = COMMANDS[i % len(COMMANDS)][0]
            print(f"kill {i} ({name}, {number.name} after {wait_s:.2f} s): {line}", flush=True)
    print(f"{args.kills} kills, {sum(found.values())} things wrong")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
