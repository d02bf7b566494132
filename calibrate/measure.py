"""Run a scenario for real, with a calibration taken between its steps.

    python -m calibrate.measure SCENARIO.yaml --out MEASURED.json [--steps N] [--profile PROFILE.json]

Starts its own local ranks, or runs under torchrun. First it proves that the ranks compute what one device
computes; then rounds of timed steps and calibrations alternate. Exit codes: 0 done, 1 a rank died or the
proof failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calibrate.launch import RankError, is_rank, join, run_ranks
from calibrate.runnable import check_runnable
from sim.command import end_on_sigterm
from sim.errors import InputError
from sim.files import write_json
from sim.inputs.scenario import Scenario, load_scenario
from sim.prices.profile import Facts, Profile
from sim.prices.profiles import load_profile
from sim.program import Block

STEPS = 10
BUDGET_S = 35.0
HANGS_AFTER_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        scenario = _checked(args)
        if is_rank():
            return _rank_main(scenario, args)
        end_on_sigterm()
        command = [sys.executable, "-m", "calibrate.measure", *(sys.argv[1:] if argv is None else argv)]
        _say(f"{scenario.name}: {scenario.parallelism.ranks} ranks, until {args.steps} steps were quiet")
        run_ranks(command, scenario.parallelism.ranks, HANGS_AFTER_S)
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m calibrate.measure", description=__doc__.split("\n")[0])
    parser.add_argument("scenario", help="scenario file (YAML)")
    parser.add_argument("--out", required=True, help="measured run to write (JSON)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"quiet steps wanted (default {STEPS})")
    parser.add_argument("--profile", help="embed this profile instead of calibrating between the steps")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"for the rounds, 3 times as long if nothing is quiet (default {BUDGET_S:g})",
    )
    parser.add_argument(
        "--huggingface",
        metavar="PATH",
        help="run this Transformers model (a local folder or config.json) in place of the bundled one",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    return parser


def _checked(args: argparse.Namespace) -> Scenario:
    """The scenario, after everything a user may have got wrong was looked at."""
    scenario = load_scenario(args.scenario, args.set)
    if args.huggingface is None:
        check_runnable(scenario, args.scenario)
    elif scenario.training is None:
        raise InputError(f"{args.scenario}: inference: only training steps can be run for real")
    else:
        from calibrate.huggingface import check_model, config_file

        model = f"model={config_file(args.huggingface).resolve()}"
        check_model(args.huggingface, scenario, load_scenario(args.scenario, [*args.set, model]))
    if not 1 <= args.steps <= 1000:
        raise InputError(f"--steps: found {args.steps}; allowed: 1 to 1000")
    if not 0 < args.budget <= 3600:
        raise InputError(f"--budget: found {args.budget:g}; allowed: above 0, at most 3600 seconds")
    if args.profile is not None:
        load_profile(args.profile, "--profile")
    folder = Path(args.out).resolve().parent
    if not folder.is_dir():
        raise InputError(f"--out: found {args.out}; the folder {folder} does not exist")
    if Path(args.out).is_dir():
        raise InputError(f"--out: found {args.out}; this is a folder, not a file")
    return scenario


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rank_main(scenario: Scenario, args: argparse.Namespace) -> int:
    """What one rank does; rank 0 writes the file."""
    import torch.distributed as dist

    device = device_of(scenario)
    rank, ranks = join(device)
    try:
        if ranks != scenario.parallelism.ranks:
            raise InputError(f"{args.scenario}: needs {scenario.parallelism.ranks} ranks; found {ranks}")
        measure = _measure if args.huggingface is None else _measure_huggingface
        measured = measure(scenario, rank, device, args)
        if measured is not None:
            write_json(Path(args.out), measured)
        dist.barrier()
        return 0
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # on every rank: what the first to end wrote is shown
        return 1
    finally:
        dist.destroy_process_group()


class ProofError(RuntimeError):
    """The parallel run did not compute what one device computes."""


def device_of(scenario: Scenario) -> str:
    """cpu for a host's cores, cuda for GPUs."""
    return "cpu" if scenario.cluster.gpu.name == "cpu" else "cuda"


def _measure(scenario: Scenario, rank: int, device: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Proof, memory, rounds; the measured run on rank 0, None on the others."""
    from calibrate.blocks import Rehearsal
    from calibrate.parallel.memory import SavedBytes, allocated_peak
    from calibrate.pieces import block_cuts
    from calibrate.pupil import Lesson, Pupil
    from calibrate.rounds import Limits, calibrate, run_rounds

    runner, proof = _proven(scenario, rank, device, args.scenario)
    batch = runner.batch(0)
    runner.step(batch)  # the optimizer's state appears
    memory = {
        "rank": rank,
        "saved_for_backward_bytes": SavedBytes(runner).step(lambda: runner.step(batch)),
        "allocated_peak_bytes": allocated_peak(runner, lambda: runner.step(batch)) + runner.frozen_bytes,
    }
    blocks, epilogue = simulated_blocks(scenario, runner.numbers, runner.schedule.part_of_stage, rank)
    keys = {s: [b.key for b in own] for s, own in blocks.items()}
    cuts = {b.key: block_cuts(b) for own in blocks.values() for b in own}
    rehearsal = (Lesson if isinstance(runner, Pupil) else Rehearsal)(runner, keys, cuts)
    limits = Limits(args.steps, args.budget, args.profile is None)
    log = run_rounds(runner, lambda: calibrate(runner, rehearsal), limits)
    logs, memories, epilogues = _from_all_ranks(log, memory, epilogue)
    if rank != 0:
        return None
    facts = environment(device)
    given = load_profile(args.profile) if args.profile else None
    profile = given or _paired(scenario, logs, epilogues, runner, facts)
    lists = [[str(entry) for entry in entries] for entries in runner.schedule.ranks]
    proven = {
        "single_device_loss": proof.single_loss,
        "parallel_loss": proof.parallel_loss,
        "gradient_difference": proof.difference,
        "worst": proof.worst,
        "tolerance": proof.tolerance,
    }
    return _assemble(scenario, logs, memories, proven, profile, facts) | {"schedule": lists}


def _proven(scenario: Scenario, rank: int, device: str, where: str) -> tuple[Any, Any]:
    """What will be timed, and the proof that this rank and the others compute what one device does.

    The proof is in fp32, whatever is timed: rounding to 16 bits would hide small faults.
    """
    import torch

    from calibrate.parallel.proof import prove, to_prove
    from calibrate.parallel.runner import Runner, make_place
    from calibrate.pupil import Pupil

    place, student = make_place(scenario, rank, device), _student(scenario)
    wanted = to_prove(student, device)
    runner = Runner(wanted, place if wanted is student else make_place(wanted, rank, device), torch.float32, device)
    proof = prove(runner)
    if not proof.holds:
        raise ProofError(f"{where}: the ranks do not compute what one device computes: {proof}")
    if scenario.distillation is not None:
        return Pupil(scenario, runner.place, torch.float32, device), proof
    if scenario.precision == "fp32" and wanted is student:
        return runner, proof
    runner.free()
    dtype = torch.bfloat16 if scenario.precision == "bf16" else torch.float32
    return Runner(scenario, make_place(scenario, rank, device), dtype, device), proof


def _measure_huggingface(scenario: Scenario, rank: int, device: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The same of a Transformers model; what is proven is that it has as many parameters as the simulated one."""

    from calibrate.fused import peak_bytes
    from calibrate.huggingface import Imported
    from calibrate.paired import make_profile
    from calibrate.rounds import Limits, run_rounds

    runner = Imported(scenario, args.huggingface, device)
    blocks, epilogue = simulated_blocks(scenario, {0: list(range(scenario.model.layers + 2))}, [0], rank)
    batch = runner.batch(0)
    runner.step(batch)  # the optimizer's state appears
    held = [*runner.inner.parameters(), *(p.grad for p in runner.trained),
            *(v for s in runner.optimizer.state.values() for v in s.values())]  # fmt: skip
    memory = {
        "rank": rank, "saved_for_backward_bytes": runner.saved_bytes(runner.own(batch)[0]),
        "allocated_peak_bytes": sum(x.nbytes for x in held) + peak_bytes(device, lambda: runner.step(batch)),
    }  # fmt: skip
    keys = [b.key for b in blocks[0]]
    log = run_rounds(runner, lambda: runner.calibrate(keys), Limits(args.steps, args.budget, args.profile is None))
    logs, memories, epilogues = _from_all_ranks(log, memory, epilogue)
    if rank != 0:
        return None
    facts = environment(device)
    profile = load_profile(args.profile) if args.profile else make_profile(
        f"paired with {scenario.name}", datetime.now(UTC).strftime("%Y-%m-%d"), logs, epilogues, 4,
        scenario.parallelism, facts["hardware"], facts["software"])  # fmt: skip
    proof = {"parameters": sum(p.numel() for p in runner.inner.parameters()),
             "simulated_parameters": sum(b.held_params for b in blocks[0])}  # fmt: skip
    return _assemble(scenario, logs, memories, proof, profile, facts)


def _from_all_ranks(log: Any, memory: Any, epilogue: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """What every rank recorded, by rank. Collective."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (log, memory, epilogue))
    logs, memories, epilogues = (list(column) for column in zip(*found, strict=True))
    return logs, memories, epilogues


def _student(scenario: Scenario) -> Scenario:
    """The scenario without its teacher."""
    return scenario.model_copy(update={"distillation": None})


def simulated_blocks(
    scenario: Scenario, numbers: dict[int, list[int]], part_of_stage: Sequence[int], rank: int
) -> tuple[dict[int, tuple[Block, ...]], list[tuple[str, int]]]:
    """What the simulator asks the profile for: stages' blocks, and (op, bytes) of what ends a step."""
    from sim.graph.stages import stage_blocks
    from sim.models.optimizer import clip_items, optimizer_items
    from sim.plan import make_plan

    plan = make_plan(scenario)
    blocks = {s: stage_blocks(plan, plan.parts[part_of_stage[s]], rank) for s in numbers}
    for s, own in blocks.items():
        assert len(own) == len(numbers[s]), f"stage {s}: {len(own)} blocks, {len(numbers[s])} real ones"
    params = sum(b.params + b.expert_params for own in blocks.values() for b in own)
    if scenario.parallelism.zero:
        params = -(-params // plan.group_size("shard"))
    clip = clip_items(params, scenario) if scenario.training.gradient_clipping else ()
    items = [(f"{i.kind}:{i.name}", round(i.bytes)) for i in (*clip, *optimizer_items(params, scenario))]
    return blocks, items


def environment(device: str) -> dict[str, Facts]:
    """Hardware and software, for the record."""
    from calibrate import machine

    return {"hardware": machine.hardware(device), "software": machine.software(device)}


def _paired(scenario: Scenario, logs: list[Any], epilogues: list[Any], runner: Any, facts: Any) -> Profile:
    import math

    from calibrate.paired import make_profile

    message = math.prod(runner.pipeline.shape) * runner.dtype.itemsize
    return make_profile(
        f"paired with {scenario.name}",
        datetime.now(UTC).strftime("%Y-%m-%d"),
        logs,
        epilogues,
        message,
        scenario.parallelism,
        facts["hardware"],
        facts["software"],
    )


def _assemble(
    scenario: Scenario,
    logs: list[Any],
    memories: list[dict[str, int]],
    proof: dict[str, Any],
    profile: Profile,
    facts: Any,
) -> dict[str, Any]:
    """The measured run, `measured-run/1`."""
    from calibrate.paired import chosen_rounds, representative
    from calibrate.quiet import QUIET_CORES

    steps = logs[0].steps
    chosen = [i for r in chosen_rounds(logs[0]) for i in (2 * r, 2 * r + 1)]
    times = [steps[i].seconds for i in chosen]
    dropped = [i for i in range(len(steps)) if i not in chosen]
    noise = max(steps[i].foreign_cores for i in chosen)
    if noise > QUIET_CORES:
        _say(f"{scenario.name}: no round was quiet, others kept {noise:.2g} cores busy: expect large errors")
    _say(
        f"{scenario.name}: {len(times)} steps, median {statistics.median(times):.4g} s; "
        f"{len(dropped)} noisy steps dropped; waited {logs[0].waited_s:.0f} s for quiet"
    )
    return {
        "format": "measured-run/1",
        "scenario": scenario.model_dump(mode="json"),
        "environment": facts | {"date": datetime.now(UTC).isoformat(timespec="seconds")},
        "step_times_s": times,
        "foreign_cores": [steps[i].foreign_cores for i in chosen],
        "dropped_steps": [{"seconds": steps[i].seconds, "foreign_cores": steps[i].foreign_cores} for i in dropped],
        "actions": _actions(logs, representative(logs[0], chosen)),
        "memory": memories,
        "losses": [steps[i].loss for i in chosen],
        "proof": proof,
        "profile": profile.to_json(),
    }


def _actions(logs: list[Any], step: int) -> list[dict[str, Any]]:
    """What every rank did in one step, from the step's start on rank 0."""
    start_ns = logs[0].steps[step].start_ns
    return [
        {
            "rank": log.rank,
            "kind": r.kind,
            "stage": r.stage,
            "micro_batch": r.micro_batch,
            "start_s": (r.start_ns - start_ns) * 1e-9,
            "end_s": (r.end_ns - start_ns) * 1e-9,
        }
        for log in logs
        for r in sorted(log.steps[step].records, key=lambda r: r.start_ns)
    ]


if __name__ == "__main__":
    sys.exit(main())
