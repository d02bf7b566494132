"""Run a scenario for real, with a calibration taken between its steps.

    python -m calibrate.measure SCENARIO.yaml --out MEASURED.json [--steps N] [--profile PROFILE.json]

It starts its own local ranks, or runs under torchrun. First it proves that the ranks compute what one device computes.
Then rounds of timed steps and calibrations follow. Exit codes: 0 done, 1 a rank died or the proof failed, 2 bad input.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from calibrate.launch import RankError, is_rank, join, run_ranks
from calibrate.rank_messages import hear_warnings, say, warn, warned
from calibrate.real_steps.runnable import check_runnable
from sim.commands.command import Command, run_command
from sim.commands.files_named import OUTPUT, check_output
from sim.commands.options import gathered, overrides_option, scenario_argument
from sim.core.dtypes import sixteen_bit
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.core.processes import python_module
from sim.core.program import Block, Compute
from sim.core.units import counted
from sim.inputs.scenario import Scenario, load_scenario
from sim.models.balance import with_balanced_stages
from sim.prices.profile import Facts, Profile
from sim.prices.profiles import load_profile

STEPS = 10
BUDGET_S = 35.0
HANGS_AFTER_S = 600.0


class Wanted(Struct, frozen=True, kw_only=True):
    """Hold the command line; each field is the argument or option of its name, `overrides` is --set."""

    scenario: Path
    out: Path
    steps: int
    profile: str | None
    budget_s: float
    huggingface: str | None
    program: str | None
    torch: bool
    overrides: tuple[str, ...]

    @property
    def where(self) -> str:
        """Return the scenario's file as messages name it."""
        return str(self.scenario)

    def arguments(self) -> list[str]:
        """Return the command line that starts a rank."""
        named = {"--profile": self.profile, "--huggingface": self.huggingface, "--program": self.program}
        return [
            *(self.where, "--out", str(self.out), "--steps", str(self.steps), "--budget", repr(self.budget_s)),
            *(word for option, value in named.items() if value is not None for word in (option, value)),
            *(("--torch",) if self.torch else ()),
            *(word for override in self.overrides for word in ("--set", override)),
        ]


@click.command("measure", cls=Command)
@gathered(
    Wanted,
    "wanted",
    scenario_argument,
    click.option("--out", type=OUTPUT, required=True, metavar="MEASURED.json", help="measured run to write"),
    click.option("--steps", type=int, default=STEPS, help="number of steps to time on a quiet machine"),
    click.option("--profile", metavar="NAME", help="embed this profile instead of calibrating between the steps"),
    click.option(
        "--budget",
        "budget_s",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="time of the timed rounds; up to 3 times as long if the machine is busy",
    ),
    click.option(
        "--huggingface",
        metavar="PATH",
        help="run this Transformers model (a local folder or config.json) in place of the bundled one",
    ),
    click.option("--program", metavar="WHAT", help="run the scenario's captured code; WHAT as in calibrate.capture"),
    click.option("--torch", is_flag=True, help="also time torch's own implementation of the parallelism"),
    overrides_option,
)
def main(wanted: Wanted) -> int:
    """Run SCENARIO for real, with calibrations between its steps, and write a measured run."""
    loaded = _checked(wanted)
    ranks = loaded.parallelism.ranks
    try:
        if is_rank():
            return _rank_main(loaded, wanted)
        say(f"{loaded.name}: {counted(ranks, 'rank')}, stops after {counted(wanted.steps, 'quiet step')}")
        run_ranks([*python_module("calibrate.measure"), *wanted.arguments()], ranks, HANGS_AFTER_S)
        return 0
    except RankError as error:
        say(f"error: {str(error).removeprefix('error: ')}")  # a rank's own message says so, too
        return error.code


def _checked(wanted: Wanted) -> Scenario:
    """Return the scenario after all checks of the user's input."""
    scenario = with_balanced_stages(load_scenario(wanted.scenario, wanted.overrides))
    if wanted.torch:
        from calibrate.real_steps.torch_reference import check

        if wanted.program is not None or wanted.huggingface is not None:
            raise InputError("--torch: cannot be given with --program or --huggingface; it runs the bundled model")
        check(scenario, wanted.where)
    if wanted.program is not None:
        from calibrate.capture.options import Options
        from calibrate.capture.what import maker
        from calibrate.real_steps.measure_program import check_program

        if wanted.huggingface is not None:
            raise InputError("--program: cannot be given with --huggingface; one of the two runs")
        check_program(scenario, wanted.where)
        maker(wanted.program, Options())
    elif wanted.huggingface is None:
        check_runnable(scenario, wanted.where)
    elif scenario.training is None:
        raise InputError(f"{wanted.where}: inference: only training steps can be run for real")
    else:
        from calibrate.real_steps.huggingface import check_model, config_file

        model = f"model={config_file(wanted.huggingface).resolve()}"
        check_model(wanted.huggingface, scenario, load_scenario(wanted.scenario, [*wanted.overrides, model]))
    if not 1 <= wanted.steps <= 1000:
        raise InputError(f"--steps: found {wanted.steps}; allowed: 1 to 1000")
    if not 0 < wanted.budget_s <= 3600:
        raise InputError(f"--budget: found {wanted.budget_s:g}; allowed: above 0, at most 3600 seconds")
    if wanted.profile is not None:
        load_profile(wanted.profile, "--profile")
    check_output("--out", wanted.out)
    return scenario


def _rank_main(scenario: Scenario, wanted: Wanted) -> int:
    """Run one rank; rank 0 writes the file."""
    import torch.distributed as dist

    device = device_of(scenario)
    hear_warnings()
    rank, ranks = join(device)
    try:
        if ranks != scenario.parallelism.ranks:
            raise InputError(f"{wanted.where}: needs {counted(scenario.parallelism.ranks, 'rank')}; found {ranks}")
        measured = _how(wanted)(scenario, rank, device, wanted)
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, warned())
        if measured is not None:
            write_json(wanted.out, measured | {"warnings": list(dict.fromkeys(w for own in found for w in own))})
        dist.barrier()
        return 0
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # on every rank, as only one is shown
        return 1
    finally:
        dist.destroy_process_group()


def _how(wanted: Wanted) -> Callable[[Scenario, int, str, Wanted], dict[str, Any] | None]:
    """Return the function that measures the bundled model, a Transformers model, or a captured program's code."""
    if wanted.program is not None:
        return _measure_program
    return _measure if wanted.huggingface is None else _measure_huggingface


class ProofError(RuntimeError):
    """The parallel run did not compute what one device computes."""


def device_of(scenario: Scenario) -> str:
    """Return the torch device of the scenario's cluster: cpu or cuda."""
    return "cpu" if scenario.cluster.gpu.chip.is_host else "cuda"


def _measure(scenario: Scenario, rank: int, device: str, wanted: Wanted) -> dict[str, Any] | None:
    """Prove, measure memory and time the rounds; return the measured run on rank 0, None on other ranks."""
    from calibrate.parallel.memory import SavedBytes, allocated_peak
    from calibrate.parallel.memory_over_steps import first_steps
    from calibrate.real_steps.block_cuts import block_cuts
    from calibrate.real_steps.blocks import Rehearsal
    from calibrate.real_steps.distillation_step import Lesson, Pupil
    from calibrate.real_steps.run_record import assemble
    from calibrate.real_steps.timed_rounds import Limits, calibrate, run_rounds

    runner, proof = _proven(scenario, rank, device, wanted.where)
    over_steps = first_steps(runner)  # the optimizer's state appears
    batch = runner.batch(0)
    memory = {
        "rank": rank,
        "over_steps": over_steps,
        "saved_for_backward_bytes": SavedBytes(runner).step(lambda: runner.step(batch)),
        "allocated_peak_bytes": allocated_peak(runner, lambda: runner.step(batch)) + runner.frozen_bytes,
    }
    blocks, epilogue = simulated_blocks(scenario, runner.numbers, runner.schedule.part_of_stage, rank)
    keys = {s: [b.key for b in own] for s, own in blocks.items()}
    cuts = {b.key: block_cuts(b) for own in blocks.values() for b in own}
    rehearsal = (Lesson if isinstance(runner, Pupil) else Rehearsal)(runner, keys, cuts)
    limits = Limits(wanted.steps, wanted.budget_s, wanted.profile is None)
    log = run_rounds(runner, lambda: calibrate(runner, rehearsal), limits)
    beside = _torch_beside(scenario, runner, wanted) if wanted.torch else {}
    logs, memories, epilogues = _from_all_ranks(log, memory, epilogue)
    if rank != 0:
        return None
    facts = environment(device)
    message_bytes = math.prod(runner.pipeline.shape) * runner.dtype.itemsize
    profile = _profile(wanted, scenario, logs, epilogues, message_bytes, facts)
    lists = [[str(entry) for entry in entries] for entries in runner.schedule.ranks]
    proven = {
        "single_device_loss": proof.single_loss,
        "parallel_loss": proof.parallel_loss,
        "gradient_difference": proof.difference,
        "worst": proof.worst,
        "tolerance": proof.tolerance,
    }
    return assemble(scenario, logs, memories, proven, profile, facts) | {"schedule": lists} | beside


def _proven(scenario: Scenario, rank: int, device: str, where: str) -> tuple[Any, Any]:
    """Return the runner, and the proof that the ranks compute what one device computes.

    The proof is always in fp32: rounding to 16 bits would hide small errors.
    """
    import torch

    from calibrate.parallel.proof import prove, to_prove
    from calibrate.parallel.runner import Runner, make_place
    from calibrate.real_steps.distillation_step import Pupil

    place, student = make_place(scenario, rank, device), scenario.unchecked_copy(update={"distillation": None})
    wanted = to_prove(student, device)
    runner = Runner(wanted, place if wanted is student else make_place(wanted, rank, device), torch.float32, device)
    proof = prove(runner)
    if not proof.holds:
        raise ProofError(f"{where}: the ranks' results differ from one device's: {proof}")
    if scenario.distillation is not None:
        return Pupil(scenario, runner.place, torch.float32, device), proof
    if scenario.precision == "fp32" and wanted is student:
        return runner, proof
    runner.free()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(sixteen_bit(scenario.precision), torch.float32)
    return Runner(scenario, make_place(scenario, rank, device), dtype, device), proof


def _torch_beside(scenario: Scenario, runner: Any, wanted: Wanted) -> dict[str, Any]:
    """Prove torch's own parallelism and time its steps in turns with the bundled ones. Collective."""
    from calibrate.parallel.proof import single_device
    from calibrate.parallel.samples import make_batch
    from calibrate.real_steps.torch_reference import TorchReference, largest_difference, time_both, which

    reference = TorchReference(scenario, runner)
    reference.gradients(runner.batch(0))
    _, single = single_device(scenario, make_batch(scenario, 0, runner.device), runner.dtype, runner.device)
    difference = largest_difference(reference, single)
    if difference > 1e-5:
        raise ProofError(f"{wanted.where}: torch's gradients are {difference:.2g} off one device's")
    bundled, theirs = zip(*time_both(reference, wanted.steps), strict=True)
    return {
        "torch": {
            "what": which(scenario),
            "gradient_difference": difference,
            "step_times_s": theirs,
            "bundled_step_times_s": bundled,
        }
    }


def _measure_huggingface(scenario: Scenario, rank: int, device: str, wanted: Wanted) -> dict[str, Any] | None:
    """Measure a Transformers model; the proof is that it has as many parameters as the simulated model."""

    from calibrate.real_steps.huggingface import Imported
    from calibrate.real_steps.run_record import assemble
    from calibrate.real_steps.timed_rounds import Limits, run_rounds
    from calibrate.timings.fused import peak_bytes

    assert wanted.huggingface is not None
    runner = Imported(scenario, wanted.huggingface, device)
    blocks, epilogue = simulated_blocks(scenario, {0: list(range(scenario.model.layers + 2))}, [0], rank)
    batch = runner.batch(0)
    runner.step(batch)  # the optimizer's state appears
    held = [
        *runner.inner.parameters(),
        *(p.grad for p in runner.trained),
        *(v for s in runner.optimizer.state.values() for v in s.values()),
    ]
    memory = {
        "rank": rank,
        "saved_for_backward_bytes": runner.saved_bytes(runner.own(batch)[0]),
        "allocated_peak_bytes": sum(x.nbytes for x in held) + peak_bytes(device, lambda: runner.step(batch)),
    }
    keys = [b.key for b in blocks[0]]
    limits = Limits(wanted.steps, wanted.budget_s, wanted.profile is None)
    log = run_rounds(runner, lambda: runner.calibrate(keys), limits)
    logs, memories, epilogues = _from_all_ranks(log, memory, epilogue)
    if rank != 0:
        return None
    facts = environment(device)
    profile = _profile(wanted, scenario, logs, epilogues, 4, facts)
    proof = {
        "parameters": sum(p.numel() for p in runner.inner.parameters()),
        "simulated_parameters": sum(b.held_params for b in blocks[0]),
    }
    return assemble(scenario, logs, memories, proof, profile, facts)


def _measure_program(scenario: Scenario, rank: int, device: str, wanted: Wanted) -> dict[str, Any] | None:
    """Measure a captured program's code on one rank; the proof is that it runs the captured operators."""
    from calibrate.real_steps.measure_program import ProgramRunner, check_program, differences
    from calibrate.real_steps.run_record import assemble
    from calibrate.real_steps.timed_rounds import Limits, run_rounds

    program = check_program(scenario, wanted.where)
    assert wanted.program is not None
    runner = ProgramRunner(scenario, program, wanted.program, device)
    runner.first_step()
    memory = {"rank": rank, "allocated_peak_bytes": runner.peak_bytes()}
    log = run_rounds(runner, lambda: None, Limits(wanted.steps, wanted.budget_s, False))  # type: ignore[arg-type, return-value]
    operators = runner.operators()
    different = differences(program, operators, scenario.micro_batches)
    for name, more in different.items():
        warn(f"{scenario.name}: {name}: {abs(more)} launches {'more' if more > 0 else 'fewer'} than captured")
    profile = load_profile(wanted.profile) if wanted.profile else None
    proof = {"operators": sum(row["count"] for row in operators), "launches_beyond_captured": different}
    return assemble(scenario, [log], [memory], proof, profile, environment(device)) | {"operators": operators}


def _from_all_ranks(log: Any, memory: Any, epilogue: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Gather what every rank recorded, in the order of ranks. Collective."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (log, memory, epilogue))
    logs, memories, epilogues = (list(column) for column in zip(*found, strict=True))
    return logs, memories, epilogues


def simulated_blocks(
    scenario: Scenario, numbers: dict[int, list[int]], part_of_stage: Sequence[int], rank: int
) -> tuple[dict[int, tuple[Block, ...]], list[tuple[str, int]]]:
    """Return what the simulator looks up in a profile: stages' blocks, and (op, bytes) of clipping and optimizer."""
    from sim.models.optimizers.step import clip_items, optimizer_items, prepared_gradients
    from sim.programs.stages import stage_blocks
    from sim.ranks.plan import make_plan

    plan = make_plan(scenario)
    blocks = {s: stage_blocks(plan, plan.parts[part_of_stage[s]], rank) for s in numbers}
    for s, own in blocks.items():
        assert len(own) == len(numbers[s]), f"stage {s}: {len(own)} blocks, {len(numbers[s])} real ones"
    every = [b for own in blocks.values() for b in own]
    kinds = (sum(b.params for b in every), "shard"), (sum(b.expert_params for b in every), "expert_shard")
    sharded = bool(scenario.parallelism.zero)
    params = sum(-(-n // plan.group_size(group)) if sharded else n for n, group in kinds)
    t = scenario.for_training
    norm, scaling = clip_items(params, t)
    ends = (*prepared_gradients(params, t), *norm, *scaling, *optimizer_items(params, t))
    items = [(f"{i.kind}:{i.kernel}", round(i.bytes)) for i in ends if isinstance(i, Compute)]
    return blocks, items


def environment(device: str) -> dict[str, Facts]:
    """Return hardware and software, for the measured run."""
    from calibrate import machine

    return {"hardware": machine.hardware(device), "software": machine.software(device)}


def _profile(
    wanted: Wanted, scenario: Scenario, logs: list[Any], epilogues: list[Any], message_bytes: int, facts: Any
) -> Profile:
    """Return the profile that --profile names, else one of what was timed between the steps."""
    from calibrate.real_steps.profile_from_steps import profile_of_rounds

    if wanted.profile:
        return load_profile(wanted.profile)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    name = f"paired with {scenario.name}"
    return profile_of_rounds(name, date, logs, epilogues, message_bytes, scenario.parallelism, facts)


if __name__ == "__main__":
    main() if is_rank() else run_command(main)  # a rank's parent reports how it ended
