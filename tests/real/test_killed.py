"""Calibrations and real runs ended at random moments: no rank runs on, no folder stays, files are whole."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from calibrate.rank_messages import FOLDER
from sim.prices.profiles import load_profile
from tests.processes import CODES, HANGS_AFTER_S, Marked, start, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core forms no group"),
]
MEASURE = ("calibrate.measure", "scenarios/cpu/dp2_bucketed.yaml", "--budget", "20")
CALIBRATE = ("calibrate.run", "--device", "cpu", "--quick", "--only", "collectives")


def ranks_of(running: Marked) -> list[int]:
    """Its processes that are ranks."""
    found = []
    for pid in running.alive():
        try:
            if FOLDER.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def check(running: Marked, number: signal.Signals, folder: Path, name: str) -> None:
    """End it, and look at what is left: only what a profile or a measured run is called, and whole."""
    code, errors = running.end(number)
    assert code == CODES[number], errors
    assert "Traceback" not in errors
    running.check_gone()
    for path in (p for p in folder.iterdir() if p.name in (name, f"{name}.partial")):
        assert json.loads(path.read_text())
    if number != signal.SIGKILL:
        assert list((folder / "temporary").iterdir()) == []
        assert {p.name for p in folder.iterdir()} <= {"temporary", name, f"{name}.partial"}


IMPORTING, WORKING = (0.0, 0.3), (1.0, 5.0)  # seconds after the ranks were started
MOMENTS = [  # `tools/kill_ranks.py` tries many more
    (MEASURE, signal.SIGTERM, IMPORTING),
    (MEASURE, signal.SIGINT, WORKING),
    (MEASURE, signal.SIGKILL, IMPORTING),
    (MEASURE, signal.SIGKILL, WORKING),
    (CALIBRATE, signal.SIGTERM, WORKING),
    (CALIBRATE, signal.SIGINT, IMPORTING),
    (CALIBRATE, signal.SIGKILL, WORKING),
]


@pytest.mark.parametrize(("command", "number", "between_s"), MOMENTS)
def test_no_rank_outlives_its_command(
    command: tuple[str, ...], number: signal.Signals, between_s: tuple[float, float], tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    wait_s = random.Random(f"{command[0]} {number}").uniform(*between_s)
    running = start(*command, "--out", str(tmp_path / "out.json"), TMPDIR=str(tmp_path / "temporary"))
    wait_until(lambda: len(ranks_of(running)) >= 2)
    time.sleep(wait_s)
    check(running, number, tmp_path, "out.json")


def test_the_next_calibration_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ("calibrate.run", "--device", "cpu", "--quick", "--only", "optimizer", "--out", str(out))
    running = start(*command)
    wait_until(lambda: (tmp_path / "out.json.partial").exists())
    running.end(signal.SIGTERM)
    running.check_gone()
    again = start(*command)
    _, errors = again.process.communicate(timeout=HANGS_AFTER_S)
    assert again.process.returncode == 0, errors
    assert "resuming from" in errors
    assert load_profile(out).points
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_two_calibrations_at_once_into_one_file(tmp_path: Path) -> None:
    """Their times are worth little; the file is whole and nobody fails."""
    out = tmp_path / "out.json"
    command = ("calibrate.run", "--device", "cpu", "--quick", "--only", "optimizer", "--out", str(out))
    both = [start(*command) for _ in range(2)]
    for running in both:
        _, errors = running.process.communicate(timeout=HANGS_AFTER_S)
        assert running.process.returncode == 0, errors
    assert load_profile(out).points
