"""A simulated step against a measured one: step time, actions, ranks, memory, operators."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.timeline import ACTION_KINDS, RECEIVES, SENDS, Detail, Span, Timeline
from sim.engine.run import run_static
from sim.inputs.measured_run import MeasuredRun, TorchBeside
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.results.operator_times import time_by_operator
from sim.simulation import Simulation, simulate
from sim.studies.compared import (
    ActionPair,
    Comparison,
    Ends,
    MemoryPair,
    OperatorPair,
    Pair,
    RankPair,
    Steps,
    TorchPair,
)
from sim.studies.measured import RAN, own_schedule, parsed_scenario
from sim.studies.memory_over_steps import over_steps

_Key = tuple[str, int, int, int, int]  # kind, stage, micro-batch, rank (-1: several), how many before it
CANCELS = 0.05  # of the step: parts that are off by more in both directions
OF_A_RANK = (*ACTION_KINDS, "OPTIMIZER")  # kinds of one rank alone; all others are communications
SENT_AS = dict(zip(RECEIVES, SENDS, strict=True))  # a message has the name of its sending end
PHASE_RAN = {"input_grad": "backward", "weight_grad": "backward"}


def compare(simulation: Simulation, run: MeasuredRun, measured: Timeline, tolerance: float) -> Comparison:
    """Compare a simulated step with a measured one, whose timeline is `measured`."""
    simulated = simulation.timeline
    step = Pair.of(simulation.outcome.step_time_s, run.step_time_s)
    actions = _kinds(simulated, measured)
    cancelled = _cancelled(actions, len(measured.classes), run.step_time_s) if run.step_time_s else None
    return Comparison(
        scenario=simulation.scenario.name,
        profile=simulation.profile.name,
        step_time_s=step,
        step_time_interval_s=simulation.outcome.step_time_interval_s,
        noise=run.noise,
        quiet=run.quiet,
        others_cores=run.others_cores,
        warnings=tuple(run.warnings),
        steps=Steps(len(run.step_times_s), min(run.step_times_s), max(run.step_times_s)),
        actions=actions,
        cancelled=cancelled,
        replay=_replay(simulation, measured),
        action_ends=_ends(simulation, simulated, measured, run.step_time_s),
        ranks=_ranks(simulation, measured),
        memory=_memory(simulation, run),
        memory_over_steps=over_steps(simulation, run),
        operators=operators(simulation, run) if run.operators else None,
        torch=None if run.torch is None else _torch(step.simulated, run.torch),
        tolerance=tolerance,
        within_tolerance=step.error is not None and abs(step.error) <= tolerance,
    )


def _torch(simulated_s: float, torch: TorchBeside) -> TorchPair:
    theirs_s, ours_s = (statistics.median(times) for times in (torch.step_times_s, torch.bundled_step_times_s))
    return TorchPair(torch.what, Pair.of(simulated_s, theirs_s), Pair.of(simulated_s, ours_s))


def operators(simulation: Simulation, run: MeasuredRun) -> tuple[OperatorPair, ...]:
    """Seconds of each operator of a step, those that differ most first; `between operators` is what their seconds leave
    of the measured step: Python, autograd, the clock's own time left out."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in time_by_operator(simulation)[0].operators:
        sums[row.operator, PHASE_RAN.get(row.phase, row.phase)] += row.seconds
    measured = {(o.operator, o.phase): o.seconds for o in run.operators}
    left_s = max(0.0, run.step_time_s - sum(measured.values()))
    pairs = [(key, sums.get(key, 0.0), measured.get(key, 0.0)) for key in dict.fromkeys([*sums, *measured])]
    pairs.append((("between operators", ""), 0.0, left_s))
    rows = [OperatorPair.of(a, b, operator=name, phase=phase) for (name, phase), a, b in pairs]
    return tuple(sorted(rows, key=lambda row: -abs(row.simulated - row.measured)))


def _kinds(simulated: Timeline, measured: Timeline) -> dict[str, ActionPair]:
    """Mean seconds of one action, for each kind that either side has; of communications that the sides cut into other
    numbers of messages, such as buckets, the seconds of all."""
    means = [_mean_by_kind(t.spans()) for t in (simulated, measured)]
    out = {}
    for kind in dict.fromkeys([*means[1], *means[0]]):
        (a, n), (b, k) = (m.get(kind, (0.0, 0)) for m in means)
        whole = kind not in OF_A_RANK and 0 < n != k > 0
        sides = (a * n, b * k) if whole else (a, b)
        out[kind] = ActionPair.of(*sides, simulated_count=n, measured_count=k, whole=whole)
    return out


def _cancelled(actions: Mapping[str, ActionPair], ranks: int, step_s: float) -> str | None:
    """Say that parts of a rank's step are too long by about what others are too short, so that the step's error is
    small by chance; None where they are not."""
    apart = {}
    for kind, pair in actions.items():
        often = 1.0 if pair.whole else pair.measured_count / (ranks if kind in OF_A_RANK else 1)
        if all(pair.sides):
            apart[kind] = (pair.simulated - pair.measured) * often / step_s
    longer, shorter = (max(apart, key=lambda kind: sign * apart[kind], default=None) for sign in (1, -1))
    if longer is None or shorter is None or min(apart[longer], -apart[shorter]) < CANCELS:
        return None
    said = f"{longer} is too long by {apart[longer]:.0%} of the step, {shorter} too short by {-apart[shorter]:.0%}"
    return f"errors of parts cancel: {said}".replace("%", " %")


def _mean_by_kind(spans: Iterable[Span]) -> dict[str, tuple[float, int]]:
    """Mean seconds and number of parts; messages under the name of their sending end."""
    out: dict[str, list[float]] = defaultdict(list)
    for key, seconds in _durations(spans).items():
        out[key[0]].append(seconds)
    return {kind: (sum(t) / len(t), len(t)) for kind, t in out.items()}


def _durations(spans: Iterable[Span]) -> dict[_Key, float]:
    """Seconds of every part; of what ends a step the sum, of communications without waiting for other ranks.

    A communication takes from the last start of its members to its last end; a message until it is received. Ranks may
    start several chunks' collectives of a kind at once: each waits for the one that the same ranks started before it.
    """
    sums: dict[_Key, float] = defaultdict(float)
    starts: dict[_Key, float] = {}
    ends: dict[_Key, float] = {}
    members: dict[_Key, set[int]] = defaultdict(set)
    for key, s in _keyed(spans):
        if key[3] >= 0:
            sums[key] += s.end_s - s.start_s
        else:
            starts[key] = max(s.start_s, starts.get(key, s.start_s))
            ends[key] = max(0.0 if s.kind in SENDS else s.end_s, ends.get(key, 0.0))
            members[key].add(s.rank)
    free: dict[tuple[str, frozenset[int]], float] = {}  # when a kind's queue among the same ranks was empty again
    for key in sorted(starts, key=starts.__getitem__):
        queue = key[0], frozenset(members[key])
        start_s = starts[key] if key[0] in SENDS else max(starts[key], free.get(queue, 0.0))
        sums[key] = max(ends[key] - start_s, 0.0)
        free[queue] = max(ends[key], free.get(queue, 0.0))
    return sums


def _keyed(spans: Iterable[Span]) -> Iterator[tuple[_Key, Span]]:
    """Spans with the name of what they are part of: a rank's action, a message or collective of several.

    An action's computations are one part, and so is all that ends a rank's step (clipping, optimizer): the two sides
    may cut them differently.
    """
    seen: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for s in spans:
        own = (s.kind, s.stage, s.micro_batch, s.rank)
        alone = s.kind in OF_A_RANK
        count = 0 if alone else seen[own]
        yield (SENT_AS.get(s.kind, s.kind), s.stage, s.micro_batch, s.rank if alone else -1, count), s
        seen[own] += 1


def _replay(simulation: Simulation, measured: Timeline) -> Pair | None:
    """The simulated graph with recorded durations; None where gradients or parameters travel within actions, a teacher,
    which is no part of the graph, takes time, or the run did not record what travels (on a GPU, within a layer)."""
    built = simulation.built
    if simulation.teacher is not None:
        return None
    if not simulation.expanded and any((acted.first != acted.last).any() for acted in built.actions):
        return None
    simulated, recorded = _durations(simulation.timeline.spans()), _durations(measured.spans())
    if {key[0] for key in simulated} - {key[0] for key in recorded}:
        return None
    graph, kinds = built.graph, tuple(built.graph.span_kinds)
    seconds, stages, micro_batches = graph.seconds.copy(), graph.stages.tolist(), graph.micro_batches.tolist()
    slots = sorted(graph.slot_table().tolist(), key=lambda slot: float(simulation.times.start_s[slot[0]]))
    spans = [
        Span(graph.classes[c].rank, "", kinds[k], stages[i], micro_batches[i], i, i, Detail("")) for i, c, _, k in slots
    ]
    for (task, *_), (key, _) in zip(slots, _keyed(spans), strict=True):
        if key in recorded and simulated[key] > 0:
            seconds[task] = graph.seconds[task] * recorded[key] / simulated[key]
    again = run_static(replace(graph, columns=graph.columns._replace(seconds=seconds)))
    return Pair.of(again.step_s, measured.step_time_s)


def _class_rank(simulation: Simulation, rank: int) -> int:
    """The simulated rank that stands for `rank`."""
    return simulation.plan.classes[simulation.plan.class_of(rank)].rank


def _ranks(simulation: Simulation, measured: Timeline) -> tuple[RankPair, ...]:
    sides = [_compute_by_rank(t.spans()) for t in (simulation.timeline, measured)]
    out = []
    for c in measured.classes:
        a = sides[0].get(_class_rank(simulation, c.rank), (0.0, 0.0))
        b = sides[1].get(c.rank, (0.0, 0.0))
        out.append(RankPair(c.rank, Pair.of(a[0], b[0]), Pair.of(a[1], b[1])))
    return tuple(out)


def _compute_by_rank(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    out: dict[int, tuple[float, float]] = {}
    for s in spans:
        if s.kind in ACTION_KINDS:
            busy, end = out.get(s.rank, (0.0, 0.0))
            out[s.rank] = (busy + s.end_s - s.start_s, max(end, s.end_s))
    return out


def _ends(simulation: Simulation, simulated: Timeline, measured: Timeline, step_s: float) -> Ends:
    ends, real = (_action_ends(t) for t in (simulated, measured))
    distances = []
    for (rank, *action), end_s in real.items():
        key = (_class_rank(simulation, rank), *action)
        if key in ends:
            distances.append(abs(ends[key] - end_s) / step_s)
    if not distances:
        return Ends(0.0, 0.0)
    return Ends(sum(distances) / len(distances), max(distances))


def _action_ends(timeline: Timeline) -> dict[tuple[int, str, int, int], float]:
    """End of the last computation of every F, B and W, by rank, kind, stage and micro-batch."""
    ends: dict[tuple[int, str, int, int], float] = {}
    for s in timeline.spans():
        if s.kind in ACTION_KINDS:
            key = (s.rank, s.kind, s.stage, s.micro_batch)
            ends[key] = max(s.end_s, ends.get(key, 0.0))
    return ends


def _memory(simulation: Simulation, run: MeasuredRun) -> tuple[MemoryPair, ...]:
    rows = {row.rank: row for row in simulation.outcome.memory}
    out = []
    for m in run.memory:
        row = rows[_class_rank(simulation, m.rank)]
        saved = m.saved_for_backward_bytes
        kept = None if saved is None else Pair.of(row.activations, saved)
        out.append(MemoryPair(m.rank, Pair.of(row.peak, m.allocated_peak_bytes), kept))
    return tuple(out)


def simulate_run(scenario: Scenario, run: MeasuredRun, profile: Profile, where: str) -> Simulation:
    """The scenario of a measured run, simulated as it was run; `where` starts error messages."""
    scenario, p = _with_buffers(scenario), scenario.parallelism
    within_actions = p.tp * p.cp * p.ep > 1  # communications that a recorded action is cut at
    schedule = own_schedule(run, scenario, where)
    return simulate(scenario, profile, schedule=schedule, expand=within_actions, fold=not within_actions)


def _with_buffers(scenario: Scenario) -> Scenario:
    """The scenario with gradients that stay between steps, as `calibrate.measure` runs it; captured ones say it all."""
    t = scenario.for_training
    if t.zero_grad is not None or scenario.model.program is not None:
        return scenario
    return scenario.unchecked_copy(update={"training": t.model_copy(update={"zero_grad": "keep"})})


def check_same(scenario: Scenario, run: MeasuredRun, where: str) -> None:
    """Check that the run is of this scenario: the same model, training and parallelism.

    Raises:
        InputError: naming the first key that differs.
    """
    cluster = scenario.cluster.model_dump(mode="json")
    ran = parsed_scenario(run, where, cluster)
    # What a model was made for changes no step; the record of a learned table does not tell it from the table's length.
    a, b = ({key: value for key, value in s.model_dump("json").items() if key in RAN} for s in (scenario, ran))
    for workload in (a, b):
        workload["model"].pop("trained_positions", None)
    different = _difference(a, b, "")
    if different is not None:
        key, ours, theirs = different
        raise InputError(f"{where}: scenario.{key}: found {theirs}, but the scenario file has {ours}")
    ranks = scenario.parallelism.ranks
    beyond = [r for r in (*(a.rank for a in run.actions), *(m.rank for m in run.memory)) if r >= ranks]
    if beyond:
        raise InputError(f"{where}: actions.rank: found {beyond[0]}; allowed: 0 to {ranks - 1}")


def _difference(a: Any, b: Any, key: str) -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys([*a, *b]):
            found = _difference(a.get(name), b.get(name), f"{key}.{name}" if key else name)
            if found is not None:
                return found
        return None
    return None if a == b else (key, a, b)
