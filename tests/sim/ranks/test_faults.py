"""Slow ranks, slow links and jitter against their closed forms, and what the blame says about them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.core.program import Comm, Phase
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.ranks.faults import Jitter, link_scales
from sim.ranks.plan import make_plan
from sim.results.fault_costs import causes
from sim.schedules import FORMS
from sim.serve.simulation import simulate_serving
from sim.simulation import Simulation, simulate
from tests.sim.cases import FREE_LINKS, case, even_profile, slow
from tests.sim.faulty_links import links, with_faults
from tests.sim.measured_runs import recorded
from tests.sim.measured_runs import scenario as small
from topology.network import Network

LAYER_S = 1e-3
SCENARIOS = Path(__file__).parents[3] / "scenarios"
SLOWER = st.sampled_from([1.1, 1.3, 2.0, 4.0])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(2, 8), st.integers(0, 8), SLOWER, st.data())
def test_pipeline_runs_at_the_pace_of_its_slowest_stage(
    schedule: str, p: int, more: int, scale: float, data: st.DataObject
) -> None:
    """Stages of t = f + b, free messages, stage k slower by s, m micro-batches.

    GPipe is two flow shops, one after the other: Σ f_i + (m - 1) max f_i + Σ b_i + (m - 1) max b_i. In 1F1B stage k is
    the bottleneck and busy from its first forward to its last backward, but while the first p - 1 - k forwards lead in
    and as many backwards lead out: then it waits for a pass of the stages behind it, t a micro-batch, as far as its own
    work does not fill that time: k·t + m·s·t + (p - 1 - k)·(max(0, t - s·f) + max(0, t - s·b)), for m >= p. With s = 1
    both are (p + m - 1)·t (Narayanan 2021, section 2.2).
    """
    k, m = data.draw(st.integers(0, p - 1)), p + more
    scenario = case(
        {"pp": p, "schedule": schedule},
        {"global_batch_size": m, "seq_len": 128, "gradient_clipping": False, "optimizer": "sgd"},
        {"layers": p, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128},
        FREE_LINKS,
    )
    sim = simulate(with_faults(scenario, slow(k, scale)), even_profile(scenario, LAYER_S))
    last_s = max(end for of_class in sim.spans for _, end in of_class.values())
    if schedule == "gpipe":
        layers = p - 1 + scale + (m - 1) * scale
        want = 3 * layers
    else:
        want = 3 * k + 3 * m * scale + (p - 1 - k) * (max(0.0, 3 - scale) + max(0.0, 3 - 2 * scale))
    assert last_s == pytest.approx(want * LAYER_S, rel=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 16), SLOWER, st.data())
def test_data_parallel_steps_last_as_long_as_the_slowest_replica(dp: int, scale: float, data: st.DataObject) -> None:
    """Gradients reduced after the backward, nothing beside it: T = max_r s_r · compute + communication."""
    scenario = case({"dp": dp, "dp_sync": "after_backward"}, {"global_batch_size": dp * 3})
    healthy = simulate(scenario)
    sim = simulate(with_faults(scenario, slow(data.draw(st.integers(0, dp - 1)), scale)))
    more_s = (scale - 1.0) * healthy.result["compute_s"]
    assert sim.step_time_s == pytest.approx(healthy.step_time_s + more_s, rel=1e-9)
    assert len(sim.plan.classes) == 2


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([2, 4, 8]), SLOWER, st.booleans(), st.data())
def test_tensor_parallel_ranks_wait_at_every_collective(tp: int, scale: float, sp: bool, data: st.DataObject) -> None:
    """Blocking collectives between all computations: each lasts as long as the slowest rank's, T = s · compute +
    communication; and so it is beside a slow rank in every one of them, not only at the step's end."""
    scenario = case({"tp": tp, "sp": sp}, {"global_batch_size": 2, "gradient_clipping": False})
    healthy = simulate(scenario)
    rank = data.draw(st.integers(0, tp - 1))
    sim = simulate(with_faults(scenario, slow(rank, scale)))
    more_s = (scale - 1.0) * healthy.result["compute_s"]
    assert sim.step_time_s == pytest.approx(healthy.step_time_s + more_s, rel=1e-9)
    (row,) = [r for r in sim.result["waiting"] if r["for"] == str(rank)]
    alone = simulate(scenario, expand=True)  # after the last collective nobody waits any more
    after_s = alone.step_time_s - max(x.end_s for x in alone.timeline.spans() if x.stream == "tp")
    assert row["seconds"] == pytest.approx(more_s - (scale - 1) * after_s, rel=1e-6)


def test_a_straggler_outside_the_bottleneck_hides_in_the_bubble() -> None:
    """A quick stage that becomes as slow as the others costs its own micro-batch, not all of them."""
    scenario = case(
        {"pp": 4, "layers_per_stage": [3, 1, 3, 3]},
        {"global_batch_size": 16, "seq_len": 128, "gradient_clipping": False},
        {"layers": 10, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128},
        FREE_LINKS,
    )
    profile = even_profile(scenario, LAYER_S)
    lost = simulate(with_faults(scenario, slow(1, 1.3)), profile).step_time_s - simulate(scenario, profile).step_time_s
    assert lost == pytest.approx(0.3 * 3 * LAYER_S, rel=1e-3)


NONE = [
    None,
    {},
    slow(1, 1.0),
    {"links": [{"between": ["node0", "node0"], "bandwidth_scale": 1.0}]},
    {"jitter": {"sigma": 0.0}},
    {"failures": {}},
]


@pytest.mark.parametrize(
    "parallelism",
    [
        {"dp": 8, "zero": 3},
        {"tp": 2, "pp": 2, "dp": 2},
        {"cp": 4, "cp_split": "contiguous"},
        {"pp": 4, "schedule": "zb_h1"},
    ],
)
def test_faults_that_are_off_change_no_bit(parallelism: dict[str, Any]) -> None:
    scenario = case(parallelism, {"global_batch_size": 16})
    results = []
    for faults in NONE:
        result = simulate(with_faults(scenario, faults)).result
        result["engine"].pop("wall_s")
        result["scenario"].pop("faults")
        results.append(result)
    assert all(r == results[0] for r in results)
    assert results[0]["blame"] == results[0]["waiting"] == []


OFF = {
    "stragglers": [{"rank": 0, "compute_scale": 1.0}],
    "failures": {},
    "jitter": {"sigma": 0.0, "seed": 3},
    "links": [{"between": ["node0", "node0"], "bandwidth_scale": 1.0}],
}
KINDS_OF_RUN = (  # one shipped scenario for each way in which a workload is simulated
    "1f1b_pp8",
    "captured_stablelm",
    "collectives_messages",
    "contention_spine",
    "distill_logits_apart",
    "distill_sequence",
    "hsdp_llama8b_dp64",
    "network_mixed",
    "network_torus",
    "offload_llama8b",
    "processes_dp16",
    "rl_grpo_llama8b",
    "serve_batch1",
    "serve_context_parallel",
    "serve_disaggregated_llama70b",
    "serve_static_a100",
    "serve_tiers",
    "sft_lora_llama70b",
    "shared_network",
    "ulysses_131k",
    "uneven_pp8",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_OF_RUN)
def test_faults_that_are_off_change_no_bit_of_any_kind_of_run(name: str) -> None:
    """Every start and end, and the whole result; pools of their own and rl take no faults."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    if scenario.rl is not None:
        with pytest.raises(InputError, match="faults: cannot be combined with rl"):
            with_faults(scenario, OFF)
        return
    if scenario.inference is not None and scenario.inference.disaggregated is not None:
        with pytest.raises(InputError, match=r"faults: is not simulated with inference\.disaggregated"):
            with_faults(scenario, OFF)
        return
    found = []
    for faults in (None, OFF):
        s = with_faults(scenario, faults)
        if s.inference is not None:
            served = simulate_serving(s)
            found.append((served.result, [r.iterations for r in served.replicas]))
        else:
            sim = simulate(s)
            found.append((sim.result, [sim.times.start_s.tolist(), sim.times.end_s.tolist()]))
        found[-1][0]["engine"].pop("wall_s")
        found[-1][0]["scenario"].pop("faults")
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", FORMS)
def test_faults_that_are_off_change_no_bit_of_any_schedule(schedule: str) -> None:
    parallelism = {"pp": 4, "dp": 2, "schedule": schedule}
    scenario = case(parallelism, {"global_batch_size": 16})
    healthy, off = (simulate(with_faults(scenario, faults)) for faults in (None, OFF))
    assert healthy.times == off.times
    hit = simulate(with_faults(scenario, slow(3, 1.3)))
    assert hit.step_time_s > healthy.step_time_s


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["tp", "dp_cp", "model"]),
    st.integers(0, 31),
    st.sampled_from(["h100-sxm", "roofline"]),
)
def test_only_groups_that_use_a_slow_link_are_slower(a: int, b: int, group: str, rank: int, profile: str) -> None:
    base = case({"tp": 4, "pp": 2, "dp": 4}, calibration=profile)
    scenario = with_faults(base, links(a, b, 0.25))
    plan, costs = make_plan(scenario), Costs(load_profile(profile), scenario.cluster.gpu)
    pricing = Pricing(plan, costs, Network(scenario.cluster, link_scales(scenario)))
    comm = Comm("message", "all_reduce", group, 1e9, Phase.FORWARD)
    faulty_s, healthy_s = pricing.comm(comm, rank).seconds, pricing.healthy.comm(comm, rank).seconds
    nodes = [r // 8 for r in plan.group(group, rank)]
    steps = {tuple(sorted(pair)) for pair in zip(nodes, [*nodes[1:], nodes[0]], strict=True)}
    if tuple(sorted((a, b))) not in steps and not {a, b} <= set(nodes):
        assert faulty_s == healthy_s
    elif tuple(sorted((a, b))) in steps and len(set(nodes)) == 1:
        assert faulty_s == pytest.approx(4 * healthy_s, rel=0.1)
    else:
        assert faulty_s >= healthy_s


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 8), st.floats(0.01, 0.3), st.integers(0, 1000))
def test_jitter_costs_the_largest_draw(dp: int, sigma: float, seed: int) -> None:
    """One forward, one backward and the optimizer on each rank, free links: the step is the slowest rank's own time up
    to the all-reduce, then the slowest optimizer's."""
    scenario = case({"dp": dp, "dp_sync": "after_backward"}, {"global_batch_size": dp}, cluster=FREE_LINKS)
    sim = simulate(with_faults(scenario, {"jitter": {"sigma": sigma, "seed": seed}}))
    assert len(sim.plan.classes) == dp
    (forward, backward), healthy_s = (list(simulate(scenario).spans[0].values()), simulate(scenario).step_time_s)
    f, b = forward[1] - forward[0], backward[1] - backward[0]
    draws = [Jitter(sigma, seed, rank) for rank in range(dp)]
    actions = [f * d.draw() + b * d.draw() for d in draws]
    optimizer = [(healthy_s - f - b) * d.draw() for d in draws]
    assert sim.step_time_s == pytest.approx(max(actions) + max(optimizer), rel=1e-6)
    again = simulate(with_faults(scenario, {"jitter": {"sigma": sigma, "seed": seed}}))
    assert np.array_equal(again.times.end_s, sim.times.end_s)


def test_jitter_of_a_measured_run_draws_what_was_measured(tmp_path: Path) -> None:
    """Half of the computations took 0.8 and half 1.2 of their mean: so do those simulated, and no other factor."""
    run, _ = recorded(small())
    for a in run["actions"]:
        if a["kind"] in ("F", "B"):
            a["end_s"] = a["start_s"] + (0.8 if a["micro_batch"] % 2 else 1.2) * 1e-3 * (1 + 7 * a["rank"])
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    scenario = parse_scenario({**small().model_dump(mode="json"), "faults": {"jitter": {"measured": str(file)}}})
    assert scenario.faults is not None
    assert scenario.faults.jitter is not None
    assert sorted(set(np.round(scenario.faults.jitter.factors, 9))) == [0.8, 1.2]
    file.unlink()  # what was read stays with the scenario
    assert parse_scenario(scenario.model_dump(mode="json")).faults == scenario.faults
    healthy, sim = simulate(small()), simulate(scenario)
    ratios = set()
    for before, after in zip(healthy.spans, sim.spans, strict=True):
        ratios |= {round((after[a][1] - after[a][0]) / (before[a][1] - before[a][0]), 6) for a in before}
    assert ratios == {0.8, 1.2}
    assert blame_of(sim).keys() == {"jitter as measured", "all faults"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"actions": []}, "no computation of one rank and stage twice"),
        ({"format": "x"}, "format"),
        (None, "no such file"),
    ],
)
def test_runs_that_tell_no_jitter_are_refused(change: dict[str, Any] | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    if change is not None:
        file.write_text(json.dumps(recorded(small())[0] | change))
    with pytest.raises(InputError, match=problem):
        with_faults(small(), {"jitter": {"measured": str(file)}})


def blame_of(simulation: Simulation) -> dict[str, float]:
    return {row["cause"].split(",")[0]: row["lost_s"] for row in simulation.result["blame"]}


def test_blame_is_what_taking_a_fault_away_saves() -> None:
    scenario = case({"dp": 4}, {"global_batch_size": 16})
    healthy_s = simulate(scenario).step_time_s
    one = simulate(with_faults(scenario, slow(2, 1.5)))
    assert blame_of(one) == {"rank 2": one.step_time_s - healthy_s, "all faults": one.step_time_s - healthy_s}
    faults = {"stragglers": [{"rank": r, "compute_scale": s} for r, s in ((0, 1.5), (1, 1.5), (3, 1.1))]}
    hidden = blame_of(simulate(with_faults(scenario, faults)))  # two equally slow: either alone is to no avail
    assert [hidden[f"rank {r}"] for r in (0, 1, 3)] == [0.0, 0.0, 0.0]
    assert hidden["all faults"] == pytest.approx(one.step_time_s - healthy_s)


def test_a_slow_node_is_each_of_its_ranks_and_one_cause() -> None:
    scenario = case({"dp": 16}, {"global_batch_size": 16})
    node = simulate(with_faults(scenario, {"stragglers": [{"node": "node1", "compute_scale": 1.1}]}))
    ranks = {"stragglers": [{"rank": rank, "compute_scale": 1.1} for rank in range(8, 16)]}
    assert node.step_time_s == simulate(with_faults(scenario, ranks)).step_time_s
    lost_s = node.step_time_s - simulate(scenario).step_time_s
    assert blame_of(node) == {"node1": lost_s, "all faults": lost_s}
    assert lost_s > 0


def test_many_faults_are_blamed_together_after_the_first_ones() -> None:
    scenario = case({"dp": 32}, {"global_batch_size": 32})
    faults = {"stragglers": [{"rank": r, "compute_scale": 1 + r / 100} for r in range(1, 25)]}
    rows = simulate(with_faults(scenario, faults)).result["blame"]
    assert [r["kind"] for r in rows] == ["straggler"] * 16 + ["rest", "all"]
    assert rows[-2]["lost_s"] > 0 == rows[0]["lost_s"]


def test_those_together_are_none_of_the_first_ones() -> None:
    slow_ranks = [{"rank": r, "compute_scale": 1.5} for r in range(15)]
    faults = {"stragglers": slow_ranks, "jitter": {"sigma": 0.1}, "network_jitter": {"sigma": 0.2}}
    found = causes(with_faults(case({"dp": 32}, {"global_batch_size": 32}), faults))
    assert [c.kind for c in found] == ["straggler"] * 15 + ["jitter", "rest", "all"]
    rest = found[-2].without
    assert rest is not None
    assert rest.network_jitter is not None
    assert rest.network_jitter.sigma == 0  # a network of its own
    assert rest.jitter is not None
    assert len(rest.stragglers) == 15


def test_the_summary_shows_the_blame_and_who_waits() -> None:
    from sim.views.summary import print_summary
    from sim.views.terminal import Terminal

    out = io.StringIO()
    print_summary(simulate(with_faults(case({"tp": 2}), slow(1, 1.3))).outcome, Terminal(120, file=out))
    text = out.getvalue()
    assert "rank 1, computing 1.3 times as long" in text
    assert "wait for" in text


def test_no_number_of_a_rank_is_cut_in_80_columns() -> None:
    """Classes that a straggler tells apart have long names."""
    from sim.views.summary import print_summary
    from sim.views.terminal import Terminal

    out = io.StringIO()
    scenario = case({"tp": 8, "pp": 4, "dp": 2}, {"global_batch_size": 8})
    print_summary(simulate(with_faults(scenario, slow(11, 1.3))).outcome, Terminal(80, file=out))
    (line,) = [x for x in out.getvalue().splitlines() if x.startswith("ranks 8–10, 12–15 ") and "█" in x]
    assert "…" not in line


def test_the_page_shows_the_blame_and_who_waits() -> None:
    from sim.views.timeline_page import timeline_page

    sim = simulate(with_faults(case({"tp": 2}), slow(1, 1.3)))
    page = timeline_page(sim.outcome, sim.timeline, sim.memory)
    assert page.index("Lost to faults") < page.index('<section id="faults">') < page.index("Memory of <select")
    section = page[page.index('<section id="faults">') :].partition("</section></div>")[0]
    assert "rank 1, computing 1.3 times as long" in section
    assert "<td>rank 0</td><td>rank 1</td>" in section
    healthy = simulate(case({"tp": 2}))
    assert '<section id="faults">' not in timeline_page(healthy.outcome, healthy.timeline, healthy.memory)


def test_faults_that_unfold_too_much_are_refused() -> None:
    scenario = case({"dp": 4096, "pp": 8}, {"global_batch_size": 4096 * 64})
    faults = {"stragglers": [{"rank": r, "compute_scale": 1 + r * 1e-6} for r in range(1, 4096)]}
    with pytest.raises(InputError, match="faults: 4,096 ranks of each of"):
        simulate(with_faults(scenario, faults))
