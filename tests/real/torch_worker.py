"""What `test_torch_reference.py` runs on each rank: torch's own parallelism against one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calibrate.launch import join
from calibrate.parallel.proof import prove, single_device
from calibrate.parallel.runner import Runner, make_place, sum_over_ranks
from calibrate.parallel.samples import make_batch
from calibrate.torch_reference import TorchReference, largest_difference, time_both, which
from sim.inputs.scenario import parse_scenario


def main(cases: str, out: str) -> None:
    """Gradients of both in double precision, and a loss after one step of each."""
    rank, _ = join()
    found: dict[str, Any] = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        scenario = parse_scenario(case, name)
        run = Runner(scenario, make_place(scenario, rank), torch.float64)
        bundled = prove(run)
        reference = TorchReference(scenario, run)
        reference.gradients(run.batch(0))
        _, single = single_device(scenario, make_batch(scenario, 0), torch.float64, "cpu")
        row = {"which": which(scenario), "bundled": bundled.difference, "torch": largest_difference(reference, single)}
        row["pairs"] = len(list(time_both(reference, 1)))
        after = run.batch(9)
        mean = 1 / (scenario.parallelism.dp if scenario.parallelism.pp == 1 else 1)
        mean /= scenario.parallelism.tp
        row["torch_loss"] = sum_over_ranks([reference.gradients(after) * mean])[0]
        run.gradients(after)
        row["bundled_loss"] = sum_over_ranks([run.loss()])[0]
        found[name] = row
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
