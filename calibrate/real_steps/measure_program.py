"""Runs the code that a program was captured from: the same function or config, with real tensors."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calibrate.capture.failure import failure
from calibrate.capture.options import Options
from calibrate.capture.recorder import STANDS_FOR
from calibrate.capture.run_step import autocast_of, gradients_of
from calibrate.capture.step_checks import StepRefused, checked_loss
from calibrate.capture.what import maker
from calibrate.parallel.pipeline import Record
from calibrate.real_steps.operator_times import VIEWS, OperatorTimes, operator_times
from calibrate.timings.fused import peak_bytes
from sim.core.errors import InputError
from sim.inputs.program_file import CapturedProgram, read_program

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

OPERATOR_STEPS = 5  # steps with a clock around each operator, which slows them; other steps are timed as a whole


def check_program(scenario: Scenario, where: str) -> CapturedProgram:
    """Return the program of a scenario whose code can be run for real, which is on one rank.

    Raises:
        InputError: names the key that prevents it.
    """
    if scenario.model.program is None:
        raise InputError(f"{where}: model.program: is missing; --program runs the code of a captured program")
    if scenario.parallelism.ranks != 1:
        found = scenario.parallelism.ranks
        raise InputError(f"{where}: parallelism: found {found} ranks; calibrate.measure --program runs one")
    program = read_program(Path(scenario.model.program))
    wanted = "cpu" if scenario.cluster.gpu.chip.is_host else "cuda"
    if program.device != wanted:
        said = f"was captured for {program.device}, the cluster has {wanted}: capture it with --device {wanted}"
        raise InputError(f"{where}: model.program: {scenario.model.program} {said}")
    return program


def options_of(program: CapturedProgram) -> Options:
    """Return the options with which a Hugging Face config was captured, from the program's own facts."""
    facts = program.facts
    clips = any(o.phase == "clip" for o in program.operators)
    new_tokens = int(facts.get("new_tokens", 0))
    return Options(
        seq_len=program.seq_len - new_tokens,
        micro_batch_size=program.micro_batch_size,
        weights=str(facts.get("weights", "fp32")),
        autocast=program.autocast,
        attention=facts.get("attention_chosen", facts.get("attention")),
        gradient_checkpointing=bool(facts.get("gradient_checkpointing")),
        optimizer=program.optimizer,
        lora_rank=facts.get("lora_rank"),
        clip_grad_norm=1.0 if clips else None,
        forward=program.forward_alone,
        new_tokens=new_tokens or None,
        random_values=True,
    )


class ProgramRunner:
    """Steps of a captured program's code; see `calibrate.real_steps.timed_rounds.Steps`.

    On a CPU steps are timed in CPU time: one thread computes, and other processes lengthen CPU time least.
    """

    def __init__(self, scenario: Scenario, program: CapturedProgram, what: str, device: str) -> None:
        self.device, self.micro_batches, self.what = device, scenario.micro_batches, what
        torch.manual_seed(0)
        with torch.device(device):
            self.wanted = maker(what, options_of(program))()
        self._losses, self._begin_ns = list[Tensor](), 0

    def first_step(self) -> None:
        """Run a step that is not timed: the optimizer's states appear.

        Raises:
            InputError: with the line of the code, if the code fails.
        """
        try:
            self.step(self.batch(0))
        except StepRefused as error:
            raise InputError(f"{self.what}: {error}") from None
        except InputError:
            raise
        except Exception as error:
            raise failure(error, self.what) from None

    def batch(self, number: int) -> Tensor:
        """Return an empty batch; the step's own function makes its data."""
        return torch.empty(0)

    def zero_losses(self) -> None:
        """Do nothing; `loss` is always that of the last step."""
        self._losses = []

    def loss(self) -> float:
        """Return the mean loss over the micro-batches of the last step."""
        return sum(float(x) for x in self._losses) / self.micro_batches

    def step(self, batch: Tensor, times: OperatorTimes | None = None) -> list[Record]:
        """Run a step of all micro-batches, starting without gradients; of a forward alone nothing else."""
        step, records = self.wanted, list[Record]()

        def begin(phase: str) -> int:
            if times is not None:
                times.phase = phase
            return self._now()

        self._begin_ns = time.perf_counter_ns() - time.process_time_ns()
        step.model.zero_grad(set_to_none=True)
        for i in range(self.micro_batches):
            start = begin("forward")
            with torch.device(self.device), autocast_of(step, self.device), gradients_of(step):
                loss = step.loss()
            middle = begin("backward")
            if step.optimizer is None:
                records.append(Record("F", 0, i, start, middle))
                continue
            checked_loss(loss).backward()
            end = begin("optimizer")
            records += [Record("F", 0, i, start, middle), Record("B", 0, i, middle, end)]
            self._losses.append(loss.detach())
        if step.optimizer is None:
            return records
        start = begin("optimizer")
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
        step.optimizer.step()
        return [*records, Record("OPTIMIZER", -1, -1, start, self._now())]

    def _now(self) -> int:
        if self.device == "cpu":
            return self._begin_ns + time.process_time_ns()
        torch.cuda.synchronize()
        return time.perf_counter_ns()

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes in a step, optimizer states included."""
        step = self.wanted
        state = {} if step.optimizer is None else step.optimizer.state
        states = [x for s in state.values() for x in s.values() if isinstance(x, Tensor)]
        held = {x.untyped_storage()._cdata: x for x in (*step.model.parameters(), *step.model.buffers(), *states)}

        def work() -> None:
            step.model.zero_grad(set_to_none=True)
            self.step(self.batch(0))
            step.model.zero_grad(set_to_none=True)

        return sum(x.untyped_storage().nbytes() for x in held.values()) + peak_bytes(self.device, work)

    def operators(self) -> list[dict[str, Any]]:
        """Return each operator's seconds in a step; see `operator_times`."""
        return operator_times(self.device, OPERATOR_STEPS, lambda times: void(self.step(self.batch(0), times)))


def void(_: object) -> None:
    """Do nothing."""


def differences(program: CapturedProgram, operators: list[dict[str, Any]], micro_batches: int) -> dict[str, int]:
    """Return launches of a real step less captured launches, for each operator in which they differ."""
    captured: Counter[str] = Counter()
    for o in program.operators:
        if o.launches:
            captured[STANDS_FOR.get(o.name, o.name)] += 1 if o.phase in ("clip", "optimizer") else micro_batches
    ran: Counter[str] = Counter()
    for row in operators:
        ran[row["operator"]] += row["count"]
    names = (captured.keys() | ran.keys()) - {VIEWS}
    return {name: ran[name] - captured[name] for name in sorted(names) if ran[name] != captured[name]}
