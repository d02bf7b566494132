"""Many cases on one set of ranks, which are forks of a process that has imported torch."""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibrate.launch import RankError, join, run_ranks
from tests.modules import Fork
from tests.processes import HANGS_AFTER_S

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # no Python code of ours ends a process in these ways


def on_ranks(worker: str, cases: dict[str, Any], folder: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    """What the module `worker` of this folder finds for each case; its arguments end with the files of both.

    If torch's own code crashes, the ranks are started once more, and a warning has the crash. It happened once
    ("malloc(): unaligned tcache chunk detected" on rank 0), at a place that is not known.
    """
    given, found = folder / "cases.json", folder / "found.json"
    given.write_text(json.dumps(cases))
    command = [f"tests.real.{worker}", *arguments, str(given), str(found)]
    try:
        run_ranks(command, ranks, HANGS_AFTER_S, Fork)
    except RankError as error:
        if error.killed_by not in CRASHES:
            raise
        warnings.warn(f"{worker}: {error}", stacklevel=2)
        run_ranks(command, ranks, HANGS_AFTER_S, Fork)
    rows: dict[str, Any] = json.loads(found.read_text())
    return rows


def find_on_this_rank(find: Callable[[str, Any, int], Any], given: str, found: str) -> None:
    """A worker's part: `find(name, case, rank)` for each case, in the same order on all ranks; rank 0 writes."""
    import torch.distributed as dist

    rank, _ = join()
    rows = {name: find(name, case, rank) for name, case in json.loads(Path(given).read_text()).items()}
    if rank == 0:
        Path(found).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def from_all_ranks(mine: Any) -> list[Any]:
    """Each rank's, in their order."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
