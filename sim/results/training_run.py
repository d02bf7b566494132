"""The length of a whole training: steps, days and GPU hours for a number of tokens.

A step takes `global_batch_size · seq_len` tokens. With a schedule of batch sizes each phase lasts until the next one's
`from_tokens` and has a step of its own, which is simulated; MiniMax-01 grew its batch so from 16M to 128M tokens
(arXiv 2501.08313, its pre-training's settings). Every step of a phase takes the same time: failures, checkpoints and
evaluations are left out (`sim.run --days` has the first two).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sim.core.units import DAY_S, HOUR_S
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import BatchPhase
from sim.results.records import Record


class Phase(Record, frozen=True):
    """Tokens from … to at one batch size, the last step whole."""

    from_tokens: float
    to_tokens: float
    global_batch_size: int
    step_time_s: float
    steps: int
    days: float
    gpu_hours: float


class TrainingRun(Record, frozen=True):
    """A whole training (`training.tokens`): the sum over the phases of its batch schedule, or its only phase."""

    tokens: float
    steps: int
    days: float
    gpu_hours: float
    batch_schedule: tuple[Phase, ...]


def training_run(scenario: Scenario, step_s: Callable[[Scenario], float]) -> TrainingRun | None:
    """The training that `training.tokens` asks for; None without it. `step_s` simulates a step of a scenario."""
    t = scenario.for_training
    if t.tokens is None:
        return None
    schedule = t.batch_schedule or (BatchPhase(from_tokens=0, global_batch_size=t.global_batch_size),)
    ends = (*(phase.from_tokens for phase in schedule[1:]), t.tokens)
    phases = []
    for phase, end in zip(schedule, ends, strict=True):
        size = phase.global_batch_size
        seconds = step_s(_with_batch(scenario, size))
        steps = math.ceil((end - phase.from_tokens) / (size * t.seq_len))
        taken_s = steps * seconds
        gpu_hours = taken_s / HOUR_S * scenario.gpus
        phases.append(Phase(phase.from_tokens, end, size, seconds, steps, taken_s / DAY_S, gpu_hours))
    return TrainingRun(
        t.tokens,
        sum(p.steps for p in phases),
        sum(p.days for p in phases),
        sum(p.gpu_hours for p in phases),
        tuple(phases),
    )


def _with_batch(scenario: Scenario, size: int) -> Scenario:
    """The scenario of one step with a global batch of `size` sequences, without the length of the training."""
    changes = {"global_batch_size": size, "tokens": None, "batch_schedule": ()}
    return scenario.unchecked_copy(update={"training": scenario.for_training.model_copy(update=changes)})
