"""Captures ranks of scripts: in the test's own process, or in a fork that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sim.inputs.script_program import RankProgram, read_rank_program
from tests.modules import run_module

Capture = Callable[[Path, int, int], RankProgram]


@contextmanager
def captures_of_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    """Give a function that captures a script as one rank of so many; what scripts change does not outlive the test."""
    import torch
    import torch.distributed as dist

    from calibrate.capture.script.out import write_script_program
    from calibrate.capture.script.run import record_script

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def capture(script: Path, world_size: int, rank: int = 0) -> RankProgram:
        out = script.with_suffix(f".rank{rank}.json.gz")
        steps, recorder = record_script([str(script)], rank, world_size, 8)
        write_script_program(out, steps, recorder, [str(script)], rank, world_size)
        leave()
        return read_rank_program(out)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.optim.SGD, "step", torch.optim.SGD.step)  # a script may put its own there
    yield capture
    leave()


def run_rank(folder: Path, source: str, world_size: int, balanced: bool = False) -> subprocess.CompletedProcess[str]:
    """The process in which `calibrate.capture --script` captures rank 0, alone; it writes `p.rank0.json.gz`."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    task = {"words": ["train.py"], "rank": 0, "ranks": [0], "world_size": world_size, "gpus_per_node": 8}
    task |= {"out": "p.rank0.json.gz", "objects": None, "balanced": balanced}
    return run_module("calibrate.capture.script.rank", json.dumps(task), cwd=folder)
