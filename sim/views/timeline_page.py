"""The standalone page of one simulated step or serving workload; `templates/timeline.html` has its HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.core.timeline import Timeline
from sim.core.units import counted, percent, ranks_text, seconds
from sim.results.evidence import nearest
from sim.results.losses import (
    LossShare,
    idle_parts,
    largest_losses,
    mean_seconds,
    operators_whole,
    parts_of_step,
    teacher_s,
)
from sim.results.operator_times import host_wait_s
from sim.results.result import StepResult
from sim.views.advice_rows import ADVICE_HEAD, ADVICE_NOTE, advice_rows
from sim.views.curves import curve_columns, fullest
from sim.views.headline import evidence_line, headline, memory_limit_bytes
from sim.views.page import page, view_data
from sim.views.palette import PARTS, SERVING_KINDS, memory_styles, style_of
from sim.views.part_names import part_name
from sim.views.rows import kinds_of
from sim.views.scenario_words import layout_line
from sim.views.serving_summary import cache_lines
from sim.views.summary import goodput_rows

if TYPE_CHECKING:
    from sim.results.memory import MemoryCurve
    from sim.results.operator_times import RankOperators, RankParts, Runs
    from sim.results.step import SpanWaits
    from sim.serve.results.records import ServingResult
    from sim.studies.advice import Tried
    from sim.studies.goodput import Goodput
    from sim.views.headline import Number
    from sim.views.serving_plots import ServingPlots

    Result = StepResult | ServingResult

OPERATOR_CLASSES, OPERATORS_SHOWN = 4, 20  # of so many classes of ranks so many operators
MEMORY_POINTS = 200_000  # of all curves together
CURVE_POINTS = 20_000  # of one: a wide screen shows ten in a pixel
_RANK_COLOURS = {
    "computing": PARTS["useful"],
    "exposed communication": PARTS["communication"],
    **dict.fromkeys(("bubble", "waiting", "idle"), PARTS["bubble"]),
    "other waiting": PARTS["other"],
    "teacher": PARTS["teacher"],
}


class StepDetails(NamedTuple):
    """Hold what a page shows of a training step beside its result, as far as it was asked for.

    `operators`: the time by operator of each class of ranks, whose longest are listed; `model_parts`: by part of the
    model; `waits`: what each span waited for, and `runs`: the operators of each detail, for the span that a click pins;
    `advice`: the changes that were tried and help, None if none were tried; `weeks`: training with failures.
    """

    operators: Sequence[RankOperators] = ()
    model_parts: Sequence[RankParts] = ()
    waits: SpanWaits | None = None
    runs: Sequence[Runs] = ()
    advice: Sequence[Tried] | None = None
    weeks: Goodput | None = None


NO_DETAILS = StepDetails()


def timeline_page(
    result: Result,
    timeline: Timeline,
    memory: Sequence[MemoryCurve],
    critical: Sequence[int] = (),
    details: StepDetails = NO_DETAILS,
    served: ServingPlots | None = None,
    more: Sequence[Number] = (),
) -> str:
    """HTML of a page that opens without network: a result, its timeline and its memory over time.

    `critical` are the indices of the spans on the critical path, which the page can outline; `served` the plots of a
    serving workload's requests; `more` are numbers that follow the headline.
    """
    from sim.views.figures import NEAR_MOST

    plots, data, styles = _plots_and_data(result, timeline, memory, critical, details.waits)
    data["operators"] = [_run_rows(run) for run in details.runs]
    if isinstance(result, StepResult):
        parts = _step_parts(result, timeline, details.advice, host_wait_s(details.model_parts))
    else:
        data["item"] = "iteration"
        if served is not None:
            plots |= {p.name: p.figure for p in (*served.over_time, *served.latencies)}
        parts = _serving_parts(result, timeline)
    return page(
        "timeline.html",
        f"{result.scenario.name} · simulated step",
        plots,
        data,
        served=served,
        kinds=kinds_of([timeline]),
        spans=len(timeline),
        near=NEAR_MOST,
        critical=bool(len(critical)),
        curves=_curve_names(timeline, memory),
        advice_head=ADVICE_HEAD,
        advice_note=ADVICE_NOTE,
        fullest=fullest(memory) if memory else 0,
        styles=styles,
        rank_colours=_RANK_COLOURS,
        operators=[_operator_rows(x) for x in details.operators[:OPERATOR_CLASSES]],
        model_parts=[_part_rows(x) for x in details.model_parts[:OPERATOR_CLASSES]],
        weeks=None if details.weeks is None else goodput_rows(details.weeks),
        **_described(result, more),
        **parts,
    )


def _plots_and_data(
    result: Result,
    timeline: Timeline,
    memory: Sequence[MemoryCurve],
    critical: Sequence[int],
    waits: SpanWaits | None,
) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Any]]:
    """Return the page's figures by name, the data that its script reads, and the styles of kinds of memory."""
    from sim.views.figures import memory_figure, timeline_figure
    from sim.views.rows import tracks_of

    until_s = max((float(c.time_s[-1]) for c in memory), default=0.0)
    chart, layout = timeline_figure([timeline], tracks_of(timeline), critical, until_s, waits)
    limit, styles, plots = memory_limit_bytes(result), memory_styles(result.scenario), {"timeline": chart}
    data = view_data([timeline], layout)
    data["end_s"] = max(data["end_s"], until_s)
    if memory:
        points = max(400, min(CURVE_POINTS, MEMORY_POINTS // len(memory)))
        curves = [curve_columns(c, timeline.step_time_s, points) for c in memory]
        plots["memory"] = memory_figure(chart, limit, curves[fullest(memory)], styles)
        data |= {"limit_bytes": limit, "memory": curves, "categories": [[c, s.label] for c, s in styles.items()]}
    return plots, data, styles


def _rank_rows(result: StepResult) -> list[tuple[str, dict[str, float]]]:
    """Each class of ranks with the seconds of its step by name."""
    return [
        (
            row.ranks,
            {
                "computing": row.compute_s,
                "exposed communication": row.exposed_comm_s,
                **dict(idle_parts(result, row)),
                **({"teacher": teacher_s(result)} if result.distillation else {}),
            },
        )
        for row in result.ranks
    ]


def _run_rows(run: Runs) -> list[tuple[float, list[tuple[str, str, float]]]]:
    """The operators of one detail, as the page's script reads them."""
    return [(s, [(o.operator, o.phase, o.seconds) for o in rows]) for s, rows in run]


def _operator_rows(x: RankOperators) -> tuple[str, list[tuple[str, str, str, str]]]:
    """A class of ranks and its longest operators."""
    rows = x.operators[:OPERATORS_SHOWN]
    return ranks_text(x.ranks), [(o.operator, o.phase, seconds(o.seconds), percent(o.share)) for o in rows]


def _part_rows(x: RankParts) -> tuple[str, list[tuple[str, str, str]]]:
    """A class of ranks and its parts of the model."""
    return ranks_text(x.ranks), [(part_name(p), seconds(p.seconds), percent(p.share)) for p in x.parts]


def _described(result: Result, more: Sequence[Number]) -> Mapping[str, Any]:
    """Return the simulated scenario in words and as JSON, and where its prices come from."""
    scenario = result.scenario
    return {
        "result": result,
        "layout_line": layout_line(scenario),
        "headline": [*headline(result), *more],
        "provenance": _provenance_words(result),
        "scenario_json": json.dumps(scenario.model_dump(mode="json"), indent=2, ensure_ascii=False),
    }


def _step_parts(
    result: StepResult, timeline: Timeline, advice: Sequence[Tried] | None, host_s: float
) -> Mapping[str, Any]:
    """Parts of a training step, its largest losses, what would shorten it, and measured steps like it."""
    return {
        "trains": True,
        "rank_rows": _rank_rows(result),
        "operators_whole": operators_whole(result),
        "parts": parts_of_step(result, timeline),
        "largest": largest_losses(result, timeline, host_s=host_s),
        "advice": None if advice is None else advice_rows(advice),
        "evidence": [evidence_line(row) for row in nearest(result.scenario)],
    }


def _serving_parts(result: ServingResult, timeline: Timeline) -> Mapping[str, Any]:
    """Parts of the mean replica's time, and what became of requests and cache."""
    end_s = timeline.step_time_s or 1.0
    kinds = [k for k in kinds_of([timeline]) if k in SERVING_KINDS]
    parts = [LossShare(k, style_of(k).label, mean_seconds(timeline, k)) for k in kinds]
    parts.append(LossShare("idle", "Idle", max(end_s - sum(p.seconds for p in parts), 0.0)))
    return {"trains": False, "rank_rows": (), "parts": parts, "whole_s": end_s, "cache": cache_lines(result)}


def _curve_names(timeline: Timeline, memory: Sequence[MemoryCurve]) -> list[tuple[str, float]]:
    """Ranks of each curve, and its peak in bytes."""
    names = {c.rank: ranks_text(c.ranks) for c in timeline.classes}
    return [(names.get(c.rank, f"rank {c.rank}"), float(c.total.max())) for c in memory]


def _provenance_words(result: Result) -> list[str]:
    """Date, hardware and sources of the prices, and how long the simulation took."""
    source, engine = result.provenance, result.engine
    shares = ", ".join(f"{percent(v)} {k}" for k, v in source.shares.items() if v)
    hardware = ", ".join(str(v) for v in source.hardware.values() if v)
    # a page is simulated in more detail than the summary, so its tasks are said to be the timeline's
    took = f"timeline of {counted(engine.tasks, 'task')}, simulated in {seconds(engine.wall_s)} ({engine.path})"
    kernels = [f"{operator}: {whose}" for operator, whose in (source.kernels or {}).items()]
    priced = f"operator times: {shares}" if shares else ""
    return [words for words in (source.date, hardware, priced, *kernels, took) if words]
