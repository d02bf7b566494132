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
from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.program import Compute, Phase, Program
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.schedules.zb_search import first_forwards
from sim.search.bound import MeshSearch
from sim.search.bounded import ROUNDING
from sim.search.least_time import least_time_s
from sim.search.mesh_prices import MeshPrices
from sim.search.pipeline_bound import placement_of
from sim.search.space import Layout, MeshSizes, PartialLayout, Space, scenario_of
from sim.simulation import prepare, simulate
from tests.sim.search.search_spaces import VARIANTS, all_outcomes, legal_layouts, space_of, varied
from topology.network import Network


def mesh_search(space: Space, x: Layout) -> MeshSearch:
    """The bounds of the layout's mesh."""
    mesh = MeshSizes(*(getattr(x, k) for k in MeshSizes._fields))
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    return MeshSearch(space, mesh, MeshPrices(space, mesh, costs, Network(space.base.cluster)), math.inf)


def check_bounds(variant: int, x: Layout) -> None:
    search = mesh_search(space_of(variant), x)
    step = prepare(scenario_of(space_of(variant), x), search.prices.costs)
    simulation = step.run()
    assert least_time_s(step) * ROUNDING <= step.run(share_links=False).step_time_s
    peak = max(float(c.total.max()) for c in simulation.memory)
    assert search.time.least_work_s(x) <= search.time.work_bound_s(x) <= simulation.step_time_s
    assert search.time.bound_s(x) <= simulation.step_time_s
    assert search.memory.least_bytes(x) <= search.memory.least_bytes(x, True) <= peak


def test_a_backward_that_begins_without_a_gather_waits_for_no_reduction() -> None:
    """Megatron's output layer stays gathered, so the last stage's next backward starts beside the last reduction."""
    layout = {"tp": 1, "sp": False, "cp": 1, "pp": 4, "dp": 2, "ep": 1, "zero": 3, "schedule": "gpipe"}
    rest = {"virtual_stages": 1, "micro_batch_size": 1, "recompute": "none", "tp_overlap": "none"}
    megatron = next(i for i, v in enumerate(VARIANTS) if v.get("parallelism") == {"p2p_overlap": True})
    check_bounds(megatron, Layout(**layout, **rest))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_bounds_are_bounds(data: st.DataObject) -> None:
    variant = data.draw(st.integers(0, len(VARIANTS) - 1))
    schedule = data.draw(st.sampled_from(list(schedules.FORMS)))
    zero = data.draw(st.integers(0, 3))
    layouts = [x for x in legal_layouts(variant) if x.schedule == schedule and x.zero == zero]
    if layouts:
        x = data.draw(st.sampled_from(layouts))
        try:
            check_bounds(variant, x)
        except InputError:
            assert variant == 7 or not space_of(variant).fixed.get("p2p_overlap", True)


@pytest.mark.parametrize("variant", [-2, -1])
def test_a_repeated_module_is_bounded(variant: int) -> None:
    """All but the first run of its parameters have none of their own, beside the output layer and on a stage apart."""
    number = len(VARIANTS) + variant
    assert "mtp_repeated" in VARIANTS[number]["model"]
    layouts = legal_layouts(number)
    for x in layouts[:: max(1, len(layouts) // 12)]:
        check_bounds(number, x)


def test_a_mesh_is_bounded_without_the_states_of_all_its_layouts() -> None:
    x = next(x for x in legal_layouts(0) if x.tp == 1 and x.cp == 1 and x.pp == 2)
    search = mesh_search(space_of(0), x)
    found = search.partial_layouts()
    computed = vars(search.memory)["_states_of by arguments"]
    assert len(computed) == 1 < found.counts["legal"]  # one that fits is enough
    parts = [each.part for each in found.bounded if isinstance(each.part, PartialLayout)]
    divided = [search.layouts(part, math.inf, math.inf) for part in parts]
    assert sum(len(each.bounded) for each in divided) == found.counts["legal"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, 1, 6])
def test_bounds_hold_for_every_layout_of_a_mesh(variant: int) -> None:
    """In the order of the search: what layouts share must not depend on which came first."""
    space, outcomes = all_outcomes(variant)
    of_mesh: dict[tuple[int, ...], MeshSearch] = {}
    for o in outcomes:
        x, mesh = o.layout, tuple(getattr(o.layout, k) for k in MeshSizes._fields)
        if mesh not in of_mesh:
            of_mesh[mesh] = mesh_search(space, x)
        found = of_mesh[mesh]
        assert max(found.time.least_work_s(x), found.time.work_bound_s(x), found.time.bound_s(x)) <= o.step_time_s, x
        assert found.memory.least_bytes(x, True) <= o.peak_memory_bytes, x


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_layouts_share_no_blocks_if_only_megatrons_fsdp_adds_up_gradients_apart(order: tuple[int, int]) -> None:
    space = varied({"training": {"framework": "megatron"}}, 4)
    layouts = {zero: Layout(1, False, 1, 1, 4, 1, zero, "1f1b", 1, 1, "none", "none") for zero in order}
    search = mesh_search(space, layouts[2])
    for zero in order:
        step = simulate(scenario_of(space, layouts[zero]))
        assert 0.8 * step.step_time_s < search.time.bound_s(layouts[zero]) <= step.step_time_s
    blocks = [search.mesh_blocks.blocks(layouts[zero])[0] for zero in order]
    assert blocks[0] is not blocks[1]


def test_of_equal_work_the_first_rank_s_shapes_are_bounded_as_they_are_simulated() -> None:
    """Groups of three and six lie unlike on nodes of four: ranks have classes of their own, and all the same work."""
    model = {"layers": 2, "heads": 12, "hidden": 768, "kv_heads": 6, "ffn": 3072}
    training = {"seq_len": 576, "global_batch_size": 6, "attention": "unfused"}
    cluster = {"preset": "gb200-nvl72", "gpus_per_node": 4}
    space = varied({"model": model, "cluster": cluster, "calibration": "gb200", "training": training}, 12)
    for tp, dp in ((3, 2), (6, 1)):
        x = Layout(tp, False, 2, 1, dp, 1, 0, "1f1b", 1, 1, "none", "none")
        step = simulate(scenario_of(space, x))
        assert len(step.plan.classes) > 1
        assert mesh_search(space, x).time.bound_s(x) <= step.step_time_s


@pytest.mark.parametrize(
    ("cluster", "parallelism", "calibration", "x"),
    [
        (  # tensor-parallel groups of six on nodes of four: the first stage's lies better than the last's
            {"preset": "dgx-h100", "gpus_per_node": 4, "inter_node": {"oversubscription": 2.0, "nodes_per_leaf": 2}},
            {},
            "roofline",
            Layout(6, False, 1, 3, 1, 1, 0, "zb_h1", 1, 8, "full", "none"),
        ),
        (  # inside a node messages are quicker, and slow what is computed beside them by more
            {"preset": "dgx-a100", "gpus_per_node": 3},
            {"tp_overlap": "full"},
            "a100-sxm",
            Layout(2, False, 1, 2, 1, 1, 0, "1f1b", 1, 1, "none", "full"),
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
    step, search = simulate(scenario_of(space, x)), mesh_search(space, x)
    assert search.time.bound_s(x) <= step.step_time_s
    blocks, placement = search.mesh_blocks.blocks(x)[0], placement_of(x.schedule, x.pp, x.virtual_stages)
    cut = search.mesh_blocks.cut(blocks.order, placement)
    bounded_s = search.time.stage_seconds(x, blocks, placement, cut).alone.forward.tolist()
    for c, spans in zip(step.plan.classes, step.spans, strict=True):
        start, end = next(span for action, span in spans.items() if action.kind is Kind.F)
        assert bounded_s[c.pipeline_rank] <= end - start


def test_bound_is_exact_for_even_1f1b() -> None:
    """Where nothing but equal stages of layers runs, the bound is the time: it is no trivial one."""
    x = Layout(1, False, 1, 4, 1, 1, 0, "1f1b", 1, 1, "none", "none")
    model = {"layers": 16, "hidden": 2048, "ffn": 8192, "vocab": 128}
    space = varied({"model": model, "training": {"seq_len": 2048, "gradient_clipping": False}}, 4)
    search = mesh_search(space, x)
    simulated = simulate(scenario_of(space, x)).step_time_s
    assert 0.97 * simulated < search.time.bound_s(x) <= simulated


def test_searched_schedule_fills_its_first_rank() -> None:
    """As many forwards as its limit before the first backward, where a forward does not take longer than the rest."""
    for p, m, memory, first_s in itertools.product((2, 4, 7), (1, 3, 16), (0.5, 1.0, 1.7), (0.5, 1.0, 1.2, 6.0, 60.0)):
        forward, backward = (first_s, *[1.0] * (p - 1)), (1.1 * first_s, *[1.1] * (p - 1))
        times = schedules.UnitTimes(forward, backward, 0.9, 0.01)
        entries = schedules.build("zb_search", p, m, None, times, memory).ranks[0]
        first = next(i for i, a in enumerate(entries) if a.kind is not Kind.F)
        known = first_forwards(memory, m, np.array(forward), np.array(backward), 0.0)
        assert known <= first
        assert first_s > 1.2 or known == min(m, p, int(memory * p))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v"])
def test_least_time_is_nearly_the_time(name: str, zero: int) -> None:
    """But for what ends the step, where ranks wait for each other's norms, and for what it begins and ends with."""
    v = 1 if name == "zb_h1" else 2
    x = Layout(1, False, 1, 2, 4, 1, zero, name, v, 1, "none", "none")
    space = varied({"training": {"gradient_clipping": False}, "model": {"tied_embeddings": False}}, 8)
    step = prepare(scenario_of(space, x), Costs(load_profile("h100-sxm"), space.base.cluster.gpu))
    alone_s = step.run(share_links=False).step_time_s
    assert 0.9 * alone_s < least_time_s(step) <= alone_s / ROUNDING
    assert least_time_s(step) == least_time_s(
        prepare(step.plan.scenario, step.pricing.costs)
    )  # its programs being known


def test_meshes_hold_equal_programs_once_and_only_where_they_share_them() -> None:
    """What a worker keeps of programs goes with its search, so nothing grows from search to search."""
    space = space_of(0)
    costs, network = Costs(load_profile(space.base.calibration), space.base.cluster.gpu), Network(space.base.cluster)
    # A tuple is a new object each time it is made, though an equal one.
    first, second = ((Compute("sum", "elementwise", (8,), "bf16", 8.0, 16.0, Phase.FORWARD),) for _ in range(2))
    mesh = MeshSizes(*(getattr(legal_layouts(0)[0], key) for key in MeshSizes._fields))
    shared = dict[Program, Program]()
    one, same, other = (MeshPrices(space, mesh, costs, network, programs) for programs in (shared, shared, None))
    assert one.kept(first) is first is same.kept(second)
    assert other.kept(second) is second
    assert shared == {first: first}
