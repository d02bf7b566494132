"""Timelines, memory curves and results that look like those of a simulation, made without one."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from sim.core.timeline import Detail, RankClass, Span, Timeline, from_spans
from sim.core.units import rank_numbers
from sim.inputs.scenario import Scenario, parse_scenario
from sim.results.fit import Fit
from sim.results.memory import AtMost, MemoryCurve
from sim.results.records import Engine, MemoryRow, Provenance
from sim.results.result import Contention, MeanRank, MiddleLayer, RankRow, StepResult, Utilization
from sim.studies.compared import ActionPair, Comparison, Ends, MemoryPair, Pair, RankPair, Steps

GIB = 2.0**30


def one_f_one_b(
    p: int = 8,
    m: int = 16,
    forward_s: float = 0.010,
    backward_s: float = 0.020,
    send_s: float = 0.001,
    copies: int = 8,
    scale: float = 1.0,
    name: str = "forward of stage",
) -> Timeline:
    """1F1B on p classes of `copies` ranks: F, B, messages as flows, an all-reduce and the optimizer."""
    orders = [_order(min(p - 1 - r, m), m) for r in range(p)]
    done: dict[tuple[str, int, int], float] = {}  # when an action of a rank and micro-batch ended
    free = [0.0] * p
    spans: list[Span] = []
    flows: list[int] = []
    while any(orders):
        for r, order in enumerate(orders):
            if not order:
                continue
            kind, i = order[0]
            source = r - 1 if kind == "F" else r + 1
            arrival = 0.0
            if 0 <= source < p:
                if (kind, source, i) not in done:
                    continue
                sent = done[kind, source, i]
                arrival = sent + send_s
                detail = Detail("activations" if kind == "F" else "gradients", 16e6, 16e6 / send_s, "topology")
                spans.append(Span(source * copies, "send", f"SEND_{kind}", source, i, sent, arrival, detail))
                spans.append(Span(r * copies, "recv", f"RECV_{kind}", r, i, sent, arrival, detail))
                flows += [max(flows, default=-1) + 1] * 2
            start = max(free[r], arrival)
            end = start + (forward_s if kind == "F" else backward_s) * scale * (1 + 0.02 * r)
            note = "attention 3.10 ms, mlp 6.20 ms" if kind == "F" else ""
            detail = Detail(f"{name} {r}", source="measured", note=note)
            spans.append(Span(r * copies, "compute", kind, r, i, start, end, detail))
            flows.append(-1)
            free[r] = done[kind, r, i] = end
            order.pop(0)
    spans += [span for r in range(p) for span in _end_of_step(r * copies, free[r])]
    flows += [-1] * 2 * p
    classes = [RankClass(r * copies, range(r * copies, (r + 1) * copies), r) for r in range(p)]
    return from_spans(spans, classes, flows)


def _order(warm: int, m: int) -> list[tuple[str, int]]:
    """A rank's actions and micro-batches under 1F1B: `warm` forwards, forwards and backwards in turn, backwards."""
    steady = [action for i in range(m - warm) for action in (("F", warm + i), ("B", i))]
    return [("F", i) for i in range(warm)] + steady + [("B", i) for i in range(m - warm, m)]


def _end_of_step(rank: int, free_s: float) -> tuple[Span, Span]:
    """The all-reduce, which begins 5 ms before a rank's last backward ends, and the optimizer."""
    reduced_s = free_s + 0.015
    gradients, update = Detail("gradients", 3e8, 1.9e11, "measured"), Detail("adamw", source="roofline")
    return (
        Span(rank, "dp", "ALL_REDUCE", -1, -1, free_s - 0.005, reduced_s, gradients),
        Span(rank, "compute", "OPTIMIZER", -1, -1, reduced_s, reduced_s + 0.006, update),
    )


def dense(p: int = 32, spans_per_rank: int = 3200) -> Timeline:
    """A timeline of p·spans_per_rank short spans, for how pages hold up."""
    spans = [
        Span(
            r,
            "compute",
            "F" if i % 3 else "B",
            r,
            i % 500,
            i * 1e-4,
            i * 1e-4 + 0.9e-4,
            Detail(f"operator {i % 40}", source="roofline"),
        )
        for r in range(p)
        for i in range(spans_per_rank)
    ]
    return from_spans(spans, [RankClass(r, (r,), r) for r in range(p)])


def memory_curves(timeline: Timeline) -> list[MemoryCurve]:
    """Activations rise with each F and fall with each B; the rest is level."""
    curves = []
    for c, cls in enumerate(timeline.classes):
        events = [(0.0, 0.0)]
        level = 0.0
        changes = [(s.start_s, 0.6 * GIB) for s in timeline.spans() if s.rank == cls.rank and s.kind == "F"]
        changes += [(s.end_s, -0.6 * GIB) for s in timeline.spans() if s.rank == cls.rank and s.kind == "B"]
        for time, change in sorted(changes):
            level += change
            events.append((time, level))
        time_s = np.array([t for t, _ in events])
        ones = np.ones(len(events))
        curves.append(
            MemoryCurve(
                cls.rank,
                time_s,
                ones * (3 + 0.1 * c) * GIB,
                ones * 6 * GIB,
                ones * 12 * GIB,
                np.array([x for _, x in events]),
                ones * 0.5 * GIB,
            )
        )
    return curves


def scenario_of(name: str) -> Scenario:
    """Llama 3 8B over 512 GPUs."""
    layout = {"tp": 8, "pp": 8, "dp": 8, "schedule": "1f1b"}
    training = {"seq_len": 4096, "global_batch_size": 128, "micro_batch_size": 1, "recompute": "full"}
    data = {"model": "llama3-8b", "training": training, "parallelism": layout, "cluster": "dgx-a100"}
    return parse_scenario(data).unchecked_copy(update={"name": name})


def _memory_row(cls: RankClass, top: dict[str, float]) -> MemoryRow:
    peak = sum(top.values())
    own = {**top, "peak": peak, "reserved": peak, "limit": 78 * GIB, "beside": 2 * GIB}
    return MemoryRow(ranks=rank_numbers(cls.ranks), rank=cls.rank, count=len(cls.ranks), **own)


def result_of(timeline: Timeline, curves: list[MemoryCurve], name: str = "1f1b_pp8", **changes: Any) -> StepResult:
    """A result whose times are those of `timeline`."""
    step = timeline.step_time_s
    ranks = []
    for c, cls in enumerate(timeline.classes):
        mine = (timeline.class_index == c) & (timeline.stream == timeline.streams.index("compute"))
        busy = float((timeline.end_s - timeline.start_s)[mine].sum())
        of, many = rank_numbers(cls.ranks), len(cls.ranks)
        ranks.append(RankRow(of, cls.rank, many, c, busy, busy, 0.012, step - busy - 0.012, 0.0))
    busy_s = sum(r.busy_s for r in ranks) / max(1, len(ranks))
    bubble_s = sum(r.bubble_s for r in ranks) / max(1, len(ranks))
    rows = []
    for curve, cls in zip(curves, timeline.classes, strict=False):
        rows.append(_memory_row(cls, {k: float(max(getattr(curve, k))) for k in AtMost._fields[:-1]}))
    rows = rows or [_memory_row(RankClass(0, (0,), 0), dict.fromkeys(AtMost._fields[:-1], 0.0))]
    worst = max(row.peak for row in rows)
    shares = {"measured": 0.7, "interpolated": 0.2, "roofline": 0.1}
    result = StepResult(
        scenario=scenario_of(name),
        step_time_s=step,
        step_time_interval_s=(step * 0.95, step * 1.06),
        tokens_per_s=9e5,
        tokens_per_s_per_gpu=14062.5,
        utilization=Utilization(1.4e14, 0.45, 0.48, 0.55),
        mean_rank=MeanRank(bubble_s / step if step else 0.0, bubble_s / busy_s if busy_s else 0.0, 0.012, busy_s),
        middle_layer=MiddleLayer(0.0025, 0.005),
        peak_memory_bytes=worst,
        peak_reserved_bytes=worst * 1.04,
        memory=tuple(rows),
        fits_in_memory=True,
        fit=Fit("fits", 1.0),
        critical_path={"F": step * 0.3, "B": step * 0.6, "SEND_F": step * 0.05, "OPTIMIZER": step * 0.05},
        ranks=tuple(ranks),
        blame=(),
        waiting=(),
        contention=Contention(0.0, (), ()),
        communication=(),
        provenance=Provenance("a100-sxm", "test", "2025-01-01", {"device": "A100 SXM 80 GB"}, shares),
        warnings=("vocabulary padded from 50257 to 51200, a multiple of 128·tp",),
        engine=Engine(tasks=len(timeline), events=2 * len(timeline), wall_s=0.05, path="static"),
    )
    return replace(result, **changes)


def comparison_of(
    pair: Pair, *, actions: dict[str, int], ranks: int = 1, name: str = "x", **changed: Any
) -> Comparison:
    """A comparison in which all figures are as far apart as the step times. `actions`: the simulated ones of each kind,
    of which as many as F were measured."""
    sides = {"simulated": pair.simulated, "measured": pair.measured}
    found = Comparison(
        scenario=name,
        profile="paired",
        step_time_s=pair,
        step_time_interval_s=(0.9 * pair.simulated, 1.1 * pair.simulated),
        noise=0.01,
        quiet=True,
        others_cores=None,
        warnings=(),
        steps=Steps(2, 0.9 * pair.measured, 1.1 * pair.measured),
        actions={
            kind: ActionPair.of(**sides, simulated_count=count, measured_count=actions["F"])
            for kind, count in actions.items()
        },
        replay=None,
        action_ends=Ends(0.0, 0.0),
        ranks=tuple(RankPair(rank, pair, pair) for rank in range(ranks)),
        memory=tuple(MemoryPair(rank, pair) for rank in range(ranks)),
        memory_over_steps=(),
        tolerance=0.1,
        within_tolerance=pair.error is not None and abs(pair.error) <= 0.1,
    )
    return replace(found, **changed)
