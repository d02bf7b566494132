"""Batch planning: a global batch cut into data-parallel ranks, micro-batches and accumulation, by memory and time.

global batch = micro-batch · accumulation · dp. `plan_batch` simulates the cuts around a scenario's own and names the
fastest that fits.

How large the global batch should be is the critical batch size's business (McCandlish et al. 2018, "An Empirical Model
of Large-Batch Training", arXiv 1812.06162): below it twice the batch halves the steps to a loss, above it only costs
tokens. `calibrate.noise_scale` estimates it from gradients; without such a measurement `kaplan_critical_tokens` says
what Kaplan et al. 2020 (arXiv 2001.08361) found for language models at a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario

KAPLAN_TOKENS, KAPLAN_EXPONENT = 2.1e8, 0.21  # B* and alpha_B of their table 6
MICRO_BATCHES = tuple(2**i for i in range(9))
DP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)

Load = Callable[[list[str]], Scenario]


class Cut(Struct, frozen=True):
    """One way to cut the global batch, and what the simulator says about it."""

    dp: int
    micro_batch_size: int
    accumulation: int
    gpus: int
    peak_memory_bytes: float
    peak_reserved_bytes: float
    fits_in_memory: bool
    step_time_s: float
    tokens_per_s_per_gpu: float


def plan_batch(load: Load, factors: tuple[float, ...] = DP_FACTORS) -> list[Cut]:
    """Simulate all cuts with dp at `factors` of the scenario's and micro-batches of powers of two.

    `load` gives the scenario with overrides ("parallelism.dp=4"). Of one dp larger micro-batches are left out once two
    have not fitted. Fits first, then by step time.

    Raises:
        InputError: if the scenario is no training step.
    """
    base = load([])
    if base.training is None:
        raise base.error(("training",), "is missing; --plan-batch needs it")
    if base.rl is not None:
        raise base.error(("rl",), "--plan-batch is not for an rl step")
    batch, own = base.training.global_batch_size, base.parallelism.dp
    cuts: list[Cut] = []
    for dp in sorted({int(own * f) for f in factors if own * f >= 1 and own * f == int(own * f)}):
        missed = 0
        for micro in MICRO_BATCHES:
            if batch % (dp * micro) or missed == 2:
                continue
            cut = _simulated(load, dp, micro)
            if cut is not None:
                cuts.append(cut)
                missed += not cut.fits_in_memory
    return sorted(cuts, key=lambda c: (not c.fits_in_memory, c.step_time_s, c.micro_batch_size))


def _simulated(load: Load, dp: int, micro: int) -> Cut | None:
    """The cut's figures; None where the scenario's other keys forbid it (too few nodes, a schedule's multiple)."""
    from sim.simulation import simulate

    try:
        scenario = load([f"parallelism.dp={dp}", f"training.micro_batch_size={micro}"])
        r = simulate(scenario, engine="static").outcome
    except InputError:
        return None
    figures = (r.peak_memory_bytes, r.peak_reserved_bytes, r.fits_in_memory, r.step_time_s, r.tokens_per_s_per_gpu)
    return Cut(dp, micro, scenario.micro_batches, scenario.parallelism.ranks, *figures)


class BatchSize(Struct, frozen=True):
    """The cost of a global batch of this size until a loss, in multiples of the fewest steps and tokens possible.

    `time_s`: of as many steps as `steps_factor` says, for every one of the fewest.
    """

    global_batch_size: int
    accumulation: int
    step_time_s: float
    steps_factor: float
    tokens_factor: float
    time_s: float


def batch_sizes(load: Load, critical: float) -> list[BatchSize]:
    """The scenario's own global batch, an eighth to 32 times of it, on its GPUs and with its micro-batches, and what
    each costs to a loss at a critical batch size: steps (and with them time) fall up to it, tokens grow beyond.

    Raises:
        InputError: if the scenario is no training step.
    """
    from sim.simulation import simulate

    base = load([])
    if base.training is None:
        raise base.error(("training",), "is missing; --critical-batch needs it")
    least = base.parallelism.dp * base.training.micro_batch_size
    out = []
    for exponent in range(-3, 6):
        batch = base.training.global_batch_size * 2.0**exponent
        if batch % least:
            continue
        try:
            scenario = load([f"training.global_batch_size={int(batch)}"])
            step_s = simulate(scenario, engine="static").outcome.step_time_s
        except InputError:
            continue  # a schedule's multiple
        steps = steps_factor(batch, critical)
        out.append(
            BatchSize(int(batch), scenario.micro_batches, step_s, steps, tokens_factor(batch, critical), steps * step_s)
        )
    return out


def steps_factor(batch: float, critical: float) -> float:
    """Optimizer steps to a loss, in multiples of the fewest possible: 1 + critical/batch (equation 5.1).

    >>> steps_factor(512, 512), steps_factor(1e9, 512) < 1.001
    (2.0, True)
    """
    return 1.0 + critical / batch


def tokens_factor(batch: float, critical: float) -> float:
    """Tokens to a loss, in multiples of the fewest possible: 1 + batch/critical (equation 5.1).

    >>> tokens_factor(512, 512), tokens_factor(1, 512) < 1.01
    (2.0, True)
    """
    return 1.0 + batch / critical


def kaplan_critical_tokens(loss: float) -> float:
    """Critical batch size in tokens at a training loss in nats: B* / L^(1/alpha_B) (Kaplan et al. 2020, equation 5.3).

    It depends on the loss alone, whatever the model's size, and doubles for every 13 % that the loss falls.

    >>> round(kaplan_critical_tokens(4.0) / 1e6, 2), round(kaplan_critical_tokens(2.0) / 1e6, 1)
    (0.29, 7.7)
    """
    return KAPLAN_TOKENS / float(loss ** (1.0 / KAPLAN_EXPONENT))


def as_dict(
    cuts: list[Cut], scenario: Scenario, critical: float | None, sizes: Sequence[BatchSize] = ()
) -> dict[str, Any]:
    """The plan as JSON: all cuts, the best, and (with a critical batch size) what the global batch costs."""
    batch = scenario.for_training.global_batch_size
    best = next((c for c in cuts if c.fits_in_memory), None)
    out: dict[str, Any] = {
        "format": "sim-batch-plan/1",
        "name": scenario.name,
        "global_batch_size": batch,
        "cuts": [asdict(c) for c in cuts],
        "best": asdict(best) if best else None,
    }
    if critical is not None:
        out |= {"critical_batch_size": critical, "batch_sizes": [asdict(s) for s in sizes]}
        out |= {"steps_factor": steps_factor(batch, critical), "tokens_factor": tokens_factor(batch, critical)}
    return out
