"""No simulated step is faster or smaller than the search's bounds, which are built from the same programs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import schedules
from sim.actions import Kind, parts
from sim.errors import InputError
from sim.graph.stages import epilogue
from sim.graph.template import compile_program
from sim.layout.bound import ROUNDING, GridSearch
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, scenario_of
from sim.layout.least_time import Known, least_step_s
from sim.layout.memory_bound import forwards_first, searched_forwards
from sim.layout.pipeline_bound import form_of
from sim.layout.program_times import ends_s, timed, timed_template
from sim.prices.costs import Costs
from sim.prices.profiles import load_profile
from sim.simulation import prepare, simulate
from tests.sim.search_spaces import VARIANTS, all_outcomes, legal_layouts, space_of, varied
from topology.network import Network


def grid_search(space: Space, x: Layout) -> GridSearch:
    """The bounds of the layout's mesh."""
    grid = Grid(*(getattr(x, k) for k in Grid._fields))
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    return GridSearch(space, grid, GridPrices(space, grid, costs, Network(space.base.cluster)), math.inf)


def check_bounds(variant: int, x: Layout) -> None:
    search = grid_search(space_of(variant), x)
    step = prepare(scenario_of(space_of(variant), x), search.prices.costs)
    simulation = step.run()
    assert least_step_s(step, Known()) * ROUNDING <= step.run(share_links=False).step_time_s
    peak = max(float(c.total.max()) for c in simulation.memory)
    assert search.least_work_s(x) <= search.work_bound_s(x) <= simulation.step_time_s
    assert search.bound_s(x) <= simulation.step_time_s
    assert search.memory_bytes(x) <= search.memory_bytes(x, True) <= peak


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_bounds_are_bounds(data: st.DataObject) -> None:
    variant = data.draw(st.integers(0, len(VARIANTS) - 1))
    schedule = data.draw(st.sampled_from(schedules.NAMES))
    zero = data.draw(st.integers(0, 3))
    layouts = [x for x in legal_layouts(variant) if x.schedule == schedule and x.zero == zero]
    if layouts:
        x = data.draw(st.sampled_from(layouts))
        try:
            check_bounds(variant, x)
        except InputError:
            assert variant == 7 or not space_of(variant).fixed.get("p2p_overlap", True)


@pytest.mark.parametrize("variant", [0, 1])
def test_bounds_hold_for_every_layout_of_a_mesh(variant: int) -> None:
    """In the order of the search: what layouts share must not depend on which came first."""
    space, outcomes = all_outcomes(variant)
    of_mesh: dict[tuple[int, ...], GridSearch] = {}
    for o in outcomes:
        x, mesh = o.layout, tuple(getattr(o.layout, k) for k in Grid._fields)
        if mesh not in of_mesh:
            of_mesh[mesh] = grid_search(space, x)
        found = of_mesh[mesh]
        assert max(found.least_work_s(x), found.work_bound_s(x), found.bound_s(x)) <= o.step_time_s, x
        assert found.memory_bytes(x, True) <= o.peak_memory_bytes, x


def test_of_equal_work_the_first_rank_s_shapes_are_bounded_as_they_are_simulated() -> None:
    """Groups of three and six lie unlike on nodes of four: ranks have classes of their own, and all the same work."""
    model = {"layers": 2, "heads": 12, "hidden": 768, "kv_heads": 6, "ffn": 3072}
    training = {"seq_len": 576, "global_batch_size": 6, "attention": "unfused"}
    cluster = {"preset": "gb200-nvl72", "gpus_per_node": 4}
    space = varied({"model": model, "cluster": cluster, "calibration": "gb200", "training": training}, 12)
    for tp, dp in ((3, 2), (6, 1)):
        x = Layout(tp, False, 2, 1, dp, 1, 0, "1f1b", 1, 1, "none")
        step = simulate(scenario_of(space, x))
        assert len(step.plan.classes) > 1
        assert grid_search(space, x).bound_s(x) <= step.step_time_s


@pytest.mark.parametrize(
    ("cluster", "parallelism", "calibration", "x"),
    [
        (  # tensor-parallel groups of six on nodes of four: the first stage's lies better than the last's
            {"preset": "dgx-h100", "gpus_per_node": 4, "inter_node": {"oversubscription": 2.0, "nodes_per_leaf": 2}},
            {},
            "roofline",
            Layout(6, False, 1, 3, 1, 1, 0, "zb_h1", 1, 8, "full"),
        ),
        (  # inside a node messages are quicker, and slow what is computed beside them by more
            {"preset": "dgx-a100", "gpus_per_node": 3},
            {"tp_overlap": "full"},
            "a100-sxm",
            Layout(2, False, 1, 2, 1, 1, 0, "1f1b", 1, 1, "none"),
        ),
    ],
)
def test_stages_that_lie_unlike_are_bounded_by_what_is_least(
    cluster: dict[str, Any], parallelism: dict[str, Any], calibration: str, x: Layout
) -> None:
    model = {"layers": 4, "hidden": 768, "heads": 12, "kv_heads": 6, "ffn": 3072, "tied_embeddings": x.pp == 2}
    training = {"seq_len": 288, "global_batch_size": 24, "precision": "fp16"}
    changes = {"model": model, "training": training, "cluster": cluster, "parallelism": parallelism}
    space = varied({**changes, "calibration": calibration}, x.tp * x.pp)
    step, search = simulate(scenario_of(space, x)), grid_search(space, x)
    assert search.bound_s(x) <= step.step_time_s
    blocks, form = search.blocks(x)[0], form_of(x.schedule, x.pp, x.virtual_stages)
    bounded_s = search.stage_seconds(x, blocks, form, search.stages(blocks, form)).alone.forward.tolist()
    for c, spans in zip(step.plan.classes, step.spans, strict=True):
        start, end = next(span for action, span in spans.items() if action.kind is Kind.F)
        assert bounded_s[c.pipeline_rank] <= end - start


def test_bound_is_exact_for_even_1f1b() -> None:
    """Where nothing but equal stages of layers runs, the bound is the time: it is no trivial one."""
    x = Layout(1, False, 1, 4, 1, 1, 0, "1f1b", 1, 1, "none")
    model = {"layers": 16, "hidden": 2048, "ffn": 8192, "vocab": 128}
    space = varied({"model": model, "training": {"seq_len": 2048, "gradient_clipping": False}}, 4)
    search = grid_search(space, x)
    simulated = simulate(scenario_of(space, x)).step_time_s
    assert 0.97 * simulated < search.bound_s(x) <= simulated


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_times_of_programs_are_those_of_compiling_them(variant: int) -> None:
    space, layouts = space_of(variant), [x for x in legal_layouts(variant) if x.schedule in ("1f1b", "zb_h1")]
    for x in layouts[:: len(layouts) // 8]:
        step = prepare(scenario_of(space, x), Costs(load_profile("h100-sxm"), space.base.cluster.gpu))
        price = step.pricing.on(0)
        (stage, *_) = step.stages[0].values()
        programs = [stage.forward(True, False), *(stage.backward(k, True, True) for k in (Kind.B, Kind.I, Kind.W))]
        if stage.dp.each_micro_batch:  # which the search counts on
            assert programs[1:] == [stage.backward(k, False, True) for k in (Kind.B, Kind.I, Kind.W)]
        programs += [stage.prologue(), epilogue((stage,), step.plan, False)]
        for program in programs:
            own, template = timed(program, price), compile_program(program, price)
            whole = timed_template(template)
            assert [(t.stream, t.deps, t.external) for t in own.tasks] == [(t[0], t[3], t[4]) for t in template.tasks]
            assert [t.seconds for t in own.tasks] == pytest.approx([t.seconds for t in template.tasks], rel=1e-12)
            assert (own.tail, tuple(own.open.items())) == (template.tail, template.open)
            assert own.outcome(3.0, 5.0, 7.0) == pytest.approx(whole.outcome(3.0, 5.0, 7.0), rel=1e-12)
            if program == programs[-1]:  # the search bounds what ends a step by it
                assert own.outcome(0.0, 0.0, 0.0)[0] == pytest.approx(template.makespan_s, rel=1e-12)
            ends = ends_s(own.tasks, 3.0, 5.0, 7.0, {})
            if own.tasks:
                assert own.outcome(3.0, 5.0, 7.0)[1] == pytest.approx(
                    max([7.0, *(e for t, e in zip(own.tasks, ends, strict=True) if t.stream == "dp")]), rel=1e-12
                )


def test_searched_schedule_fills_its_first_rank() -> None:
    """As many forwards as its limit before the first backward, where a forward does not take longer than the rest."""
    for p, m, memory, first_s in itertools.product((2, 4, 7), (1, 3, 16), (0.5, 1.0, 1.7), (0.5, 1.0, 1.2, 6.0, 60.0)):
        forward, backward = (first_s, *[1.0] * (p - 1)), (1.1 * first_s, *[1.1] * (p - 1))
        times = schedules.UnitTimes(forward, backward, 0.9, 0.01)
        entries = schedules.build("zb_search", p, m, None, times, memory).ranks[0]
        first = next(i for i, a in enumerate(entries) if a.kind is not Kind.F)
        known = searched_forwards(memory, m, np.array(forward), np.array(backward), 0.0)
        assert known <= first
        assert first_s > 1.2 or known == min(m, p, int(memory * p))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v"])
def test_least_time_is_the_time_where_messages_overlap(name: str, zero: int) -> None:
    """But for what ends the step: there ranks wait for each other's norms."""
    v = 1 if name == "zb_h1" else 2
    x = Layout(1, False, 1, 2, 4, 1, zero, name, v, 1, "none")
    space = varied({"training": {"gradient_clipping": False}, "model": {"tied_embeddings": False}}, 8)
    step = prepare(scenario_of(space, x), Costs(load_profile("h100-sxm"), space.base.cluster.gpu))
    share = 1e-9 if name != "dualpipe" else 0.01
    alone_s, known = step.run(share_links=False).step_time_s, Known()
    assert least_step_s(step, known) == pytest.approx(alone_s, rel=share)
    assert least_step_s(step, known) == pytest.approx(alone_s, rel=share)  # its programs being known


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [1, 3, 4, 8, 12])
def test_forwards_first_is_what_schedules_do(name: str, p: int, m: int) -> None:
    v = 3 if name == "interleaved_1f1b" else {"zb_v": 2, "dualpipe": 2, "dualpipe_v": 2}.get(name, 1)
    try:
        schedule = schedules.build(name, p, m, v)
    except ValueError:
        return
    least = forwards_first(name, p, v, m)
    for entries in schedule.ranks:
        count: dict[int, int] = {}
        for action in (a for e in entries for a in parts(e)):
            if action.kind is not Kind.F:
                break
            count[action.stage] = count.get(action.stage, 0) + 1
        for stage, n in count.items():
            assert least[stage] <= n
            assert least[stage] == n or name in ("zb_search", "dualpipe", "dualpipe_v")
