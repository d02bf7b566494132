"""What `test_loss_scaling.py` runs on each rank: fp16 steps of a scenario beside one device's."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from calibrate.parallel.runner import Runner, make_place, sum_over_ranks
from sim.inputs.scenario import parse_scenario
from tests.real.ranks import find_on_this_rank, from_all_ranks


def _steps(scenario: dict[str, Any], rank: int, first_scale: float) -> dict[str, Any]:
    """Losses of four steps, the factor after each, and whether the parameters moved in it."""
    parsed = parse_scenario(scenario)
    run = Runner(parsed, make_place(parsed, rank), torch.float16)
    assert run.loss_scale is not None
    run.loss_scale.value = first_scale
    out: dict[str, Any] = {"losses": [], "scales": [], "moved": []}
    for step in range(4):
        before = [p.detach().clone() for p in run.owned()]
        run.step(run.batch(step))
        out["losses"].append(
            sum_over_ranks([run.loss()])[0] if dist.get_world_size() == parsed.parallelism.ranks else run.loss()
        )
        out["scales"].append(run.loss_scale.value)
        out["moved"].append(any(not torch.equal(a, b) for a, b in zip(before, run.owned(), strict=True)))
    return out


def _find(name: str, case: dict[str, Any], rank: int) -> dict[str, Any]:
    """A case on all ranks, and on this one alone."""
    alone = case["scenario"] | {"parallelism": {}}
    every = from_all_ranks(_steps(case["scenario"], rank, case["scale"]))
    return {"ranks": every, "alone": _steps(alone, 0, case["scale"])}


if __name__ == "__main__":
    find_on_this_rank(_find, *sys.argv[1:])
