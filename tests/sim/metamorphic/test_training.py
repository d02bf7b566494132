"""What must hold between training steps that differ in one thing, whatever the rest of them is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.schedules import FORMS
from sim.simulation import simulate
from tests.sim.metamorphic.laws import run, vary

SCHEDULES = tuple(FORMS)
CLUSTERS = ["dgx-v100", "dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72"]
FEW = settings(max_examples=12, deadline=None)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A legal training step, dense or with experts, of up to 512 ranks."""
    tp, pp, dp = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    cp, cluster = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from(CLUSTERS))
    experts = draw(st.booleans())
    rounds = draw(st.sampled_from([1, 2])) * (2 * pp if pp > 1 else 1)
    parallelism: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "sp": tp > 1 and draw(st.booleans()),
        "zero": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "tp_overlap": draw(st.sampled_from(["none", "wgrad"])),
        "dp_sync": draw(st.sampled_from(["bucketed", "after_backward"])),
        "cp_method": draw(st.sampled_from(["ring", "all_gather", "all_to_all"])),
        "ep": draw(st.sampled_from([d for d in (1, 2, 8) if (tp * cp * dp) % d == 0])) if experts else 1,
    }
    return {
        "model": {"preset": "qwen3-30b-a3b" if experts else "llama3-8b", "layers": 2 * pp},
        "cluster": {"preset": cluster},
        "training": {
            "seq_len": draw(st.sampled_from([1024, 4096])),
            "global_batch_size": dp * rounds,
            "precision": "fp16" if cluster == "dgx-v100" else "bf16",
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "attention": draw(st.sampled_from(["fused", "unfused"])),
            "framework": draw(st.sampled_from(["eager", "megatron", "compiled"])),
        },
        "parallelism": parallelism,
    }


@FEW
@given(scenario=scenarios())
def test_more_work_is_never_faster_nor_smaller(scenario: dict[str, Any]) -> None:
    base = run(**scenario)
    for path in ("training__seq_len", "training__global_batch_size", "model__layers"):
        section, key = path.split("__")
        more = vary(scenario, **{path: 2 * scenario[section][key]})
        assert more["step_time_s"] > base["step_time_s"], path
        assert more["peak_memory_bytes"] >= base["peak_memory_bytes"] * 0.999, path
        if key == "global_batch_size":  # what a step does once is shared by more tokens
            assert more["tokens_per_s"] >= base["tokens_per_s"] * 0.995


@FEW
@given(scenario=scenarios())
def test_memory_for_time(scenario: dict[str, Any]) -> None:
    none, selective, full = (vary(scenario, training__recompute=mode) for mode in ("none", "selective", "full"))
    assert none["step_time_s"] <= selective["step_time_s"] * 1.001
    assert selective["step_time_s"] <= full["step_time_s"] * 1.001
    assert full["peak_memory_bytes"] <= selective["peak_memory_bytes"] * 1.001
    assert selective["peak_memory_bytes"] <= none["peak_memory_bytes"] * 1.001
    assert none["hfu"] == none["mfu"]
    assert full["hfu"] > full["mfu"]
    again = vary(scenario, training__recompute={"mode": "full", "every": 1})
    assert again["step_time_s"] == full["step_time_s"]


@FEW
@given(scenario=scenarios())
def test_zero_divides_more_and_more(scenario: dict[str, Any]) -> None:
    held = [vary(scenario, parallelism__zero=z)["memory"] for z in range(4)]
    for name, from_stage in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        sizes = [sum(row[name] * row["count"] for row in rows) for rows in held]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[from_stage - 1] == sizes[0]
        if scenario["parallelism"]["dp"] > 1:
            assert sizes[from_stage] < sizes[0]


@FEW
@given(scenario=scenarios())
def test_what_has_no_effect_changes_nothing(scenario: dict[str, Any]) -> None:
    base = run(**scenario)["step_time_s"]
    nodes = run(**scenario)["scenario"]["cluster"]["nodes"]
    assert vary(scenario, cluster__nodes=2 * nodes)["step_time_s"] == pytest.approx(base, rel=1e-9)
    assert vary(scenario, cluster__gpu={"memory_bytes": 10**12})["step_time_s"] == base
    assert vary(scenario, faults={"stragglers": [{"rank": 0, "compute_scale": 1.0}]})["step_time_s"] == pytest.approx(
        base
    )
    assert vary(scenario, faults={"jitter": {"sigma": 0.0}})["step_time_s"] == pytest.approx(base)
    turned = {k: dict(reversed(v.items())) for k, v in reversed(scenario.items())}
    assert run(**turned)["step_time_s"] == base


@FEW
@given(scenario=scenarios())
def test_twice_the_replicas_and_the_batch_take_as_long_and_what_more_is_sent(scenario: dict[str, Any]) -> None:
    base = run(**scenario)
    more = {
        "parallelism": {"dp": 2 * scenario["parallelism"]["dp"]},
        "training": {"global_batch_size": 2 * scenario["training"]["global_batch_size"]},
    }
    wide = run(**merge(scenario, more))
    saved = base["critical_path"].get("OPTIMIZER", 0.0)  # its states may be divided by more
    # On the V100's mesh four GPUs have four times the links of two, and a larger group may lie better in racks of 72.
    if scenario["cluster"]["preset"] not in ("dgx-v100", "gb200-nvl72"):
        assert wide["step_time_s"] >= (base["step_time_s"] - saved) * 0.99
    assert wide["peak_memory_bytes"] <= base["peak_memory_bytes"] * 1.001
    if scenario["parallelism"]["zero"] == 0 and scenario["parallelism"]["ep"] == 1:
        assert wide["compute_s"] == pytest.approx(base["compute_s"], rel=0.1)


@FEW
@given(scenario=scenarios())
def test_every_way_of_running_a_step_gives_its_figures(scenario: dict[str, Any]) -> None:
    """With a task for each operator; with each rank by itself."""
    step = simulate(parse_scenario(scenario), engine="static")
    again = step.scenario
    fine = simulate(again, engine="static", expand=True)
    assert fine.step_time_s == pytest.approx(step.step_time_s, rel=1e-9)
    if again.ranks <= 16:
        apart = simulate(again, engine="static", expand=True, fold=False)
        assert apart.step_time_s == fine.step_time_s
        for key in ("peak_memory_bytes", "compute_s", "exposed_comm_s", "bubble_fraction"):
            assert apart.result[key] == pytest.approx(step.result[key], rel=1e-9, abs=1e-12), key


@FEW
@given(m=st.sampled_from([4, 8]), p=st.sampled_from([2, 4]), cluster=st.sampled_from(CLUSTERS[1:]))
def test_schedules_in_order_of_their_bubbles(m: int, p: int, cluster: str) -> None:
    free = {
        "inter_node": {"nic_bandwidth_bytes_per_s": 1e15, "latency_s": 0.0},
        "intra_node": {"bandwidth_bytes_per_s": 1e15, "latency_s": 0.0},
    }
    scenario = {
        "model": {"preset": "llama2-7b", "layers": 4 * p, "vocab": 1024},
        "cluster": {"preset": cluster, **free},
        "training": {"seq_len": 2048, "global_batch_size": m * p, "framework": "compiled"},
        "parallelism": {"pp": p},
    }

    def step_s(schedule: str, **keys: Any) -> float:
        return float(
            vary(scenario, parallelism={"pp": p, "schedule": schedule, "p2p_overlap": None, **keys})["step_time_s"]
        )

    one, two = step_s("1f1b"), step_s("interleaved_1f1b")
    assert step_s("gpipe") < step_s("naive")
    assert one <= step_s("gpipe") * 1.001
    assert two < one
    assert step_s("interleaved_1f1b", virtual_stages=4) < two
    assert step_s("zb_h1") < one
    assert step_s("zb_v") < step_s("zb_h1")


def test_data_parallel_traffic_is_what_each_zero_stage_sends() -> None:
    rounds, ranks, params = 4, 8, 8_030_261_248
    sent = {}
    for zero in range(4):
        rows = run(
            model="llama3-8b",
            cluster="dgx-h100",
            training={"seq_len": 1024, "global_batch_size": ranks * rounds, "grad_dtype": "bf16"},
            parallelism={"dp": ranks, "zero": zero},
        )["communication"]
        passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        sent[zero] = sum(passes[r["kind"]] * r["bytes"] for r in rows) / (2 * params)
    assert sent == pytest.approx({0: 2, 1: 2, 2: rounds + 1, 3: 3 * rounds}, rel=0.001)
