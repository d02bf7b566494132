"""What the tests of this folder run on each rank: proofs of many cases, or a measurement that fails."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from calibrate import measure
from calibrate.bundled_model import model
from calibrate.parallel import (
    comm,
    context,
    data,
    expert,
    expert_data_parallel,
    memory,
    model_parallel,
    proof,
    runner,
    samples,
    tensor,
)
from calibrate.real_steps import block_cuts, blocks, timed_rounds
from sim.inputs.scenario import Scenario, parse_scenario
from tests.real.ranks import find_on_this_rank, from_all_ranks


def _prove(name: str, case: dict[str, Any], rank: int) -> dict[str, Any]:
    """A case's proof in double precision."""
    scenario = parse_scenario(case["scenario"], name)
    place = runner.make_place(scenario, rank)
    run = runner.Runner(scenario, place, torch.float64)
    with ExitStack() as patches:
        for patch in _patches(case):
            patches.enter_context(patch)
        result = proof.prove(run, sabotage=case.get("spoil") == "gradient" and rank == 0)
    batch = run.batch(0)
    found = {
        "holds": result.holds,
        "difference": result.difference,
        "worst": result.worst,
        "single": result.single_loss,
        "parallel": result.parallel_loss,
        "saved": from_all_ranks(memory.SavedBytes(run).step(lambda: run.gradients(batch))),
    }
    if run.offloads:
        found["copies"] = from_all_ranks(run.host_stream.copies)
    if case.get("cuts"):
        found["communications"] = _communications(scenario, place)
    if case.get("cuts") or case.get("trained"):
        found["trained"] = _trained(run, place)
    return found


def _patches(case: dict[str, Any]) -> list[Any]:
    """What the case changes about the implementation: something left out, or tokens routed by probability."""
    see, repeated = context.view, lambda cut, x: cut._tokens(x.repeat(cut.group.size, 1))
    nothing, first = (lambda *_: None), (lambda data: data.parts[0].finish())
    spoilt = {
        "all-reduce": (data.DataParallel, "finish", nothing),
        "tp sum": (tensor.TensorSplit, "start_sum", lambda cut, x, blocking=False: lambda: x),
        "tp gather": (tensor.TensorSplit, "gather", repeated),
        "sum over tokens": (model_parallel.ModelParallel, "sum_partial", nothing),
        "shared KV heads": (model_parallel.ModelParallel, "_copied", lambda *_: []),
        "ring step": (context, "view", lambda r, source, *rest: see(r, source, *rest) if r == source else None),
        "places": (context, "own_positions", lambda s, ranks, r, split: torch.arange(s // ranks)),
        "expert gradients": (expert_data_parallel.ExpertDataParallel, "finish", first),
        "dispatch": (expert, "_inverse", lambda order: order),
        "shared key": (tensor._SharedKey, "backward", staticmethod(lambda ctx, grad: (grad, None))),
        "expert parts' sum": (comm.Group, "reduce_scatter", lambda group, x: x.chunk(group.size)[group.index]),
    }
    out = [mock.patch.object(*spoilt[case["spoil"]])] if case.get("spoil") in spoilt else []
    return [*out, mock.patch.object(model.Router, "balanced", False)] if case.get("free_routing") else out


def _communications(scenario: Scenario, place: runner.Place) -> int:
    """How many communications a calibration met, all of them the simulator's; fails at the first other one."""
    run = runner.Runner(scenario, place, torch.float32)
    simulated, _ = measure.simulated_blocks(scenario, run.numbers, run.schedule.part_of_stage, place.rank)
    cuts = {b.key: block_cuts.block_cuts(b) for own in simulated.values() for b in own}
    rehearsal = blocks.Rehearsal(run, {s: [b.key for b in own] for s, own in simulated.items()}, cuts)
    run.zero_gradients()
    rehearsal.run(run.batch(0))
    return len(rehearsal.transfers)


def _trained(run: runner.Runner, place: runner.Place) -> float:
    """How far this rank's parameters are from one device's after three steps."""
    single = run.scenario.model_dump(mode="json") | {"parallelism": {}}
    alone = parse_scenario({k: single[k] for k in ("model", "training", "parallelism", "cluster")})
    device = runner.Runner(alone, runner.make_place(alone, 0), torch.float64)
    run.zero_gradients()
    for step in range(3):
        run.step(run.batch(step))
        device.step(samples.make_batch(run.scenario, step))
    whole = {
        f"{n}.{k}": p
        for n, b in zip(device.numbers[0], device.blocks(), strict=True)
        for k, p in b.state_dict().items()
    }
    off = [0.0]
    for s, stage in run.stages.items():
        own = run.data[s].whole_parameters()
        for n, b in zip(run.numbers[s], stage.blocks, strict=True):
            for k, p in b.named_parameters():
                off.append(float((own[id(p)] - place.model.expected(b, k, whole[f"{n}.{k}"])).abs().max()))
    worst = torch.tensor(max(off))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _sabotaged(*arguments: str) -> int:
    """A measurement whose gradients are spoilt on one rank."""
    honest = proof.prove
    proof.prove = lambda run: honest(run, sabotage=run.place.rank == 0)
    return measure.main(arguments)


def _dying(*arguments: str) -> int:
    """A measurement in which rank 1 is killed when the timed steps begin."""
    honest = timed_rounds.run_rounds

    def dies(run: runner.Runner, *rest: object) -> object:
        if run.place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(run, *rest)

    timed_rounds.run_rounds = dies
    return measure.main(arguments)


if __name__ == "__main__":
    sys.exit(
        {"prove": partial(find_on_this_rank, _prove), "sabotaged": _sabotaged, "dying": _dying}[sys.argv[1]](
            *sys.argv[2:]
        )
    )
