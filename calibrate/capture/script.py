"""Captures ranks of a distributed script (`--script`), each in a process of its own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sim.core.errors import InputError

MAX_RANKS = 64  # ranks of one command; of ranks that run the same program one is enough


def capture_ranks(script: str, world_size: int | None, ranks: str, gpus_per_node: int, out: Path) -> None:
    """Write `OUT.rankR.json.gz` for each of the ranks.

    Raises:
        InputError: if options contradict each other, or if the script fails.
    """
    words = _words(script)
    if world_size is None:
        raise InputError("--world-size: is missing; --script needs the number of ranks")
    if not out.parent.is_dir():
        raise InputError(f"--out: {out.parent} is not a folder")
    for rank in _ranks(ranks, world_size):
        begin_s = time.perf_counter()
        path = out.with_name(f"{out.name}.rank{rank}.json.gz")
        task = {
            "words": words,
            "rank": rank,
            "world_size": world_size,
            "gpus_per_node": gpus_per_node,
            "out": str(path),
        }
        command = [sys.executable, "-m", "calibrate.capture.script_rank", json.dumps(task)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.returncode if done.returncode > 0 else 1)
        print(f"{path}: {done.stdout.splitlines()[-1]}, {time.perf_counter() - begin_s:.1f} s")


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
