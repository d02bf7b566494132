"""The result of a simulated step: `StepResult`, and how each of its numbers is worked out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.gc_paused import no_collection
from sim.core.operator_kinds import MODEL_FLOPS_KINDS
from sim.core.program import Compute
from sim.graph.taskgraph import Message
from sim.inputs.scenario import Scenario
from sim.models.source import source_of
from sim.prices.rank_prices import efficiencies_not_read
from sim.prices.roofline import Device
from sim.programs.compile import compile_program
from sim.ranks.equal_ranks import APART_RANKS
from sim.ranks.faults import disturbs, has_jitter
from sim.results.certainty import step_interval
from sim.results.fault_costs import ROUNDING, FaultCost, Waiting, waiting
from sim.results.fit import Fit
from sim.results.memory import AtMost
from sim.results.metrics import RankSeconds, mean, provenance, rank_seconds, roofline_warnings
from sim.results.processes import ProcessesResult
from sim.results.records import Engine, MemoryRow, Provenance, Record
from sim.results.step import FinishedStep
from sim.results.teacher import Distilled
from sim.results.training_run import TrainingRun


class Utilization(Record, frozen=True):
    """Model FLOP/s on each GPU, and its share of the peak: MFU with causal and with full attention, and HFU, which
    counts recomputed FLOPs and a frozen reference's too. Of GPUs of several kinds all peaks are summed."""

    model_flops_per_s_per_gpu: float
    mfu: float
    mfu_full_attention: float
    hfu: float

    def scaled(self, factor: float) -> Utilization:
        """All figures times a factor."""
        own = (self.model_flops_per_s_per_gpu, self.mfu, self.mfu_full_attention, self.hfu)
        return Utilization(*(x * factor for x in own))


class MeanRank(Record, frozen=True):
    """Means over ranks. `bubble_fraction`: seconds idle for want of input ÷ those of the step; `bubble_ratio`: ÷ those
    busy in F, B and W. `exposed_comm_s`: communication with no computation beside it."""

    bubble_fraction: float
    bubble_ratio: float
    exposed_comm_s: float
    compute_s: float


class MiddleLayer(Record, frozen=True):
    """Forward and backward of one middle layer for one micro-batch, alone, its own communication included."""

    layer_forward_s: float
    layer_backward_s: float


class RankRow(Record, frozen=True):
    """Seconds of a step on a class of equal ranks; `waiting_s`: step − `compute_s` − `exposed_comm_s` − `bubble_s`."""

    ranks: str
    rank: int  # the lowest
    count: int
    pipeline_rank: int
    compute_s: float
    busy_s: float  # in F, B and W
    exposed_comm_s: float
    bubble_s: float
    waiting_s: float


class Slowed(Record, frozen=True):
    """Communications of one kind on a class of ranks that others on their links slowed: their number, and the seconds
    that all of them lost."""

    ranks: str
    kind: str
    count: int
    seconds: float


class Contention(Record, frozen=True):
    """Cost of sharing links: seconds of the step, and the classes of links that are shared."""

    lost_s: float
    links: tuple[str, ...]
    slowed: tuple[Slowed, ...]


class Communication(Record, frozen=True):
    """Bytes that a rank hands to one kind of collective of one group in a step, as nccl-tests counts them, or sends to
    other pipeline stages (kind `send`, group `pp`)."""

    rank: int
    kind: str
    group: str
    bytes: float


class StepResult(Record, frozen=True, kw_only=True):
    """A simulated training step: format sim-result/1."""

    inlined: ClassVar = ("utilization", "mean_rank", "middle_layer")
    format: str = "sim-result/1"
    scenario: Scenario
    step_time_s: float
    step_time_interval_s: tuple[float, float]  # 90 %; see `sim.results.certainty`
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    utilization: Utilization
    mean_rank: MeanRank
    middle_layer: MiddleLayer
    peak_memory_bytes: float  # of the fullest rank
    peak_reserved_bytes: float
    memory: tuple[MemoryRow, ...]
    fits_in_memory: bool
    fit: Fit
    critical_path: Mapping[str, float]  # seconds by kind
    ranks: tuple[RankRow, ...]
    blame: tuple[FaultCost, ...]
    waiting: tuple[Waiting, ...]
    contention: Contention
    communication: tuple[Communication, ...]
    provenance: Provenance
    warnings: tuple[str, ...]
    engine: Engine
    distillation: Distilled | None = None
    training_run: TrainingRun | None = None
    processes: ProcessesResult | None = None
    interval_from: str | None = None
    one_step_s: float | None = None  # of one step to its last rank's end, if the next step begins before that


@no_collection()
def make_result(sim: FinishedStep, lost: tuple[FaultCost, ...]) -> StepResult:
    """The result of a step without its teacher; `lost`: by fault, as `sim.results.fault_costs.blame` has it."""
    scenario = sim.scenario
    t = scenario.for_training
    begin = time.perf_counter()
    step_s = sim.step_time_s
    seconds = _rank_seconds(sim)
    path, _ = sim.critical
    memory = tuple(_memory_row(sim, i, x) for i, x in enumerate(sim.most_by_category))
    throughput = t.global_batch_size * t.seq_len / step_s if step_s > 0 else 0.0
    likely = step_interval(scenario, sim.profile, step_s, sim.built.shares)
    return StepResult(
        scenario=scenario,
        step_time_s=step_s,
        step_time_interval_s=(likely.low_s, likely.high_s),
        interval_from=likely.why,
        one_step_s=None if sim.steady_state is None else sim.times.step_s,
        tokens_per_s=throughput,
        tokens_per_s_per_gpu=throughput / scenario.parallelism.ranks,
        utilization=_utilization(sim, throughput),
        mean_rank=_mean_rank(sim, seconds),
        middle_layer=_middle_layer(sim),
        peak_memory_bytes=sim.peak_memory_bytes,
        peak_reserved_bytes=sim.reserved_bytes,
        memory=memory,
        fits_in_memory=sim.fits_in_memory,
        fit=sim.fit,
        critical_path=path,
        ranks=_rank_rows(sim, seconds),
        blame=lost,
        waiting=waiting(sim) if disturbs(scenario) else (),
        contention=_contention(sim),
        communication=_communication(sim),
        provenance=replace(
            provenance(sim.profile, sim.built.shares, source_of(scenario).unknown()),
            of_other_gpus=scenario.calibrations or None,
        ),
        warnings=(*scenario.warnings, *_warnings(sim, memory)),
        engine=_engine(sim, begin),
    )


_MEASURED_LINKS = (
    "of no effect on collectives that were measured within a node; another bandwidth_bytes_per_s scales their times"
)


def _rank_seconds(sim: FinishedStep) -> list[RankSeconds]:
    """Where the time of each class of ranks goes; in the steady state a rank has no idle time but for want of input."""
    found = rank_seconds(sim.built, sim.times)
    if sim.steady_state is None:
        return found
    period_s = sim.steady_state.period_s
    return [replace(r, bubble_s=max(0.0, period_s - r.compute_s - r.exposed_comm_s)) for r in found]


def _mean_rank(sim: FinishedStep, seconds: Sequence[RankSeconds]) -> MeanRank:
    busy, idle, exposed, compute = (
        mean((getattr(r, k) for r in seconds), sim.plan) for k in ("busy_s", "bubble_s", "exposed_comm_s", "compute_s")
    )
    step_s = sim.step_time_s
    return MeanRank(idle / step_s if step_s > 0 else 0.0, idle / busy if busy > 0 else 0.0, exposed, compute)


def _rank_rows(sim: FinishedStep, seconds: Sequence[RankSeconds]) -> tuple[RankRow, ...]:
    """Where the time of each class of ranks goes.

    A rank may clip its gradients while other stages still work. The literature's bubble counts that time as idle, so
    `bubble_ratio` does, too. In a rank's row it is computation alone, and the row's seconds add up to the step.
    """
    idle_s = [max(0.0, sim.step_time_s - r.compute_s - r.exposed_comm_s) for r in seconds]
    bubble_s = [min(r.bubble_s, idle) for r, idle in zip(seconds, idle_s, strict=True)]
    return tuple(
        RankRow(
            name,
            c.rank,
            len(c.ranks),
            c.pipeline_rank,
            r.compute_s,
            r.busy_s,
            r.exposed_comm_s,
            bubble,
            idle - bubble,
        )
        for name, c, r, idle, bubble in zip(sim.names, sim.plan.classes, seconds, idle_s, bubble_s, strict=True)
    )


def _utilization(sim: FinishedStep, tokens_per_s: float) -> Utilization:
    s = sim.scenario
    t = s.for_training
    ranks = s.parallelism.ranks
    peak = s.cluster.mean_over(ranks, lambda gpu: Device.of(gpu).peak(t.precision))
    source = source_of(s)
    per_token, full = source.flops_per_token(causal_half=True), source.flops_per_token(causal_half=False)
    per_gpu = per_token * tokens_per_s / ranks
    again = sum(_further_flops(sim, i) * len(c.ranks) for i, c in enumerate(sim.plan.classes)) / ranks
    step_s = sim.step_time_s
    hfu = (per_gpu + (again / step_s if step_s > 0 else 0.0)) / peak
    return Utilization(per_gpu, per_gpu / peak, full * tokens_per_s / ranks / peak, hfu)


def _further_flops(sim: FinishedStep, class_index: int) -> float:
    """Matmul FLOPs of one rank of a class in a step beyond the model's own: what its backward recomputes, and the
    forwards of a frozen reference and over answers that are not learned from."""
    stages = sim.stages[class_index]
    recomputed = {i: _model_flops(op for b in s.blocks for op in b.recompute) for i, s in stages.items()}
    reference = {
        i: _model_flops(op for blocks in s.read_only() for b in blocks for op in b.forward) for i, s in stages.items()
    }
    if not any(recomputed.values()) and not any(reference.values()):
        return 0.0
    actions = sim.built.actions[class_index].listed.actions
    again = sum(recomputed[a.stage] for a in actions if a.kind in (Kind.B, Kind.I))
    return again + sum(reference[a.stage] for a in actions if a.kind is Kind.F)


def _model_flops(items: Iterable[object]) -> float:
    return sum(op.flops for op in items if isinstance(op, Compute) and op.kind in MODEL_FLOPS_KINDS)


def _middle_layer(sim: FinishedStep) -> MiddleLayer:
    middle = sim.scenario.model.layers // 2
    part = next((p for p in sim.plan.parts if middle in p.layers), None)
    if part is None:
        return MiddleLayer(0.0, 0.0)
    index = next(
        i for i, stages in enumerate(sim.stages) if any(sim.schedule.part_of_stage[s] == part.index for s in stages)
    )
    rank = sim.plan.classes[index].rank
    stage = next(s for i, s in sim.stages[index].items() if sim.schedule.part_of_stage[i] == part.index)
    place = part.layers.index(middle) + part.embedding
    price = sim.pricing.on(rank)
    forward, backward = (stage.measured(k)[place] for k in (Kind.F, Kind.B))
    whole_backward = (*backward.recompute, *backward.backward)
    return MiddleLayer(
        compile_program(forward.forward, price).makespan_s, compile_program(whole_backward, price).makespan_s
    )


def _memory_row(sim: FinishedStep, index: int, most: AtMost) -> MemoryRow:
    """The memory of one class of ranks: most bytes of each category, and the limit."""
    c = sim.plan.classes[index]
    own = most._asdict() | sim.memory_limits[index]._asdict() | {"reserved": sim.reserved[index]}
    return MemoryRow(ranks=sim.names[index], rank=c.rank, count=len(c.ranks), **own)


def _communication(sim: FinishedStep) -> tuple[Communication, ...]:
    """Return the bytes that each class of ranks sends in a step, by kind and group; `send pp`: to the next stages."""
    graph, sent = sim.built.graph, np.zeros(len(sim.plan.classes))
    often = np.bincount(graph.task_kind, minlength=len(graph.task_kinds))
    for kind, number in zip(graph.task_kinds, often.tolist(), strict=True):
        if isinstance(kind.work, Message):
            sent[kind.work.sender] += kind.work.bytes * number
    return tuple(
        Communication(c.rank, kind, group, size)
        for c, traffic, messages in zip(sim.plan.classes, sim.built.traffic, sent.tolist(), strict=True)
        for (kind, group), size in sorted((traffic | ({("send", "pp"): messages} if messages else {})).items())
    )


def _contention(sim: FinishedStep) -> Contention:
    graph = sim.built.graph
    slowed: list[Slowed] = []
    if sim.ran.flows is not None:
        slowed_s = sim.times.end_s - sim.times.start_s - graph.seconds
        if sim.times.stretch is not None:
            slowed_s[sim.times.stretch != 1.0] = 0.0  # computations, slowed by their clock
        task, place, rows = graph.slots
        late = np.flatnonzero((slowed_s > ROUNDING * sim.step_time_s)[task])
        kinds = tuple(graph.span_kinds)
        key = (rows[:, 0] * len(kinds) + rows[:, 2])[place[late]]
        counts, seconds = np.bincount(key), np.bincount(key, slowed_s[task[late]])
        for i in np.flatnonzero(counts).tolist():
            c, kind = divmod(i, len(kinds))
            slowed.append(Slowed(sim.names[c], kinds[kind], int(counts[i]), float(seconds[i])))
    lost_s = max(0.0, sim.times.step_s - sim.ran.alone_s) if slowed else 0.0
    return Contention(lost_s, tuple(sorted(sim.ran.links)), tuple(slowed))


def _engine(sim: FinishedStep, begin: float) -> Engine:
    """`begin`: when the metrics began."""
    return Engine(
        tasks=len(sim.built.graph),
        stands_for=sim.built.graph.stands_for,
        events=sim.times.events,
        wall_s=sim.wall_s + time.perf_counter() - begin,
        path=sim.times.path,
        links_shared=sim.ran.flows is not None,
        simulated_ranks=len(sim.plan.classes),
    )


def _warnings(sim: FinishedStep, memory: Sequence[MemoryRow]) -> list[str]:
    out, cluster = [], sim.scenario.cluster
    for gpu in cluster.gpus:
        rows = [row for row in memory if cluster.kind_of(row.rank) == gpu.name]
        worst = max(rows, key=lambda row: row.reserved, default=None)
        if worst is not None and not worst.fit.fits:
            said = f"does not fit in memory: {worst.reserved / 2**30:.1f} GiB reserved of {worst.limit / 2**30:.1f} GiB"
            out.append(f"{said} on the fullest {f'{gpu.name} ' * bool(cluster.others)}rank")
    if has_jitter(sim.scenario) and len(sim.plan.classes) < sim.scenario.parallelism.ranks:
        out.append(f"faults.jitter: above {APART_RANKS:,} ranks equal ones share their draws; waiting is understated")
    for name, launches in (source_of(sim.scenario).unknown() or {}).items():
        out.append(f"model.program: {name} ({launches} launches a micro-batch) is not known; priced by its bytes")
    tables = {table.op for table in sim.profile.collectives if table.ranks > 1}
    measured = any(kind in tables and source != "topology" for kind, source, _ in sim.built.shares)
    unread = efficiencies_not_read(sim.profile, cluster) if measured else []
    out += [f"cluster.intra_node.{key}: {_MEASURED_LINKS}" for key in unread]
    return out + roofline_warnings(sim.built.shares)
