"""The search on a real Dask cluster of separate processes, one of which is killed in the middle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sim.core.executors import dask_workers, local_workers
from sim.inputs.input_source import Source
from sim.search.best_first import BestFirst
from sim.search.evaluation import Outcome
from sim.search.space import Layout
from sim.search.space_of_scenario import make_space
from tests.processes import HANGS_AFTER_S

pytest.importorskip("distributed", reason="dask.distributed is not installed")

SCENARIO: dict[str, Any] = {
    "model": {"layers": 6, "hidden": 512, "heads": 8, "ffn": 1024, "vocab": 1000},
    "cluster": "dgx-h100",
    "calibration": "roofline",
    "training": {"seq_len": 256, "global_batch_size": 16},
    "parallelism": {"dp": 8},
}
ONLY = {"schedule": ("1f1b", "interleaved_1f1b"), "recompute": ("none", "full"), "zero": (0, 1)}
QUIET = {"DASK_DISTRIBUTED__DASHBOARD__LINK": "", "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}


@contextmanager
def process(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = (folder / f"{arguments[0]}-{time.monotonic_ns()}.log").open("wb")
    command = [sys.executable, "-m", "dask", *arguments]
    started = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **QUIET})
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
        log.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler and two workers; its address, and the worker that may be killed."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    worker = ("worker", address, "--nthreads", "1", "--nworkers", "1", "--no-nanny", "--no-dashboard")
    scheduler = ("scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard", "--no-show")
    with (
        process(*scheduler, folder=folder),
        process(*worker, folder=folder) as victim,
        process(*worker, folder=folder),
    ):
        yield address, victim


def best_of(found: BestFirst) -> list[tuple[float, float, Layout]]:
    return [(o.step_time_s, o.peak_memory_bytes, o.layout) for o in found.best]


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    space = make_space(Source("test", SCENARIO), 8, "test", ONLY)
    with local_workers(1) as here:
        expected = BestFirst(space, 1e18, 40, False, here).run()
    killed: list[int] = []
    with cluster(tmp_path) as (address, victim), dask_workers(address) as pool:
        until = time.monotonic() + HANGS_AFTER_S
        while pool.cores() < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert pool.cores() == 2

        def report(search: BestFirst) -> None:
            if not killed and search.counts["evaluated"] >= 5:
                os.kill(victim.pid, signal.SIGKILL)
                killed.append(search.counts["evaluated"])

        found = BestFirst(space, 1e18, 40, False, pool, report).run()
        assert killed
        assert found.counts["evaluated"] > killed[0]
        assert pool.cores() == 1
    assert victim.wait(20) == -signal.SIGKILL
    assert best_of(found) == best_of(expected)
    c = found.counts
    assert c["legal"] == expected.counts["legal"] == c["pruned_by_memory"] + c["pruned_by_bound"] + c["evaluated"]
    assert len({o.layout for o in found.fitting}) == len(found.fitting) == c["evaluated"] - c["beaten"]
    assert all(isinstance(o, Outcome) for o in found.fitting)
