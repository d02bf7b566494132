"""Changes that might shorten a step, each simulated: only what helps and fits in memory is said.

A proposal is a list of `--set` overrides of the scenario as its file has it, so that what is said is what a user gets.
Global batch and number of GPUs stay as they are: step times compare. Proposals belong to the part of the step that they
shorten (`sim.results.losses`); the largest parts are tried first. A proposal that the scenario's reader refuses is left
out, and so is one that the scenario has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.results.losses import lost_parts
from sim.results.records import Record
from sim.schedules import FORMS
from sim.simulation import Simulation, simulate
from sim.variants.frameworks.records import framework_of

LEAST_GAIN = 0.002  # of the step: less is not worth a change
QUICK_TASKS = 5_000  # a step of so many has proposals tried unasked; by tasks, since times differ from run to run
MEMORY = "memory"  # the part of a step that does not fit


class Effort(Struct, frozen=True):
    """Hold how many proposals are tried: `each` for each of the `parts` that take the most time."""

    each: int
    parts: int


BRIEF, FULL = Effort(2, 2), Effort(4, 3)  # in passing, and where a page is made of the step or advice is asked for
Changes = tuple[str, ...]
Load = Callable[[Sequence[str]], Scenario]  # the scenario with more overrides


class Tried(Record, frozen=True):
    """A change that was simulated. `part` is what it was meant to shorten; `gain` is of the step's time, negative where
    a step that did not fit takes longer to fit."""

    part: str
    changes: Changes
    step_time_s: float
    gain_s: float
    gain: float
    peak_memory_bytes: float
    peak_reserved_bytes: float
    fit_odds: float


def tried_advice(simulation: Simulation, load: Load, effort: Effort = FULL) -> list[Tried]:
    """Return what helps, the largest gain first; of a step that does not fit in memory, what makes it fit.

    Proposals for the largest losses are tried first.
    """
    fits = simulation.fits_in_memory
    lost = lost_parts(simulation.outcome, simulation.timeline)
    wanted = [p.key for p in lost[: effort.parts]] if fits else [MEMORY]
    most = effort.each if fits else effort.each * effort.parts
    seen: set[Changes] = set()
    found: list[Tried] = []
    for part in wanted:
        count = 0
        for changes in _PROPOSALS[part](simulation.scenario) if part in _PROPOSALS else ():
            if changes in seen or count == most:
                continue
            seen.add(changes)
            other = _simulated(simulation, changes, load)
            if other is None:
                continue
            count += 1
            gain_s = simulation.step_time_s - other.step_time_s
            helps = not fits or gain_s > LEAST_GAIN * simulation.step_time_s
            if helps and other.fit.likely:
                gain, memory = gain_s / simulation.step_time_s, (other.peak_memory_bytes, other.reserved_bytes)
                found.append(Tried(part, changes, other.step_time_s, gain_s, gain, *memory, other.fit.odds))
    return sorted(found, key=lambda t: -t.gain_s)


def may_advise(scenario: Scenario) -> bool:
    """Tell whether a step's changes are compared by its time alone: not beside a teacher or processes of the user's
    own."""
    return scenario.training is not None and scenario.distillation is None and scenario.processes is None


def _simulated(before: Simulation, changes: Changes, load: Load) -> Simulation | None:
    """The step with the changes; None where that is no other step, or none at all."""
    try:
        scenario = load(changes)
        if scenario == before.scenario or scenario.parallelism.ranks != before.scenario.parallelism.ranks:
            return None
        costs = before.pricing.costs if scenario.calibration == before.scenario.calibration else None
        return simulate(scenario, costs=costs, engine="static")
    except InputError:
        return None


def _bubble(scenario: Scenario) -> Iterator[Changes]:
    p, t = scenario.parallelism, scenario.for_training
    if p.pp == 1:
        return
    if p.ep_overlap:
        yield ("parallelism.ep_overlap=false",)
    yield ("parallelism.layers_per_stage=balanced",)
    yield ("parallelism.schedule=zb_v",)
    if FORMS[p.schedule].least_stages is None:
        yield ("parallelism.schedule=interleaved_1f1b",)
    interleaved = () if p.schedule == "interleaved_1f1b" else ("parallelism.schedule=interleaved_1f1b",)
    yield (*interleaved, f"parallelism.virtual_stages={2 * max(2, p.virtual_stages)}")
    yield ("parallelism.schedule=zb_h1",)
    if t.micro_batch_size % 2 == 0:
        yield (f"training.micro_batch_size={t.micro_batch_size // 2}",)
    if p.pp % 2 == 0:
        yield (f"parallelism.pp={p.pp // 2}", f"parallelism.dp={2 * p.dp}")


def _communication(scenario: Scenario) -> Iterator[Changes]:
    p = scenario.parallelism
    if p.tp > 1:
        yield ("parallelism.sp=true",)
        if p.tp_overlap == "none" and framework_of(scenario.for_training).overlaps_weight_gradients:
            yield ("parallelism.tp_overlap=wgrad",)
        yield (*(() if p.sp else ("parallelism.sp=true",)), "parallelism.tp_overlap=full")
        yield (f"parallelism.tp={p.tp // 2}", f"parallelism.dp={2 * p.dp}")
    if p.cp > 1:
        yield ("parallelism.cp_method=ring",)
        yield ("parallelism.cp_split=zigzag",)
    if p.ep > 1:
        # Hiding has a price: both halves of a pair end with it, so what waits for the first half waits for longer.
        yield (f"parallelism.ep_overlap={str(not p.ep_overlap).lower()}",)
        yield ("parallelism.ep_dispatch_dtype=fp8",)
    if p.dp * p.cp > 1:
        yield ("parallelism.dp_sync=bucketed",)
        yield ("parallelism.param_gather_overlap=true",)
        yield ("parallelism.accumulate_unsharded=true",)
        yield ("training.grad_reduce_dtype=bf16",)
    if p.pp > 1:
        yield ("parallelism.p2p_overlap=true",)
    yield from _larger(scenario)


def _below_peak(scenario: Scenario) -> Iterator[Changes]:
    p, t = scenario.parallelism, scenario.for_training
    yield from _compiled(scenario)
    moe = scenario.model.moe
    fixed_shapes = moe is None or moe.pad_to_capacity  # else no graph holds a whole layer
    if framework_of(t).captures_layers and t.cuda_graphs == "none" and fixed_shapes:
        yield ("training.cuda_graphs=layers",)
    if t.cross_entropy in ("unfused", "native"):
        yield ("training.cross_entropy=fused",)
    yield from _larger(scenario)
    yield ("training.attention=fused",)
    if scenario.model.window is not None and framework_of(t).sees_masks(
        t.attention == "fused", t.attention_kernel, p.cp
    ):
        yield ("training.attention_kernel=flash2",)
    if p.tp > 1:
        yield (f"parallelism.tp={p.tp // 2}", f"parallelism.dp={2 * p.dp}")
        yield ("parallelism.sp=true",)


def _compiled(scenario: Scenario) -> Iterator[Changes]:
    """The same trainer's torch.compile. Another trainer is no change of a run, and is not proposed."""
    if name := framework_of(scenario.for_training).under_torch_compile:
        yield (f"training.framework={name}",)


def _larger(scenario: Scenario) -> Iterator[Changes]:
    """Micro-batches of twice the size."""
    if scenario.micro_batches > 1:
        yield (f"training.micro_batch_size={2 * scenario.for_training.micro_batch_size}",)


def _recompute(scenario: Scenario) -> Iterator[Changes]:
    t, layers = scenario.for_training, scenario.model.layers
    selective = ("training.recompute=selective",)
    yield ("training.recompute=none",)
    if t.attention == "unfused":  # whose scores are most of the activations; fused attention keeps none
        yield selective
    # Of some layers, where not all of their activations fit. A pipeline counts the layers of a stage.
    if t.recompute.mode == "full" and t.recompute.layers is None and t.recompute.every is None:
        for parts in (1, 2, 3):
            if scenario.parallelism.pp == 1 and (some := layers * parts // 4) > 0:
                yield ("training.recompute.mode=full", f"training.recompute.layers={some}")
    yield selective


def _optimizer(scenario: Scenario) -> Iterator[Changes]:
    if scenario.parallelism.dp * scenario.parallelism.cp > 1:
        yield ("parallelism.zero=1",)
    yield from _compiled(scenario)


def _to_fit(scenario: Scenario) -> Iterator[Changes]:
    """Less memory, the cheapest first."""
    p, t = scenario.parallelism, scenario.for_training
    if t.cross_entropy != "chunked":
        yield ("training.cross_entropy=chunked",)
    if t.micro_batch_size % 2 == 0:
        yield (f"training.micro_batch_size={t.micro_batch_size // 2}",)
    for stage in range(p.zero + 1, 4) if p.dp * p.cp > 1 else ():
        yield (f"parallelism.zero={stage}",)
    if t.recompute.mode != "full":
        yield ("training.recompute=selective",)
        yield ("training.recompute=full",)
        if p.dp * p.cp > 1 and p.zero < 3:
            yield ("parallelism.zero=3", "training.recompute=full")
    if p.dp % 2 == 0:
        yield (f"parallelism.tp={2 * p.tp}", f"parallelism.dp={p.dp // 2}", "parallelism.sp=true")


_PROPOSALS: dict[str, Callable[[Scenario], Iterator[Changes]]] = {
    "bubble": _bubble,
    "communication": _communication,
    "below_peak": _below_peak,
    "recompute": _recompute,
    "optimizer": _optimizer,
    "other": _bubble,
    MEMORY: _to_fit,
}
