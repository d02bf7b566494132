"""What `test_torch_reference.py` runs on each rank: torch's own parallelism against one device."""

from __future__ import annotations

import sys
from typing import Any

import torch

from calibrate.parallel.proof import prove, single_device
from calibrate.parallel.runner import Runner, make_place, sum_over_ranks
from calibrate.parallel.samples import make_batch
from calibrate.real_steps.torch_reference import TorchReference, largest_difference, time_both, which
from sim.inputs.scenario import parse_scenario
from tests.real.ranks import find_on_this_rank


def _find(name: str, case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Gradients of both in double precision, and the loss on a new batch after two steps of each."""
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
    return row


if __name__ == "__main__":
    find_on_this_rank(_find, *sys.argv[1:])
