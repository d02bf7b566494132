"""Memory over the first steps of a real training, as torch's allocator on the CPU sees it.

    python -m calibrate.memory_curve

A small model trains with torch's AdamW and `zero_grad()`, which sets gradients to None. Each allocation and release is
recorded (`torch.profiler`, `profile_memory`), so gradients are seen to come in the backward and to go, and the
optimizer's states to come at the end of the first step. Beside it stands the simulation of the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from calibrate.model import Build, make_blocks
from calibrate.quantization import loss, text
from sim.inputs.scenario import Scenario, load_scenario
from sim.inputs.shipped import scenarios_folder
from sim.simulation import simulate

SCENARIO = "memory_steps_cpu.yaml"
STEPS = 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one step: parameters and optimizer states as it begins, the most while it runs, and as it ends."""

    before: float
    peak: float
    after: float


def record(scenario: Scenario, steps: int = STEPS) -> list[StepMemory]:
    """Train for so many steps, and say what each had in memory."""
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
    """The same of the simulated steps; what is left at a step's end is what the next one begins with."""
    step = simulate(scenario)
    curve, length_s = step.memory_over(steps)[0], step.step_time_s
    out = []
    for i in range(steps):
        mine = (curve.time_s >= i * length_s) & (curve.time_s < (i + 1) * length_s)
        lasting = curve.parameters[mine] + curve.optimizer[mine]
        out.append(StepMemory(float(lasting[0]), float(curve.total[mine].max()), float(lasting[-1])))
    return out


def main() -> None:
    """Print both."""
    scenario = load_scenario(scenarios_folder() / SCENARIO)
    print(f"{'step':>4} {'':10} {'begins with':>12} {'peak':>12} {'ends with':>12}")
    for i, rows in enumerate(zip(record(scenario), simulated(scenario), strict=True)):
        for name, row in zip(("recorded", "simulated"), rows, strict=True):
            megabytes = (f"{value / 1e6:>9.2f} MB" for value in (row.before, row.peak, row.after))
            print(f"{i + 1:>4} {name:10} {' '.join(megabytes)}")


if __name__ == "__main__":
    main()
