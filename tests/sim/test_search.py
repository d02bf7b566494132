"""The search's parts: its space is what parsing accepts, its bounds are bounds, its best is exhaustive search's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import schedules
from sim.actions import Kind, parts
from sim.command import bad_input_exits
from sim.errors import InputError
from sim.graph.stages import epilogue
from sim.graph.template import compile_program
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.layout.best_first import BestFirst, Found, pareto
from sim.layout.bound import ROUNDING, GridSearch
from sim.layout.evaluation import Outcome, evaluate, pack
from sim.layout.executors import Workers, local_workers
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, grid_is_legal, grids, is_legal, layouts_of, make_space, scenario_of
from sim.layout.least_time import Known, least_step_s
from sim.layout.memory_bound import forwards_first, searched_forwards
from sim.layout.program_times import ends_s, timed, timed_template
from sim.prices.costs import Costs
from sim.prices.profile import load_profile
from sim.search import main, run_search
from sim.simulation import prepare, simulate
from topology.network import Network
from topology.spec import GpuSpec

GPT: dict[str, Any] = {
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 1024,
    "vocab": 1000,
    "tied_embeddings": True,
}
MOE = {
    **GPT,
    "tied_embeddings": False,
    "moe": {"experts": 4, "top_k": 2, "ffn": 256, "shared_experts": 1, "dense_layers": 1},
}
BASE: dict[str, Any] = {
    "model": GPT,
    "cluster": {"preset": "dgx-h100", "gpus_per_node": 4},
    "calibration": "roofline",
    "training": {"seq_len": 256, "global_batch_size": 16},
    "parallelism": {"dp": 8},
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"model": MOE},
    {
        "training": {"recompute": {"mode": "full", "layers": 1}, "grad_dtype": "bf16"},
        "parallelism": {"dp_sync": "after_backward"},
    },
    {
        "training": {"activation_offload": True},
        "calibration": "h100-sxm",
        "parallelism": {"dp_sync": "per_parameter", "cp_method": "all_gather"},
    },
    {
        "calibration": "h100-sxm",
        "parallelism": {
            "rank_order": "pp-dp-tp-cp",
            "p2p_scatter": True,
            "tp_overlap": "full",
            "param_gather_overlap": False,
        },
    },
    {
        "parallelism": {
            "accumulate_unsharded": True,
            "reshard_after_forward": False,
            "bucket_bytes": 100_000,
            "cp_method": "all_to_all",
        }
    },
    {
        "model": {**MOE, "mtp_layers": 1},
        "calibration": "h100-sxm",
        "parallelism": {"ep_overlap": True, "shard_size": 2},
    },
    {
        "training": {"precision": "fp8", "elementwise": "megatron"},
        "calibration": "h100-sxm",
        "parallelism": {"p2p_overlap": True},
    },
    {"parallelism": {"cp_split": "contiguous"}, "model": {"positions": "learned"}},
    {"model": {**MOE, "moe": {**MOE["moe"], "imbalance": {"seed": 1, "zipf": 1.2}}}},
    {
        "faults": {
            "stragglers": [{"rank": 3, "compute_scale": 1.3}, {"rank": 5, "compute_scale": 0.8}],
            "links": [{"between": ["node0", "node1"], "bandwidth_scale": 0.5}],
        }
    },
)


@cache
def space_of(variant: int, gpus: int | None = None) -> Space:
    return make_space(merge(BASE, VARIANTS[variant]), gpus, "test")


def gpu_spec(variant: int) -> GpuSpec:
    return space_of(variant).base.cluster.gpu


@cache
def legal_layouts(variant: int, gpus: int | None = None) -> tuple[Layout, ...]:
    space = space_of(variant, gpus)
    return tuple(x for g in grids(space) if grid_is_legal(space, g) for x in layouts_of(space, g) if is_legal(space, x))


def mapping_of(variant: int, x: Layout) -> dict[str, Any]:
    """A layout's scenario as a user would write it."""
    space = space_of(variant)
    degrees = {k: v for k, v in x._asdict().items() if k not in ("micro_batch_size", "recompute")}
    recompute = space.recomputes[x.recompute].model_dump()
    data = merge(BASE, VARIANTS[variant])
    training = {**data["training"], "micro_batch_size": x.micro_batch_size, "recompute": recompute}
    return {**data, "parallelism": {**data["parallelism"], **degrees}, "training": training}


def accepted(variant: int, x: Layout) -> bool:
    """What parsing and the schedule's own builder say."""
    try:
        scenario = parse_scenario(mapping_of(variant, x), "test")
    except InputError:
        return False
    p = scenario.parallelism
    try:
        schedules.build(
            "zb_h1" if p.schedule == "zb_search" else p.schedule, p.pp, scenario.micro_batches, p.virtual_stages
        )
    except ValueError:
        return p.pp == 1
    return True


any_layout = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    sp=st.booleans(),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3, 4]),
    dp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(schedules.NAMES),
    virtual_stages=st.just(1),
    micro_batch_size=st.sampled_from([1, 2, 3, 4, 16]),
    recompute=st.sampled_from(["none", "selective", "selective_op", "full"]),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(VARIANTS) - 2), any_layout, st.integers(2, 3))  # the last has faults of eight ranks
def test_own_rules_are_those_of_parsing(variant: int, x: Layout, v: int) -> None:
    per_rank = {"interleaved_1f1b": v, "zb_v": 2, "dualpipe": 2, "dualpipe_v": 2}.get(x.schedule, 1) if x.pp > 1 else 1
    x = x._replace(virtual_stages=per_rank)
    gpus = x.tp * x.cp * x.pp * x.dp
    space = space_of(variant, gpus)
    grid = Grid(x.tp, x.cp, x.pp, x.dp, x.ep)
    assert (grid_is_legal(space, grid) and is_legal(space, x)) == accepted(variant, x)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_enumeration_misses_nothing_legal(variant: int) -> None:
    listed = set(legal_layouts(variant))
    assert len(listed) == len(legal_layouts(variant))
    degrees = (1, 2, 4, 8)
    missing = 0
    for tp, cp, pp in itertools.product(degrees, repeat=3):
        if 8 % (tp * cp * pp):
            continue
        for ep, zero, name in itertools.product((1, 2, 4), (0, 3), ("1f1b", "gpipe", "zb_v", "interleaved_1f1b")):
            dp = 8 // (tp * cp * pp)
            v = 2 if name in ("zb_v", "interleaved_1f1b") and pp > 1 else 1
            x = Layout(tp, False, cp, pp, dp, ep, zero, name, v, 2, "full")
            same = (
                (pp == 1 and name != "1f1b")
                or (zero and dp * cp == 1)
                or pp * v > space_of(variant).base.model.layers + 2
            )
            missing += not same and accepted(variant, x) and x not in listed
    assert missing == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scenario_of_a_layout_is_the_parsed_one(data: st.DataObject) -> None:
    variant = data.draw(st.integers(0, len(VARIANTS) - 1))
    x = data.draw(st.sampled_from(legal_layouts(variant)))
    made = scenario_of(space_of(variant), x)
    assert made.model_dump() == parse_scenario(mapping_of(variant, x), "test").model_dump()
    assert parse_scenario(made.model_dump(mode="json"), "test").model_dump() == made.model_dump()


@cache
def bounds_of(variant: int, grid: Grid) -> GridSearch:
    space = space_of(variant)
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    return GridSearch(space, grid, GridPrices(space, grid, costs, Network(space.base.cluster)), float("inf"))


def check_bounds(variant: int, x: Layout) -> None:
    search = bounds_of(variant, Grid(x.tp, x.cp, x.pp, x.dp, x.ep))
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


def test_bound_is_exact_for_even_1f1b() -> None:
    """Where nothing but equal stages of layers runs, the bound is the time: it is no trivial one."""
    x = Layout(1, False, 1, 4, 1, 1, 0, "1f1b", 1, 1, "none")
    space = make_space(
        merge(
            BASE,
            {
                "model": {"layers": 16, "hidden": 2048, "ffn": 8192, "vocab": 128},
                "training": {"seq_len": 2048, "gradient_clipping": False},
            },
        ),
        4,
        "test",
    )
    costs = Costs(load_profile("roofline"), space.base.cluster.gpu)
    search = GridSearch(
        space, Grid(1, 1, 4, 1, 1), GridPrices(space, Grid(1, 1, 4, 1, 1), costs, Network(space.base.cluster)), 1e18
    )
    simulated = simulate(scenario_of(space, x)).step_time_s
    assert 0.97 * simulated < search.bound_s(x) <= simulated


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_times_of_programs_are_those_of_compiling_them(variant: int) -> None:
    layouts = [x for x in legal_layouts(variant) if x.schedule in ("1f1b", "zb_h1")]
    for x in layouts[:: len(layouts) // 8]:
        step = prepare(scenario_of(space_of(variant), x), Costs(load_profile("h100-sxm"), gpu_spec(variant)))
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


@pytest.mark.parametrize("faults", [{}, {"stragglers": [{"rank": 1, "compute_scale": 2.0}]}])
def test_what_a_schedule_is_searched_with_is_what_runs(faults: dict[str, Any]) -> None:
    """Programs compiled for the search are not compiled again; with faults, those of the search know none of them."""
    space = make_space(merge(BASE, {"faults": faults}), 8, "test")
    scenario = scenario_of(space, Layout(1, False, 1, 4, 2, 1, 1, "zb_search", 1, 1, "none"))
    costs = Costs(load_profile("h100-sxm"), space.base.cluster.gpu)
    step = prepare(scenario, costs)
    compiled = {template for known in step.kept.programs.values() for _, template in known}
    assert bool(compiled) is not bool(faults)
    simulated, given = step.run().times, prepare(scenario, costs, step.schedule).run().times
    assert compiled <= set(step.kept.templates.values())
    assert (simulated.start_s, simulated.end_s) == (given.start_s, given.end_s)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v"])
def test_least_time_is_the_time_where_messages_overlap(name: str, zero: int) -> None:
    """But for what ends the step: there ranks wait for each other's norms."""
    v = 1 if name == "zb_h1" else 2
    x = Layout(1, False, 1, 2, 4, 1, zero, name, v, 1, "none")
    space = make_space(
        merge(BASE, {"training": {"gradient_clipping": False}, "model": {"tied_embeddings": False}}), 8, "test"
    )
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


# --- the search

SMALL = ("1f1b", "interleaved_1f1b", "zb_h1", "gpipe")


def search(space: Space, limit_bytes: float, top: int = 5, front: bool = False, workers: int = 1) -> Found:
    with local_workers(workers) as pool:
        return BestFirst(space, limit_bytes, top, front, pool).run()


def exhaustive(space: Space) -> list[Outcome]:
    packed = pack(space)
    layouts = [x for g in grids(space) if grid_is_legal(space, g) for x in layouts_of(space, g) if is_legal(space, x)]
    return [evaluate(packed, x) for x in layouts]


def small_space(variant: int, **only: Any) -> Space:
    data = merge(BASE, {**VARIANTS[variant]})
    return make_space(
        data, 4, "test", {"schedule": SMALL, "micro_batch_size": (1, 4), "recompute": ("none", "full"), **only}
    )


@cache
def all_outcomes(variant: int) -> tuple[Space, tuple[Outcome, ...]]:
    space = small_space(variant)
    return space, tuple(exhaustive(space))


def key(o: Outcome) -> tuple[float, float, Layout]:
    return o.step_time_s, o.peak_memory_bytes, o.layout


@pytest.mark.parametrize("variant", [0, 1])
def test_bounds_hold_for_every_layout_of_a_mesh(variant: int) -> None:
    """In the order of the search: what layouts share must not depend on which came first."""
    space, outcomes = all_outcomes(variant)
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    of_mesh: dict[Grid, GridSearch] = {}
    for o in outcomes:
        x, grid = o.layout, Grid(*(getattr(o.layout, k) for k in Grid._fields))
        if grid not in of_mesh:
            prices = GridPrices(space, grid, costs, Network(space.base.cluster))
            of_mesh[grid] = GridSearch(space, grid, prices, math.inf)
        found = of_mesh[grid]
        assert max(found.least_work_s(x), found.work_bound_s(x), found.bound_s(x)) <= o.step_time_s, x
        assert found.memory_bytes(x, True) <= o.peak_memory_bytes, x


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("share", [0.3, 0.6, 2.0])
def test_best_is_that_of_exhaustive_search(variant: int, share: float) -> None:
    space, outcomes = all_outcomes(variant)
    peaks = sorted(o.peak_memory_bytes for o in outcomes)
    limit = share * peaks[len(peaks) // 2]
    expected = sorted(key(o) for o in outcomes if o.peak_memory_bytes <= limit)[:5]
    found = search(space, limit)
    assert [key(o) for o in found.best] == expected
    c = found.counts
    assert c.legal == len(outcomes) == c.pruned_by_memory + c.pruned_by_bound + c.evaluated
    assert c.evaluated == c.simulated + c.too_large + c.beaten + c.refused
    assert c.simulated == len(found.fitting)
    assert found.cpu_s.bounding > 0
    assert found.cpu_s.evaluating >= found.cpu_s.simulated
    assert (found.cpu_s.simulated > 0) == bool(found.fitting)
    assert c.evaluated < c.legal


def test_whole_front_is_that_of_exhaustive_search() -> None:
    space, outcomes = all_outcomes(0)
    line = pareto(list(outcomes))
    found = search(space, float("inf"), front=True)
    assert [(o.step_time_s, o.peak_memory_bytes) for o in found.pareto] == [
        (o.step_time_s, o.peak_memory_bytes) for o in line
    ]
    assert found.counts.evaluated < len(outcomes)


@pytest.mark.parametrize("variant", [0, 1, 3])
def test_shared_links_take_time_but_no_memory(variant: int) -> None:
    space = space_of(variant)
    packed = pack(space)
    slower = 0
    for x in legal_layouts(variant)[:: len(legal_layouts(variant)) // 12]:
        try:
            alone, shared = (simulate(scenario_of(space, x), share_links=share) for share in (False, True))
        except InputError:
            continue
        peaks = [max(float(c.total.max()) for c in each.memory) for each in (alone, shared)]
        assert alone.step_time_s <= shared.step_time_s * (1 + 1e-9)
        assert peaks[0] == peaks[1] == prepare(scenario_of(space, x), alone.pricing.costs).peak_bytes
        too_large = evaluate(packed, x, limit_bytes=peaks[0] - 1)
        assert (too_large.step_time_s, too_large.peak_memory_bytes) == (math.inf, peaks[0])
        slower += shared.step_time_s > alone.step_time_s
        found, beaten = evaluate(packed, x), evaluate(packed, x, ceiling_s=alone.step_time_s * 0.5)
        assert (found.step_time_s, found.beaten) == (shared.step_time_s, False)
        assert beaten.beaten
        assert 0.5 * alone.step_time_s < beaten.step_time_s <= alone.step_time_s
        assert not evaluate(packed, x, ceiling_s=alone.step_time_s).beaten
    assert slower or variant != 0


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_programs_kept_from_one_schedule_to_the_next_change_no_time(variant: int) -> None:
    space = space_of(variant)
    packed = pack(space)
    by_schedule = sorted(legal_layouts(variant), key=lambda x: x._replace(schedule="", virtual_stages=0))
    ways = [list(g) for _, g in itertools.groupby(by_schedule, lambda x: x._replace(schedule="", virtual_stages=0))]
    for x in max(ways, key=len)[:16]:
        found = evaluate(packed, x)
        if not found.refused:
            assert found.step_time_s == simulate(scenario_of(space, x)).step_time_s, x


def test_other_processes_find_the_same() -> None:
    space = small_space(0, tp=(2, 4))
    assert [key(o) for o in search(space, 1e18).best] == [key(o) for o in search(space, 1e18, workers=2).best]


def test_a_worker_s_error_is_not_lost() -> None:
    with local_workers(1) as pool, pytest.raises(TypeError):
        pool.executor.submit(evaluate, None).result()
    assert Workers(pool.executor, lambda: 3).slots == 1


def test_pareto_line() -> None:
    x = legal_layouts(0)[0]
    points = [Outcome(x, t, m, 0.0) for t, m in ((1, 9), (2, 9), (2, 5), (3, 6), (4, 1))]
    assert [(o.step_time_s, o.peak_memory_bytes) for o in pareto(points)] == [(1, 9), (2, 5), (4, 1)]


# --- the command


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(BASE), encoding="utf-8")
    return file


def test_command_writes_a_result_that_parses(
    scenario_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    main(
        scenario_file,
        gpus=4,
        top=3,
        only=["schedule=1f1b", "micro_batch_size=1,2"],
        json=str(target),
        memory_limit="10GiB",
    )
    result = json.loads(target.read_text())
    assert result["format"] == "sim-search/1"
    assert result["gpus"] == 4
    assert result["memory_limit_bytes"] == 10 * 2**30
    assert {r["layout"]["schedule"] for r in result["best"]} == {"1f1b"}
    best = result["best"][0]
    again = simulate(parse_scenario(best["scenario"]))
    assert again.step_time_s == best["step_time_s"]
    assert best["tokens_per_s_per_gpu"] == pytest.approx(16 * 256 / best["step_time_s"] / 4)
    assert result["best"] == sorted(result["best"], key=lambda r: r["step_time_s"])
    assert "legal layouts" in capsys.readouterr().out


def test_nothing_fits(scenario_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(scenario_file, gpus=2, only=["schedule=1f1b"], memory_limit="1MiB")
    assert stop.value.code == 1
    assert "No legal layout fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": ["depth=3"]}, "must be KEY=VALUE"),
        ({"memory_limit": "lots"}, "--memory-limit"),
        ({"memory_limit": "-5"}, "--memory-limit"),
        ({"objective": "joy"}, "--objective"),
        ({"dask": "tcp://127.0.0.1:9"}, "--dask"),
    ],
)
def test_bad_options(
    scenario_file: Path,
    options: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sim.layout.executors.PATIENCE_S", 1)
    with pytest.raises(SystemExit) as stop:
        main(scenario_file, **options)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_inference_is_refused(tmp_path: Path) -> None:
    data = {k: v for k, v in BASE.items() if k != "training"}
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({**data, "inference": {"requests": {"prompt_len": 8, "output_len": 8}}}))
    with pytest.raises(InputError, match="training"):
        run_search(file, [], None, None, 5, [], False, 1, None)


def test_result_is_frozen_data() -> None:
    assert dataclasses.is_dataclass(Found)
    with bad_input_exits():
        pass
