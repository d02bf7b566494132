"""The standalone page of a comparison: simulated rows above measured ones on one axis, tables of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from sim.core.timeline import Timeline
from sim.core.units import counted, n_bytes, percent, ranks_text, seconds, seconds_between
from sim.studies.compared import ActionPair, Comparison, MemoryOverSteps
from sim.views.headline import Number
from sim.views.page import page, view_data
from sim.views.palette import INK, in_order, style_of
from sim.views.rows import GROUPS, Track, kinds_of
from sim.views.templating import signed

MEASURED, SIMULATED = INK, "#d9822b"


def compare_page(compare: Comparison, simulated: Timeline, measured: Timeline) -> str:
    """HTML of a page that opens without network: `sim-compare/1` and the two timelines it compares."""
    from sim.views.figures import NEAR_MOST, timeline_figure

    timelines = [_in_one_row(simulated), _in_one_row(measured)]
    chart, layout = timeline_figure(timelines, paired_tracks(simulated, measured))
    actions, memory, over = compare.actions, compare.memory, compare.memory_over_steps
    saved = [(m.rank, m.saved_for_backward_bytes) for m in memory if m.saved_for_backward_bytes is not None]
    plots = {"timeline": chart, **({"memory_steps": memory_steps_figure(fullest_rank(over))} if over else {})}
    return page(
        "compare.html",
        f"{compare.scenario}: simulated against measured",
        plots,
        view_data(timelines, layout),
        line=_line(compare),
        headline=_headline(compare),
        kinds=kinds_of(timelines),
        spans=len(simulated) + len(measured),
        near=NEAR_MOST,
        actions=[(style_of(k).fill, action_name(k, actions[k]), actions[k]) for k in in_order(tuple(actions))],
        ranks=[("", f"rank {r.rank}", r.compute_s) for r in compare.ranks],
        memory=[("", f"rank {m.rank}", m.peak_bytes) for m in memory],
        saved=[("", f"rank {rank}", pair) for rank, pair in saved],
        over_steps=[("", f"rank {r.rank}, step {i + 1}", p) for r in over for i, p in enumerate(r.peaks)],
        over_steps_of=f"rank {fullest_rank(over).rank}" if over else "",
        seconds=seconds,
        n_bytes=n_bytes,
    )


def paired_tracks(simulated: Timeline, measured: Timeline) -> list[Track]:
    """Each simulated class of equal ranks, and below it those of its ranks that were measured."""
    tracks = []
    for k in sorted(range(len(simulated.classes)), key=lambda k: simulated.classes[k].rank):
        ranks = simulated.classes[k].ranks
        twins = sorted((c.rank, i) for i, c in enumerate(measured.classes) if c.rank in ranks)
        if twins:
            tracks.append(Track(f"{ranks_text(ranks)} simulated", 0, k))
        tracks += [Track(f"rank {rank} measured", 1, i) for rank, i in twins]
    return tracks


def _in_one_row(timeline: Timeline) -> Timeline:
    """Collectives of all groups share a row: a measured action does not say whose it was."""
    return replace(timeline, streams=tuple("collectives" if s in GROUPS else s for s in timeline.streams))


def _line(compare: Comparison) -> str:
    steps = compare.steps
    shown = f"{counted(steps.count, 'timed step')}, {seconds(steps.min_s)} to {seconds(steps.max_s)}"
    return f"Profile {compare.profile} · {shown}"


def _others(compare: Comparison) -> list[Number]:
    """Return how busy others kept the machine; nothing where nobody looked."""
    cores, quiet = compare.others_cores, compare.quiet
    if cores is None:
        return []
    words = "busy at most: a quiet run" if quiet else "busy: a noisy run, its error says little"
    return [Number("Other processes", f"{cores:.2f} cores", words, "good" if quiet else "bad")]


def action_name(kind: str, pair: ActionPair) -> str:
    """Return the name of a kind of actions; where the sides cut it differently, that all of a step are compared."""
    counts = f", all {pair.simulated_count:,} against {pair.measured_count:,}" * pair.whole
    return style_of(kind).label + counts


def _headline(compare: Comparison) -> list[Number]:
    step, ends, (low, high) = compare.step_time_s, compare.action_ends, compare.step_time_interval_s
    verdict, mood = ("within", "good") if compare.within_tolerance else ("out of", "bad")
    limit = f"{verdict} tolerance of {percent(compare.tolerance)}"
    apart = f"of the step on average, {percent(ends.max)} at most"
    return [
        Number("Error of step time", signed(step.error), limit, mood),
        Number("Simulated", seconds(step.simulated), f"90 %: {seconds_between(low, high, step.simulated)}"),
        Number("Measured", seconds(step.measured), f"median; noise {percent(compare.noise)}"),
        *_others(compare),
        Number("Ends of actions differ by", percent(ends.mean), apart),
    ]


def fullest_rank(rows: Sequence[MemoryOverSteps]) -> MemoryOverSteps:
    """The rank that had most in memory."""
    return max(rows, key=lambda row: max(b for _, b in row.measured))


def memory_steps_figure(row: MemoryOverSteps) -> Any:
    """One rank's bytes over its steps."""
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    from sim.views.figures import CLEAR

    plot = figure(
        height=260,
        sizing_mode="stretch_width",
        name="memory-over-steps",
        toolbar_location=None,
        x_axis_label="steps done",
        y_axis_label="MiB allocated",
        **CLEAR,
    )
    curves = (("measured", row.measured, MEASURED, 2), ("simulated", row.simulated, SIMULATED, 1))
    for side, curve, colour, width in curves:
        x, y = ([p[k] for p in curve] for k in (0, 1))
        plot.step(x, [b / 2**20 for b in y], mode="after", line_color=colour, line_width=width, legend_label=side)
    plot.y_range.start = 0  # type: ignore[attr-defined]
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.legend.location = "bottom_right"
    return plot
