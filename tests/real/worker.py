"""What the tests of this folder run on each rank: proofs of many cases, or a measurement that fails."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from calibrate import measure, rounds
from calibrate.launch import join
from calibrate.parallel import data, memory, proof, runner
from sim.scenario import parse_scenario


def _prove(cases: str, out: str) -> None:
    """Every case's proof in double precision; rank 0 writes what was found."""
    rank, _ = join()
    found = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        scenario = parse_scenario(case["scenario"], name)
        place = runner.make_place(scenario, rank)
        run = runner.Runner(scenario, place, torch.float64)
        finish = data.DataParallel.finish
        if case.get("spoil") == "all-reduce":
            data.DataParallel.finish = lambda self: None
        result = proof.prove(run, sabotage=case.get("spoil") == "gradient" and rank == 0)
        data.DataParallel.finish = finish
        batch = runner.make_batch(scenario, 0)
        saved: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(saved, memory.SavedBytes(run).step(lambda run=run, b=batch: run.gradients(b)))
        found[name] = {"holds": result.holds, "difference": result.difference, "worst": result.worst,
                       "single": result.single_loss, "parallel": result.parallel_loss, "saved": saved}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _sabotaged(*arguments: str) -> int:
    """A measurement whose gradients are spoilt on one rank."""
    honest = proof.prove
    proof.prove = lambda run: honest(run, sabotage=run.place.rank == 0)
    return measure.main(arguments)


def _dying(*arguments: str) -> int:
    """A measurement in which rank 1 is killed when the timed steps begin."""
    honest = rounds.run_rounds

    def dies(run: runner.Runner, *rest: object) -> object:
        if run.place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(run, *rest)

    rounds.run_rounds = dies
    return measure.main(arguments)


if __name__ == "__main__":
    sys.exit({"prove": _prove, "sabotaged": _sabotaged, "dying": _dying}[sys.argv[1]](*sys.argv[2:]))
