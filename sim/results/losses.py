"""Where a step's time goes, in plain words: what is useful, what is lost, and why.

The parts of the mean rank's step, which add up to it:

    useful        mfu · step                          the model's own FLOPs at the device's peak
    recompute     (1 − mfu/hfu) · passes              forward work that is done twice, and a frozen reference's
    below_peak    mfu/hfu · passes − useful           kernels slower than the peak
    optimizer     seconds in the optimizer
    communication exposed_comm_s                      nothing computes meanwhile
    bubble        bubble_fraction · step              waiting for another stage
    teacher       step − student's step               distillation: the teacher's turn, or waiting for it
    other         what is left                        waiting outside the pipeline phase

Where only slower ranks can be waited for, bubble and other are one part, waiting for ranks.

with passes = compute_s − optimizer. Splitting passes by FLOPs takes recomputed operators to be as efficient
as the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from sim.core.timeline import COMPUTE, COMPUTE_KINDS, Timeline, row_stream
from sim.core.units import counted, percent, ranks_text, seconds
from sim.inputs.parallelism import Parallelism
from sim.results.fault_costs import ROUNDING
from sim.results.records import tightest
from sim.results.result import RankRow, StepResult
from sim.schedules import FORMS

WORTH_A_WORD = 0.005  # of the step: less is listed and not advised on


class LossShare(Struct, frozen=True):
    """A share of the step."""

    key: str
    label: str
    seconds: float


_LABELS = {
    "useful": "Useful work at peak speed",
    "below_peak": "Kernels below peak speed",
    "recompute": "Recomputation",
    "optimizer": "Optimizer",
    "communication": "Exposed communication",
    "teacher": "Teacher",
    "other": "Other waiting",
}
BELOW_PEAK = "Operators run below the device's peak: memory-bound kernels, small or odd matmuls."
HOST = "the GPU waits for the host to launch kernels; larger micro-batches, fusion or CUDA graphs shorten this."
HOST_WORTH_A_WORD = 0.02  # of the step
UNKNOWN = "Which messages are exposed is told by the page of `sim.run --html`."


def parts_of_step(result: StepResult, timeline: Timeline) -> tuple[LossShare, ...]:
    """The parts above, those of no length left out; empty for a step without a length."""
    step_s, mean, distilled = result.step_time_s, result.mean_rank, result.distillation
    if not step_s:
        return ()
    # All GPUs over the student's: means over all ranks are the student's by so much.
    teachers = 0 if distilled is None else distilled.teacher.gpus
    all_ranks = 1.0 + teachers / result.scenario.parallelism.ranks
    optimizer = min(all_ranks * mean_seconds(timeline, "OPTIMIZER"), mean.compute_s)
    passes = mean.compute_s - optimizer
    mfu, hfu = all_ranks * result.utilization.mfu, all_ranks * result.utilization.hfu
    share = min(1.0, mfu / hfu) if hfu else 1.0
    useful = min(mfu * step_s, share * passes)
    lengths = {
        "useful": useful,
        "below_peak": share * passes - useful,
        "recompute": (1 - share) * passes,
        "optimizer": optimizer,
        "communication": mean.exposed_comm_s,
        "bubble": waiting_s(result),
    }
    if distilled is not None:
        lengths["teacher"] = teacher_s(result)
    lengths["other"] = step_s - sum(lengths.values())
    labels = _LABELS | {"bubble": bubble_name(result.scenario.parallelism), "recompute": _again_name(result)}
    return tuple(LossShare(k, labels[k], s) for k, s in lengths.items() if s > 1e-4 * step_s)


def _again_name(result: StepResult) -> str:
    """Name forward work beside the model's own: done a second time, or a frozen reference's."""
    t = result.scenario.for_training
    if not t.runs_beside:
        return _LABELS["recompute"]
    beside = "forwards without gradients" if t.reads_others else "frozen reference"
    return beside.capitalize() if t.recompute.mode == "none" else f"Recomputation and {beside}"


def teacher_s(result: StepResult) -> float:
    """Seconds by which a teacher makes the step longer than its student's: its turn on the same GPUs, or waiting for
    it; 0 without distillation."""
    return max(0.0, result.step_time_s - result.distillation.student_step_s) if result.distillation else 0.0


def operators_whole(result: StepResult) -> str:
    """Name the time that shares of operators and parts are of: a teacher's operators are not among them."""
    return "the student's step" if result.distillation else "the step"


def bubble_name(layout: Parallelism) -> str:
    """Name of idle time within the passes: a pipeline's bubble; without one, ranks wait for each other."""
    return "Pipeline bubble" if layout.pp > 1 else "Waiting for ranks"


def waits_for_ranks(result: StepResult) -> bool:
    """Tell whether a rank that neither computes nor communicates waits for slower ranks: there are no other stages, no
    teacher and no process beside the step."""
    return result.scenario.parallelism.pp == 1 and result.distillation is None and result.processes is None


def waiting_s(result: StepResult) -> float:
    """Seconds of the mean rank's step that `bubble_name` names."""
    mean, step_s = result.mean_rank, result.step_time_s
    idle_s = step_s - mean.compute_s - mean.exposed_comm_s
    if not waits_for_ranks(result):
        return mean.bubble_fraction * step_s
    return idle_s if idle_s > ROUNDING * step_s else 0.0


def idle_parts(result: StepResult, row: RankRow) -> tuple[tuple[str, float], ...]:
    """A rank's idle time by name: all waiting where it is for slower ranks, else a pipeline's bubble (without one, idle
    within the passes) and other waiting."""
    if waits_for_ranks(result):
        return (("waiting", row.bubble_s + row.waiting_s),)
    within = "bubble" if result.scenario.parallelism.pp > 1 else "idle"
    return (within, row.bubble_s), ("other waiting", row.waiting_s)


def lost_parts(result: StepResult, timeline: Timeline) -> list[LossShare]:
    """The parts that are not useful and worth a word, the largest first."""
    least_s = WORTH_A_WORD * result.step_time_s
    parts = (p for p in parts_of_step(result, timeline) if p.key != "useful" and p.seconds >= least_s)
    return sorted(parts, key=lambda p: -p.seconds)


def largest_losses(
    result: StepResult, timeline: Timeline, n: int = 3, expanded: bool = True, host_s: float = 0.0
) -> list[tuple[LossShare, str]]:
    """The n largest parts that are not useful and worth a word, each with its cause.

    Unless `expanded`, messages within layers have no spans, and which of them are exposed is not guessed. `host_s`: for
    how long GPUs wait for the host (`sim.results.operator_times.host_wait_s`).
    """
    causes = _CAUSES if expanded else {**_CAUSES, "communication": UNKNOWN}
    if host_s > HOST_WORTH_A_WORD * result.step_time_s:
        share = percent(host_s / result.step_time_s)
        causes = {**causes, "below_peak": f"{BELOW_PEAK} For {seconds(host_s)} ({share} of the step) {HOST}"}
    found = [(part, causes[part.key]) for part in lost_parts(result, timeline)[:n]]
    return [(part, cause if isinstance(cause, str) else cause(result, timeline)) for part, cause in found]


def mean_seconds(timeline: Timeline, kind: str) -> float:
    """Seconds that the mean rank spends in a kind."""
    if kind not in timeline.kinds:
        return 0.0
    mine = timeline.kind == timeline.kinds.index(kind)
    weight = np.array([len(c.ranks) for c in timeline.classes], dtype=float)
    spent = (timeline.end_s - timeline.start_s)[mine]
    return float((spent * weight[timeline.class_index[mine]]).sum() / weight.sum())


def exposed_by_stream(timeline: Timeline) -> dict[str, float]:
    """Seconds of each communication stream that no computation covers, in the mean rank; largest first.

    Waiting for a message counts as bubble, so the `recv` stream is left out. Streams exposed together each
    count.
    """
    weight = np.array([len(c.ranks) for c in timeline.classes], dtype=float)
    found: dict[str, float] = {}
    compute = np.isin(timeline.kind, [timeline.kinds.index(k) for k in COMPUTE_KINDS if k in timeline.kinds])
    for c in range(len(timeline.classes)):
        mine = timeline.class_index == c
        busy = np.flatnonzero(mine & compute)
        busy = busy[np.argsort(timeline.start_s[busy], kind="stable")]
        starts, ends = timeline.start_s[busy], np.maximum.accumulate(timeline.end_s[busy])
        starts = np.maximum(starts, np.concatenate([[0.0], ends[:-1]])) if len(busy) else starts
        edges = np.column_stack([starts, ends]).ravel() if len(busy) else np.array([0.0])
        done = np.column_stack([np.cumsum(ends - starts) - (ends - starts), np.cumsum(ends - starts)]).ravel()
        for s in range(len(timeline.streams)):
            if row_stream(timeline.streams[s]) in (COMPUTE, "recv"):
                continue
            spans = np.flatnonzero(mine & ~compute & (timeline.stream == s))
            begin, end = timeline.start_s[spans], timeline.end_s[spans]
            hidden = np.interp(end, edges, done) - np.interp(begin, edges, done) if len(busy) else 0.0
            open_s = float(((end - begin) - hidden).sum()) * weight[c] / weight.sum()
            name = row_stream(timeline.streams[s])
            found[name] = found.get(name, 0.0) + open_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _bubble(result: StepResult, timeline: Timeline) -> str:
    layout, m = result.scenario.parallelism, result.scenario.micro_batches
    if uneven := _uneven(result):
        return uneven
    if layout.pp == 1:
        return "Ranks wait at collectives for the last one to arrive, a different one at different times."
    text = f"{layout.pp} stages fill and drain around {counted(m, 'micro-batch')}."
    if FORMS[layout.schedule].one_at_a_time:
        return f"{text} The {layout.schedule} schedule runs one stage at a time."
    return text


def _uneven(result: StepResult) -> str:
    """Advice where the bubble is mostly the wait for one rank that computes longer than the mean."""
    slowest = max(result.ranks, key=lambda row: row.compute_s)
    more_s = slowest.compute_s - sum(row.compute_s for row in result.ranks) / len(result.ranks)
    if more_s < 0.5 * waiting_s(result):
        return ""
    who = ranks_text(slowest.ranks)
    compute = "compute" if slowest.count > 1 else "computes"
    if result.scenario.parallelism.pp == 1:
        return f"{who.capitalize()} {compute} {seconds(more_s)} longer than the mean; the others wait at collectives."
    same_stage = [row.compute_s for row in result.ranks if row.pipeline_rank == slowest.pipeline_rank]
    if min(same_stage) < slowest.compute_s - 0.5 * more_s:  # not the stage is slow, but a rank of it
        waiting = "the ranks of its stage and the other stages wait for that"
        return f"{who.capitalize()} {compute} {seconds(more_s)} longer than the mean; {waiting}."
    return f"Stages are uneven: {who} {compute} {seconds(more_s)} longer than the mean, and the others wait for that."


def _communication(result: StepResult, timeline: Timeline) -> str:
    stream = next(iter(exposed_by_stream(timeline)), "")
    return f"Mostly on the `{stream}` stream." if stream else ""


def _recompute(result: StepResult, timeline: Timeline) -> str:
    row = tightest(result.memory)
    free = f" The worst rank has {(1 - row.reserved / row.limit) * 100:.0f} % of its memory free."
    room = free if row.limit > row.reserved > 0 else ""
    t = result.scenario.for_training
    reference = "A frozen reference runs forward on every micro-batch." if t.runs_reference else ""
    reference += " The trained model reads as many other answers." if t.reads_others else ""
    if t.recompute.mode == "none":
        return reference
    again = f"Forward work is done a second time, to keep fewer activations.{room}"
    return f"{again} {reference}".rstrip()


def _teacher(result: StepResult, timeline: Timeline) -> str:
    d = result.distillation
    if d is not None and d.teacher.placement == "other":
        return "The teacher takes longer than the student."
    turn = "writes before" if d is not None and d.teacher.mode == "sequence" else "runs before"
    return f"The teacher {turn} the student's step, on the same GPUs."


_CAUSES: dict[str, str | Callable[[StepResult, Timeline], str]] = {
    "teacher": _teacher,
    "bubble": _bubble,
    "communication": _communication,
    "recompute": _recompute,
    "optimizer": "The update of parameters and what stands around it, once a step.",
    "below_peak": BELOW_PEAK,
    "other": "Ranks wait for the slowest after the pipeline has drained.",
}
