"""Captures ranks of a distributed script (`--script`), each in a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

NEEDS_OTHERS = 75  # exit code of a rank that waits for an object of a rank that is not there (EX_TEMPFAIL)
POLL_S = 0.1
MAX_RANKS = 64  # ranks of one command; of ranks that run the same program one is enough


def capture_ranks(
    script: str, world_size: int | None, ranks: str, gpus_per_node: int, out: Path, balanced: bool = False
) -> None:
    """Write `OUT.rankR.json.gz` for each of the ranks.

    Raises:
        InputError: if options contradict each other, or if the script fails.
    """
    words = _words(script)
    if world_size is None:
        raise InputError("--world-size: is missing; --script needs the number of ranks")
    if not out.parent.is_dir():
        raise InputError(f"--out: {out.parent} is not a folder")
    chosen = _ranks(ranks, world_size)
    tasks = [
        {
            "words": words,
            "rank": rank,
            "ranks": list(chosen),
            "world_size": world_size,
            "gpus_per_node": gpus_per_node,
            "out": str(out.with_name(f"{out.name.removesuffix('.json.gz')}.rank{rank}.json.gz")),
            "objects": None,
            "balanced": balanced,
        }
        for rank in chosen
    ]
    for task in tasks:
        if _report(task, _start(task)) == NEEDS_OTHERS:
            _capture_together(tasks)
            return


def _capture_together(tasks: list[dict[str, Any]]) -> None:
    """Capture all ranks at the same time, so that they can pass objects to each other."""
    with tempfile.TemporaryDirectory() as folder:
        left = [(task, _start({**task, "objects": folder})) for task in tasks]
        try:
            while left:
                done = [(task, process) for task, process in left if process.poll() is not None]
                left = [pair for pair in left if pair not in done]
                for task, process in done:
                    _report(task, process)
                time.sleep(POLL_S)
        finally:
            for _, process in left:
                process.kill()


def _start(task: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "calibrate.capture.script.rank", json.dumps(task)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _report(task: dict[str, Any], process: subprocess.Popen[str]) -> int:
    """Wait for a rank, print its summary, and return its exit code, 0 or NEEDS_OTHERS.

    Raises:
        InputError: if the script ended its process.
        SystemExit: if the capture failed, after its own message.
    """
    said, _ = process.communicate()
    code = process.returncode
    if code < 0:
        raise InputError(f"{task['words'][0]}: rank {task['rank']} was ended by {signal.Signals(-code).name}")
    if code not in (0, NEEDS_OTHERS):
        raise SystemExit(code)
    if code == 0 and not Path(task["out"]).is_file():
        raise InputError(f"{task['words'][0]}: rank {task['rank']} ended its process before its second optimizer step")
    if code == 0:
        print(f"{task['out']}: {said.splitlines()[-1]}")
    return code


def _words(script: str) -> list[str]:
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise InputError(f"--script: found {script[:80]!r}: {error}") from None
    if not words or words == ["-m"]:
        raise InputError(f"--script: found {script!r}; allowed: 'train.py ARGS' or '-m MODULE ARGS'")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise InputError(f"--script: {words[0]}: no such file")
    return words


def _ranks(text: str, world_size: int) -> Sequence[int]:
    parts = text.split(",")
    if not all(p.strip().isascii() and p.strip().isdigit() and int(p) < world_size for p in parts):
        raise InputError(f"--ranks: found {text[:80]!r}; allowed: numbers from 0 to {world_size - 1}, with commas")
    found = list(dict.fromkeys(int(p) for p in parts))
    if len(found) > MAX_RANKS:
        raise InputError(
            f"--ranks: found {len(found)}; at most {MAX_RANKS} are captured; give one for each different program"
        )
    return found
