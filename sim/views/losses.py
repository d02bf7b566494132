"""Where a step's time goes, in plain words: what is useful, what is lost, and what would win it back.

The parts of the mean rank's step, which add up to it:

    useful        mfu · step                          the model's own FLOPs at the device's peak
    recompute     (1 − mfu/hfu) · passes              forward work that is done twice
    below_peak    mfu/hfu · passes − useful           kernels slower than the peak
    optimizer     seconds in the optimizer
    communication exposed_comm_s                      nothing computes meanwhile
    bubble        bubble_fraction · step              waiting for another stage, or for slower ranks
    teacher       step − student's step               distillation: the teacher's turn, or waiting for it
    other         what is left                        waiting outside the pipeline phase

with passes = compute_s − optimizer. Splitting passes by FLOPs takes recomputed operators to be as efficient
as the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sim.timeline import Timeline
from sim.views.headline import PIPELINE_BUBBLE, bubble_name, memory_limit_bytes, rank_seconds
from sim.views.palette import COMPUTE_KINDS
from sim.views.rows import row_stream
from sim.views.units import ranks_text, seconds

Result = Mapping[str, Any]
WORTH_A_WORD = 0.005  # of the step: less is listed and not advised on


class Part(NamedTuple):
    """A share of the step."""

    key: str
    label: str
    seconds: float
    colour: str


_LABELS = {
    "useful": ("Useful work at peak speed", "#0072b2"),
    "below_peak": ("Kernels below peak speed", "#7fb2d6"),
    "recompute": ("Recomputation", "#f0e442"),
    "optimizer": ("Optimizer", "#cc79a7"),
    "communication": ("Exposed communication", "#d55e00"),
    "bubble": (PIPELINE_BUBBLE, "#aab4bf"),
    "teacher": ("Teacher", "#5d3a9b"),
    "other": ("Other waiting", "#d5dbe1"),
}


def parts_of_step(result: Result, timeline: Timeline) -> tuple[Part, ...]:
    """The parts above, those of no length left out; empty for results without a step time (inference)."""
    step = float(result.get("step_time_s") or 0.0)
    if not step:
        return ()
    all_ranks = _with_teachers(result)
    optimizer = min(all_ranks * mean_seconds(timeline, "OPTIMIZER"), float(result.get("compute_s", 0.0)))
    passes = float(result.get("compute_s", 0.0)) - optimizer
    mfu, hfu = (all_ranks * float(result.get(key) or 0.0) for key in ("mfu", "hfu"))
    share = min(1.0, mfu / hfu) if hfu else 1.0
    useful = min(mfu * step, share * passes)
    lengths = {
        "useful": useful,
        "below_peak": share * passes - useful,
        "recompute": (1 - share) * passes,
        "optimizer": optimizer,
        "communication": float(result.get("exposed_comm_s", 0.0)),
        "bubble": float(result.get("bubble_fraction", 0.0)) * step,
    }
    if result.get("distillation"):
        lengths["teacher"] = max(0.0, step - float(result["distillation"]["student_step_s"]))
    lengths["other"] = step - sum(lengths.values())
    labels = {k: label for k, (label, _) in _LABELS.items()} | {"bubble": bubble_name(result)}
    return tuple(Part(k, labels[k], s, _LABELS[k][1]) for k, s in lengths.items() if s > 1e-4 * step)


def _with_teachers(result: Result) -> float:
    """All GPUs over the student's: means over all ranks are the student's by so much."""
    teachers = int((result.get("distillation") or {}).get("gpus") or 0)
    layout = result.get("scenario", {}).get("parallelism") or {}
    own = math.prod(int(layout.get(key) or 1) for key in ("tp", "cp", "dp", "pp"))
    return 1.0 + teachers / own


def largest_losses(result: Result, timeline: Timeline, n: int = 3, expanded: bool = True) -> list[tuple[Part, str]]:
    """The n largest parts that are not useful and worth a word, each with what would remove it.

    Unless `expanded`, messages within layers have no spans, and which of them are exposed is not guessed.
    """
    least_s = WORTH_A_WORD * float(result.get("step_time_s") or 0.0)
    parts = (p for p in parts_of_step(result, timeline) if p.key != "useful" and p.seconds >= least_s)
    lost = sorted(parts, key=lambda p: -p.seconds)
    remedies = _REMEDIES if expanded else {**_REMEDIES, "communication": _unknown}
    return [(part, remedies[part.key](result, timeline)) for part in lost[:n]]


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
            if row_stream(timeline.streams[s]) in ("compute", "recv"):
                continue
            spans = np.flatnonzero(mine & ~compute & (timeline.stream == s))
            begin, end = timeline.start_s[spans], timeline.end_s[spans]
            hidden = np.interp(end, edges, done) - np.interp(begin, edges, done) if len(busy) else 0.0
            open_s = float(((end - begin) - hidden).sum()) * weight[c] / weight.sum()
            name = row_stream(timeline.streams[s])
            found[name] = found.get(name, 0.0) + open_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _bubble(result: Result, timeline: Timeline) -> str:
    scenario = result.get("scenario", {})
    layout, training = scenario.get("parallelism", {}), scenario.get("training") or {}
    schedule, pp = layout.get("schedule", "1f1b"), int(layout.get("pp", 1))
    batch = max(int(training.get("micro_batch_size", 1)) * int(layout.get("dp", 1)), 1)
    m = int(training.get("global_batch_size", 0)) // batch
    text = f"{pp} stages fill and drain around {m} micro-batches" if m else "Stages wait for each other"
    uneven = _uneven(result)
    if uneven:
        return uneven
    if pp == 1:
        return "Ranks wait at collectives for the last one to arrive, a different one at different times."
    if schedule == "naive":
        return text + ". The naive schedule runs one stage at a time: `1f1b` lets them all work."
    more = f" Twice as many ({2 * m}) would about halve its share" if m else " More micro-batches would shrink it"
    if schedule in ("gpipe", "1f1b"):
        return (
            text + "." + more + "; so would `interleaved_1f1b` with two virtual stages, and the zero-bubble "
            "schedules (`zb_h1`, `zb_v`) fill it with weight gradients."
        )
    if schedule == "interleaved_1f1b":
        return text + "." + more + "; so would twice the virtual stages, at the price of more messages."
    return text + "." + more + f". `{schedule}` already fills most of it; stages of more equal time would help too."


def _uneven(result: Result) -> str:
    """Advice where the bubble is mostly the wait for one rank that computes longer than the mean."""
    ranks = [(rank_seconds(e)[0], e) for e in result.get("ranks") or ()]
    if not ranks:
        return ""
    longest, entry = max(ranks, key=lambda pair: pair[0])
    more_s = longest - sum(s for s, _ in ranks) / len(ranks)
    if more_s < 0.5 * float(result["bubble_fraction"]) * float(result["step_time_s"]):
        return ""
    who = ranks_text(entry.get("ranks", "?"))
    compute = "compute" if who.startswith("ranks") else "computes"
    if bubble_name(result) != PIPELINE_BUBBLE:
        return f"{who.capitalize()} {compute} {seconds(more_s)} longer than the mean; the others wait at collectives."
    return (
        f"Stages are uneven: {who} {compute} {seconds(more_s)} longer than the mean, and the others wait for "
        "that. Fewer layers there (`layers_per_stage`) win most of it back; more micro-batches only the rest."
    )


_ADVICE: dict[str, tuple[tuple[str, object, str], ...]] = {
    "tp": (("sp", True, "shares out the norms and lets it be chunked"),
           ("tp_overlap", "full", "hides it beside its own matmuls"),
           ("tp", 1, "removes it; a smaller `tp`, inside one NVLink domain, shortens it")),
    "cp": (("cp_method", "ring", "hides it under attention"),
           ("cp_split", "zigzag", "balances the ranks"),
           ("cp", 1, "removes it; a smaller `cp` shortens it")),
    "ep": (("ep_overlap", True, "hides it in paired passes"),
           ("ep_dispatch_dtype", "fp8", "halves the dispatch")),
    "dp": (("dp_sync", "bucketed", "hides it under the backward passes"),
           ("param_gather_overlap", True, "gathers parameters under the next forward"),
           ("accumulate_unsharded", True, "reduces gradients once a step (ZeRO-2 and 3)")),
    "replica": (("accumulate_unsharded", True, "reduces gradients once a step (ZeRO-2 and 3)"),),
    "send": (("p2p_overlap", True, "sends under the next computation instead of before it"),),
}  # fmt: skip
_ALWAYS = {
    **dict.fromkeys(
        ("dp", "replica"), "More micro-batches between two reductions, or `grad_reduce_dtype: bf16`, shorten it."
    ),
    "ep": "Experts of one node, or of one NVLink domain, shorten it.",
    "send": "Fewer virtual stages, or faster links between stages, shorten it.",
    "host": "Recomputation instead of offloading removes it.",
}


def _communication(result: Result, timeline: Timeline) -> str:
    """Advice for the most exposed stream: the options that the scenario has not taken yet."""
    stream = next(iter(exposed_by_stream(timeline)), "")
    layout = result.get("scenario", {}).get("parallelism") or {}
    possible = {
        "accumulate_unsharded": int(layout.get("zero") or 0) >= 2,
        "ep_overlap": layout.get("schedule") in ("dualpipe", "dualpipe_v") and int(layout.get("pp") or 1) > 1,
    }
    left = [
        f"`{key}: {str(value).lower()}` {what}"
        for key, value, what in _ADVICE.get(stream, ())
        if layout.get(key) != value and possible.get(key, True)
    ]
    advice = "; ".join(left) + "." if left else ""
    always = _ALWAYS.get(stream, "" if left else "Overlapping it with computation, or faster links, would remove it.")
    return " ".join(x for x in (f"Mostly on the `{stream}` stream." if stream else "", advice, always) if x)


def _unknown(result: Result, timeline: Timeline) -> str:
    return "Which messages are exposed, and what would hide them, is told by the page of `sim.run --html`."


def _recompute(result: Result, timeline: Timeline) -> str:
    limit, peak = memory_limit_bytes(result), float(result.get("peak_memory_bytes") or 0.0)
    mode = (result.get("scenario", {}).get("training") or {}).get("recompute") or {}
    mode = mode.get("mode", "") if isinstance(mode, Mapping) else mode
    less = "`recompute: selective`" if mode == "full" else "`recompute: none`"
    room = f" The worst rank has {(1 - peak / limit) * 100:.0f} % of its memory free." if limit > peak > 0 else ""
    return f"{less} does less of the forward twice and keeps more activations instead.{room}"


def _optimizer(result: Result, timeline: Timeline) -> str:
    layout = result.get("scenario", {}).get("parallelism") or {}
    copies = int(layout.get("dp") or 1) * int(layout.get("cp") or 1)
    if copies > 1 and not layout.get("zero"):
        return "`zero: 1` shares it out over the data-parallel ranks; a larger batch runs it less often."
    return f"A larger batch runs it less often; `zero` with `dp` above {copies} shares it out more thinly."


def _below_peak(result: Result, timeline: Timeline) -> str:
    scenario = result.get("scenario", {})
    training, layout = scenario.get("training") or {}, scenario.get("parallelism") or {}
    options = ["larger micro-batches"]
    if int(layout.get("tp") or 1) > 1:
        options += ["less `tp`"] + ["`sp: true` (else every rank computes all norms)"] * (not layout.get("sp"))
    options += [f"`{k}: {v}`" for k, v in (("attention", "fused"), ("elementwise", "compiled"))
                if training.get(k) != v]  # fmt: skip
    return ("Operators run below the device's peak: memory-bound kernels, small or odd matmuls. To raise it: "
            + ", ".join(options) + ".")  # fmt: skip


def _teacher(result: Result, timeline: Timeline) -> str:
    d = result.get("distillation") or {}
    if d.get("placement") == "other":
        return "The teacher takes longer than the student. More GPUs (`teacher_parallelism.tp`) shorten its turn."
    turn = "writes before" if d.get("mode") == "sequence" else "runs before"
    return f"The teacher {turn} the student's step. `placement: other` puts it beside, on GPUs of its own."


def _other(result: Result, timeline: Timeline) -> str:
    return (
        "Ranks wait for the slowest after the pipeline has drained. More equal stages (`layers_per_stage`), "
        "or no stragglers, would remove it."
    )


_REMEDIES = {
    "teacher": _teacher,
    "bubble": _bubble,
    "communication": _communication,
    "recompute": _recompute,
    "optimizer": _optimizer,
    "below_peak": _below_peak,
    "other": _other,
}
