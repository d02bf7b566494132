"""Searches, sweeps and explorers ended at random moments: files are whole, nothing runs on, the next start works."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ALL_SIGNALS, CODES, HANGS_AFTER_S, ROOT, start, wait_until
from tests.sim.search.test_search_dask import cluster

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"), pytest.mark.slow]
SEARCH = (
    "sim.search",
    "scenarios/search_llama3_8b.yaml",
    "--workers",
    "2",
    "--top",
    "1000",
    "--only",
    "recompute=none,selective",
)
VALIDATE = ("sim.validate", *map(str, sorted(ROOT.glob("scenarios/published/*.json"))), "--jobs", "2")
SMALL = (
    "sim.search",
    "scenarios/search_llama3_8b.yaml",
    "--top",
    "1",
    "--only",
    "tp=8",
    "--only",
    "schedule=1f1b",
    "--only",
    "recompute=none",
)
SWEEP = (
    "sim.sweep",
    "scenarios/1f1b_pp8.yaml",
    "--workers",
    "2",
    "--vary",
    "faults.stragglers.0.rank=0..7",
    "--vary",
    "faults.jitter.sigma=0.1,0.2,0.3,0.4",
    "--vary",
    "faults.jitter.seed=0..99",
)


def check_files(folder: Path) -> None:
    """What is there is whole."""
    for path in folder.iterdir():
        assert path.name in ("out.json", "out.html"), path
        text = path.read_text()
        assert json.loads(text) if path.suffix == ".json" else text.endswith("</html>")


@pytest.mark.parametrize("command", [SEARCH, SWEEP, VALIDATE], ids=["search", "sweep", "validate"])
@pytest.mark.parametrize("number", ALL_SIGNALS)
def test_workers_end_with_the_command(command: tuple[str, ...], number: signal.Signals, tmp_path: Path) -> None:
    dice = random.Random(f"{command} {number}")
    files = ("--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    running = start(*command, *files)
    wait_until(lambda: len(running.alive()) >= 3)  # itself, workers, Python's resource tracker
    time.sleep(dice.uniform(0.0, 3.0))
    code, errors = running.end(number)
    assert code == CODES[number], errors
    if number == signal.SIGTERM:
        assert "Traceback" not in errors
    if number == signal.SIGINT:
        assert errors.splitlines()[-1] == "interrupted"
    running.check_gone()
    check_files(tmp_path)


STARTING = """
import os, signal, threading, time
from sim.core.executors import local_workers
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    with local_workers(8) as workers:
        for wait_s in (0.01, 0.03, 0.1, 0.3):
            threading.Timer(wait_s, os.killpg, (0, signal.SIGINT)).start()
        for _ in range(8):
            workers.executor.submit(time.sleep, 0.5)
"""
# As a command handles SIGTERM; its workers are forks, which have that handler until they take it away.
ENDED = """
import signal, time
from sim.core.executors import local_workers
class Ended(BaseException):
    pass
def end(*_):
    raise Ended
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    for _ in range(20):
        try:
            with local_workers(4, start=None) as workers:
                workers.executor.submit(time.sleep, 0)
                raise Ended
        except Ended:
            pass
"""


@pytest.mark.parametrize("source", [STARTING, ENDED], ids=["Ctrl-C", "SIGTERM"])
def test_workers_that_still_start_leave_signals_to_the_command(source: str, tmp_path: Path) -> None:
    """Else each prints a traceback, amid the last words of the command."""
    file = tmp_path / "starting.py"
    file.write_text(source, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, start_new_session=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


LARGE_TASKS = """
import time
from sim.core.executors import local_workers
if __name__ == "__main__":
    with local_workers(2) as workers:
        for _ in range(2):
            workers.executor.submit(time.sleep, 600)
        for _ in range(9):
            workers.executor.submit(isinstance, bytes(10**7), bytes)
        time.sleep(1)
        raise SystemExit(3)
"""


def test_workers_end_while_a_large_task_waits_to_be_sent(tmp_path: Path) -> None:
    """Larger than a pipe, so that the thread that sends it waits for workers, which are busy and then gone."""
    file = tmp_path / "large.py"
    file.write_text(LARGE_TASKS, encoding="utf-8")
    assert subprocess.run([sys.executable, str(file)], cwd=ROOT, timeout=HANGS_AFTER_S / 10).returncode == 3


def test_the_next_search_works(tmp_path: Path) -> None:
    again = start(*SMALL, "--workers", "2", "--json", str(tmp_path / "out.json"))
    _, errors = again.process.communicate(timeout=HANGS_AFTER_S)
    assert again.process.returncode == 0, errors
    assert json.loads((tmp_path / "out.json").read_text())["best"]
    again.check_gone()


def test_a_dask_cluster_outlives_the_searches_that_are_killed_on_it(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    import distributed

    out = tmp_path / "out"
    out.mkdir()
    with cluster(tmp_path) as (address, _):
        client = distributed.Client(address, set_as_default=False)
        for number in ALL_SIGNALS:
            running = start(*SEARCH, "--dask", address, "--json", str(out / "out.json"))
            wait_until(lambda: any(client.processing().values()))
            time.sleep(random.Random(f"dask {number}").uniform(0.0, 1.0))
            code, errors = running.end(number)
            assert code == CODES[number], errors
            running.check_gone()
            wait_until(lambda: not any(client.processing().values()))  # what it had asked for is given up
            check_files(out)
        client.close()
        again = start(*SMALL, "--dask", address, "--json", str(out / "out.json"))
        _, errors = again.process.communicate(timeout=HANGS_AFTER_S)
        assert again.process.returncode == 0, errors
        check_files(out)


def test_an_explorer_leaves_its_port_to_the_next(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for number in (*ALL_SIGNALS, signal.SIGTERM):
        running = start("sim.explore", "scenarios/1f1b_pp8.yaml", "--port", str(port))
        assert running.process.stdout is not None
        line = running.process.stdout.readline()
        assert f":{port}/" in line
        with socket.create_connection(("127.0.0.1", port), 10) as s:
            s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(random.Random(f"explore {number}").uniform(0.0, 0.5))
            code, errors = running.end(number)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0), errors
        assert "Traceback" not in errors
        running.check_gone()
