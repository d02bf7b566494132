"""Starts ranks and reads what rank 0 writes, line by line, while they run."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from calibrate.launch import RankError, rank_environment


def stream_ranks(command: Sequence[str], ranks: int, timeout_s: float) -> Iterator[str]:
    """Yield the lines that rank 0 of `command` writes to standard output.

    All ranks are killed when the iterator is closed, when one of them fails, and after `timeout_s`. Each also ends with
    this process (see `calibrate.launch.join`).

    Raises:
        RankError: with the end of the failed rank's standard error.
    """
    with tempfile.TemporaryDirectory(prefix="stepsim-") as folder:
        processes = [_start(command, r, ranks, folder) for r in range(ranks)]
        watchdog = threading.Timer(timeout_s, _kill, [processes])
        watchdog.daemon = True
        watchdog.start()
        for p in processes:
            threading.Thread(target=_end_together, args=(p, processes), daemon=True).start()
        try:
            assert processes[0].stdout is not None
            yield from processes[0].stdout
            for p in processes:
                p.wait()
            _check(processes, folder)
        finally:
            watchdog.cancel()
            _kill(processes)
            for p in processes:
                p.wait()


def _start(command: Sequence[str], rank: int, ranks: int, folder: str) -> subprocess.Popen[str]:
    with (Path(folder) / f"rank{rank}.err").open("wb") as err:
        return subprocess.Popen(
            command,
            env=rank_environment(rank, ranks, folder),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=err,
        )


def _end_together(process: subprocess.Popen[str], processes: list[subprocess.Popen[str]]) -> None:
    """Kill all ranks once one fails, as the others would wait for it for ever."""
    if process.wait() != 0:
        _kill(processes)


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for p in processes:
        if p.poll() is None:
            p.kill()


def _check(processes: list[subprocess.Popen[str]], folder: str) -> None:
    """Report a failed rank: one that ended by itself rather than one that was killed because of it."""
    failed = [r for r, p in enumerate(processes) if p.returncode != 0]
    if failed:
        rank = max(failed, key=lambda r: processes[r].returncode)
        tail = (Path(folder) / f"rank{rank}.err").read_text(errors="replace")[-2000:].strip()
        raise RankError(f"rank {rank} ended with exit code {processes[rank].returncode}: {tail}")
