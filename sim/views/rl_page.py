"""The standalone page of a step of reinforcement learning; `templates/rl.html` has its HTML."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sim.core.timeline import Timeline
from sim.core.units import counted, ranks_text
from sim.rl.timeline import REPLICAS_SHOWN
from sim.serve.results.over_time import over_time
from sim.views.page import page, view_data
from sim.views.rl_words import PHASE_HEAD, POOL_HEAD, fact_lines, phase_rows, pool_rows, rl_headline, rl_line
from sim.views.rows import Track, kinds_of
from sim.views.serving_plots import serving_plots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.rl.simulation import RlSimulation
    from sim.views.headline import Number


def rl_page(simulation: RlSimulation, more: Sequence[Number] = ()) -> str:
    """HTML of a page that opens without network: the step's numbers, its phases in rows, and its answers over time.

    `more` are numbers that follow the headline.
    """
    from sim.views.figures import NEAR_MOST, timeline_figure

    result, timeline = simulation.outcome, simulation.timeline
    chart, layout = timeline_figure([timeline], _tracks(timeline, simulation.rl.colocated))
    served = serving_plots(simulation.served.outcome, over_time(simulation.served), {})
    plots = {"timeline": chart, **{p.name: p.figure for p in served.over_time}}
    return page(
        "rl.html",
        f"{result.scenario.name} · simulated rl step",
        plots,
        view_data([timeline], layout),
        result=result,
        line=rl_line(result.scenario, simulation.rl),
        headline=[*rl_headline(result), *more],
        kinds=kinds_of([timeline]),
        spans=len(timeline),
        near=NEAR_MOST,
        served=served,
        phase_head=PHASE_HEAD,
        phases=phase_rows(result),
        pool_head=POOL_HEAD,
        pools=pool_rows(result.pools),
        facts=fact_lines(result),
        replicas_shown=replicas_drawn(result.generation.replicas),
        scenario_json=json.dumps(result.scenario.model_dump(mode="json"), indent=2, ensure_ascii=False),
    )


def replicas_drawn(replicas: int) -> str:
    """Which of many replicas have a row in the timeline; nothing where all have."""
    half = REPLICAS_SHOWN // 2
    said = f"{counted(replicas, 'replica')}, the {half} that end first and the {half} that end last are drawn"
    return said if replicas > REPLICAS_SHOWN else ""


def _tracks(timeline: Timeline, colocated: bool) -> list[Track]:
    """A track for each pool, under its name if there are several: long names leave little room for the bars."""
    names = ("",) if colocated else ("trainer, ", "engine, ")
    pairs = zip(names, timeline.classes, strict=True)
    return [Track(f"{name}{ranks_text(c.ranks)}", 0, i) for i, (name, c) in enumerate(pairs)]
