"""Memory over the first steps of a real training, beside the simulation of the same steps.

    python -m calibrate.memory_curve

A small model trains on the CPU with torch's AdamW and `zero_grad()`, which sets gradients to None. `torch.profiler`
records each allocation and release (`profile_memory`). Gradients appear in the backward and are freed after the
optimizer. The optimizer's states appear at the end of the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from calibrate.bundled_model.model import Build, make_blocks
from calibrate.quantization import loss, text
from sim.commands.command import Command, run_command
from sim.inputs.scenario import Scenario, load_scenario
from sim.inputs.shipped import scenarios_folder
from sim.simulation import simulate

SCENARIO = "memory_steps_cpu.yaml"
STEPS = 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Allocated bytes of one step: when it begins, the most while it runs, and when it ends."""

    before: float
    peak: float
    after: float


def record(scenario: Scenario, steps: int = STEPS) -> list[StepMemory]:
    """Train for `steps` steps and return the memory of each."""
    model, training = scenario.model, scenario.for_training
    torch.set_num_threads(1)
    blocks = make_blocks(model, training, range(model.layers + 2), Build(seed=0))
    parameters = [p for b in blocks for p in b.parameters()]
    held = float(sum(p.untyped_storage().nbytes() for p in {id(p): p for p in parameters}.values()))
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    batches = [text(training.global_batch_size, i, model.vocab, training.seq_len + 1) for i in range(steps)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for i, tokens in enumerate(batches):
            with record_function(f"step {i}"):
                loss(blocks, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    events = recorded.profiler.kineto_results.events()
    spans = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith("step ")}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    out, now = [], held
    for i in range(steps):
        begin, end = spans[f"step {i}"]
        before = peak = now
        for at, size in changes:
            if begin <= at < end:
                now += size
                peak = max(peak, now)
        out.append(StepMemory(before, peak, now))
    return out


def simulated(scenario: Scenario, steps: int = STEPS) -> list[StepMemory]:
    """Return the memory of each simulated step; parameters and optimizer states last from one step to the next."""
    step = simulate(scenario)
    curve, length_s = step.memory_over(steps)[0], step.step_time_s
    out = []
    for i in range(steps):
        mine = (curve.time_s >= i * length_s) & (curve.time_s < (i + 1) * length_s)
        lasting = curve.parameters[mine] + curve.optimizer[mine]
        out.append(StepMemory(float(lasting[0]), float(curve.total[mine].max()), float(lasting[-1])))
    return out


@click.command("memory_curve", cls=Command)
def main() -> None:
    """Train a small model for four steps and print its memory beside the simulated one."""
    scenario = load_scenario(scenarios_folder() / SCENARIO)
    print(f"{'step':>4} {'':10} {'begins with':>12} {'peak':>12} {'ends with':>12}")
    for i, rows in enumerate(zip(record(scenario), simulated(scenario), strict=True)):
        for name, row in zip(("recorded", "simulated"), rows, strict=True):
            megabytes = (f"{value / 1e6:>9.2f} MB" for value in (row.before, row.peak, row.after))
            print(f"{i + 1:>4} {name:10} {' '.join(megabytes)}")


if __name__ == "__main__":
    run_command(main)
